"""The table of families. This module names each family once. A preset's name selects its family."""

from zerojax.models import family
from zerojax.models.llama import family as llama
from zerojax.models.t5 import family as t5

FAMILIES: tuple[family.Family, ...] = (llama.FAMILY, t5.FAMILY)

# preset -> its family
PRESETS: dict[str, family.Family] = {preset: found for found in FAMILIES for preset in found.presets}
