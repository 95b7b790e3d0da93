"""Says what a weight is: a bias, a norm's scale, an embedding, a matrix. This module holds the table of kinds, and which of them decay.

A weight's name is the last part of its path, and its module's name the part before. Numbers, and the "value" that ends NNX's paths, are no
names. Weight decay and Muon ask this table, and so do the readers of DeepSpeed's groups.
"""

import math
import re
from collections.abc import Sequence

import jax

from zerojax import tree
from zerojax.tree import PyTree

BIAS, NORM, SINK, VECTOR = "bias", "norm", "sink", "vector"
EMBEDDING, HEAD, ADAPTER, MATRIX = "embedding", "head", "adapter", "matrix"

_NORM = r"(norm(?!al(?!i))|(?<![a-z])(ln|bn|gn)f?(?![a-z]))"  # in LayerNorm_0, attention_norm, batch_normalization; ln_f, bn1
# (kind, the most dims, a regex over names), the first that matches.
KINDS: tuple[tuple[str, float, str], ...] = (
    (BIAS, math.inf, r"bias[^/]*(/[^/]*)?$|(^|(?<!lora)/)(?-i:b)$|(^|/)(beta|offset)$"),
    (NORM, math.inf, rf"(scale|gamma)$|{_NORM}[^/]*(/(?!w$|[^/]*kernel)[^/]*)?$"),
    (SINK, math.inf, r"(^|/)sinks$"),  # of attention: a score for each head
    (VECTOR, 1, r""),
    (EMBEDDING, math.inf, r"embed|position|vocab|(^|/)w[tp]e(/|$)"),
    (HEAD, math.inf, r"(^|/)(lm_)?head(/|$)"),
    (ADAPTER, math.inf, r"lora"),
    (MATRIX, math.inf, r""),
)
SPARED = (BIAS, NORM, VECTOR)  # from weight decay
# Stacks of `nn.scan` and `vmap`: the first dim counts layers.
STACKS = r"(^|/)(layers|blocks|stack)/(?!\d)"
_OF_MATRICES = r"(kernel|embedding|(^|/)w)$"  # names of weights that have inputs and outputs, in a stack or not


def of(path: str, shape: Sequence[int]) -> str:
    """Returns the kind of a weight, a name in `KINDS`.

    Args:
      path: its path, with "/" between parts, or with "." as in PyTorch.
      shape: its shape.

    >>> of("layer_0/attention/q/bias", (4, 16)), of("h.0.ln_1.weight", (64,)), of("mlp/up/kernel", (64, 256))
    ('bias', 'norm', 'matrix')
    """
    path = path.replace(".", "/")
    parts = without_value(path).split("/")
    names = "/".join(part for part in parts if not part.isdigit())
    is_numbered = len(names) < len("/".join(parts))  # so its layers are no stack
    is_of_stack = not is_numbered and re.search(STACKS, path) and not re.search(_OF_MATRICES, names, re.I)
    dims = len(shape) - bool(is_of_stack)
    return next(kind for kind, most, pattern in KINDS if dims <= most and re.search(pattern, names, re.I))


def without_value(path: str) -> str:
    """Returns a weight's path without the "value" that NNX adds.

    >>> without_value("attn/value/kernel/value")
    'attn/value/kernel'
    """
    return path.removesuffix("/value")


def weight_kinds(params: PyTree) -> PyTree:
    """Returns the kind of each weight: "bias", "norm" (its scale), "sink", "vector", "embedding", "head", "adapter" or "matrix".

    A weight's names decide, and its dims where no name tells. The result labels weights for `optax.partition`, for rates by kind.

    Args:
      params: any pytree of arrays or ShapeDtypeStructs.

    >>> weight_kinds({"query": {"kernel": jnp.ones((64, 4, 16)), "bias": jnp.ones((4, 16))}})
    {'query': {'bias': 'bias', 'kernel': 'matrix'}}
    """
    return tree.map_with_path(lambda path, leaf: of(path, jax.numpy.shape(leaf)), params)


def decayed(params: PyTree) -> PyTree:
    """Returns for each weight whether it decays: all but biases, norms and other vectors, as in transformers' Trainer.

    >>> tx = optax.adamw(3e-4, weight_decay=0.1, mask=zerojax.decayed)
    """
    return jax.tree.map(lambda kind: kind not in SPARED, weight_kinds(params))
