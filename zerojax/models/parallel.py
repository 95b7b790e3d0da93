"""The tensor-parallel plan of a family. This module holds its form, and the rows that families share.

Attention is sharded by heads and the MLP by its width: the matmuls that read the residual stream by columns, those that write it by rows.
The embedding and the output projection are sharded by vocabulary. Between matmuls activations are sharded over examples if the axis
divides those of a device, and else over tokens (sequence parallelism). Megatron-LM: arXiv:1909.08053 and arXiv:2205.05198.
"""

from typing import NamedTuple

Table = tuple[tuple[str, tuple], ...]  # (regex, (mesh axis or None for each dim)), ordered

WEIGHTS: Table = (
    (r"embed/embedding", ("model",)),
    (r"head/kernel", (None, "model")),
    (r"/(q|k|v|gate|up)/(kernel|lora_b)", (None, "model")),
    (r"/(q|k|v|gate|up)/bias", ("model",)),
    (r"/(o|down)/(kernel|lora_a)", ("model",)),
    (r"/experts/(gate|up)(/|_adapter/lora_b|$)", ("expert", None, "model")),  # [experts, inputs, width]
    (r"/experts/down(/|(_of_all)?_adapter/lora_a|$)", ("expert", "model")),
    (r"/experts/gate_and_up_adapter/lora_b", ("expert", None, None, "model")),  # [experts, rank, 2, width]
    (r"/experts/(?!router)\w+_adapter/", ("expert",)),
    # [inputs, parts, heads or width, ...]; scales of a quantized one are [inputs, blocks], which run over parts too
    (r"/(qkv|gate_up)/kernel(?!/scales)", (None, None, "model")),
    (r"/(qkv|gate_up)/bias", (None, "model")),
)
HEADS: Table = ((r".*/(q|k|v|q_norm|k_norm)", (None, None, "model")),)  # [batch, tokens, heads, width]
WIDTH: Table = ((r".*/(gate|up)", (None, None, "model")),)  # [batch, tokens, width]
FUSED: Table = ((r".*/(qkv|gate_up)", (None, None, None, "model")),)  # [batch, tokens, parts, heads or width, ...]
TOKENS = ("model", "model")  # [batch, tokens, ...]; one of the two: see `zero.blocks.tensor_parallel`
ALL_TOKENS = (None, None)
# Paths of weights in a module that treats each example on its own and whose shards each return a term of a sum; see `blocks.ring_matmuls`.
OF_RINGS = r"(q|k|v|gate|up|gate_up)/(kernel|bias|lora_[ab])|(o|down)/(kernel|lora_[ab])|(q|k)_norm/scale"


class Parallel(NamedTuple):
    """The plan.

    Attributes:
      weights: regexes over paths of weights, as of `zero.overrides`.
      activations: regexes over full paths of modules, for what these read and return; see `make_train_step`.
    """

    weights: Table = ()
    activations: tuple[tuple, ...] = ()
