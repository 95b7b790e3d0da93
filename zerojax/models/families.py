"""The table of families. This module names each family once; whoever needs one finds it by a preset's name."""

from zerojax.models import family
from zerojax.models.llama import family as llama

FAMILIES: tuple[family.Family, ...] = (llama.FAMILY,)

# preset -> its family
PRESETS: dict[str, family.Family] = {preset: found for found in FAMILIES for preset in found.presets}
