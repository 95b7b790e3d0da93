"""The table of families. This module names each family once. A preset's name selects its family."""

from zerojax.models import family
from zerojax.models.bart import family as bart
from zerojax.models.bert import family as bert
from zerojax.models.llama import family as llama
from zerojax.models.llama import gpt2
from zerojax.models.mamba2 import family as mamba2
from zerojax.models.t5 import family as t5

FAMILIES: tuple[family.Family, ...] = (
    llama.FAMILY,
    llama.NEMOTRON,
    gpt2.FAMILY,
    t5.FAMILY,
    bart.FAMILY,
    bart.MARIAN,
    bert.FAMILY,
    bert.ROBERTA,
    mamba2.FAMILY,
    bert.XLM_ROBERTA,
    bert.DISTILBERT,
    bert.MODERNBERT,
)

# preset -> its family
PRESETS: dict[str, family.Family] = {preset: found for found in FAMILIES for preset in found.presets}

# model_type in Hugging Face's config.json -> its family
MODEL_TYPES: dict[str, family.Family] = {name: found for found in FAMILIES for name in found.huggingface.architectures}
