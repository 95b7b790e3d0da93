"""The tensor-parallel plan of a family. This module holds its form, and the rows that families share.

Attention is sharded by heads and the MLP by its width: the matmuls that read the residual stream by columns, those that write it by rows.
The embedding and the output projection are sharded by vocabulary. Between matmuls activations are sharded over examples if the axis
divides those of a device, and else over tokens (sequence parallelism). Megatron-LM: arXiv:1909.08053 and arXiv:2205.05198.
"""

from typing import NamedTuple

Table = tuple[tuple[str, tuple], ...]  # (regex, (mesh axis or None for each dim)), ordered

TOKENS = ("model", "model")  # [batch, tokens, ...]; one of the two: see `zero.blocks.tensor_parallel`
ALL_TOKENS = (None, None)
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
    (r"/(qkv|gate_up)/kernel(?!/(block_)?scales)", (None, None, "model")),
    (r"/(qkv|gate_up)/bias", (None, "model")),
)
# Layers in which tokens remember others: heads of states, or channels
RECURRENT: Table = (
    (
        r"/(delta|mamba|mixer)/(qkvz|ba|keys|z|b|a|in_proj)/(kernel|lora_b)",
        (None, "model"),
    ),  # [inputs, groups or outputs, ...]
    (r"/(delta|mamba|mixer)/(out|out_proj)/(kernel|lora_a)|/(mamba|mixer)/(norm/scale|in_proj/bias)", ("model",)),
    (r"/(delta|mamba|mixer)/(A_log|dt_bias|D)$", ("model",)),
    (r"/(delta|mamba|mixer)/conv/", (None,)),  # its channels are of parts whose shards are not neighbours
    (r"/convolution/in_proj/kernel(?!/(block_)?scales)", (None, None, "model")),  # [inputs, parts, channels]
    (r"/convolution/in_proj/bias", (None, "model")),
    (r"/convolution/(conv/|out_proj/(kernel|lora_a))", ("model",)),
)
OF_RECURRENT: tuple[tuple, ...] = (
    (r".*/(delta|mamba|mixer)/(qkvz|ba|keys|z|b|a|in_proj|norm)", (None, None, "model")),
    (r".*/convolution/in_proj", (None, None, None, "model")),
    (r".*/(delta|mamba|mixer|convolution)/conv", (None, None, "model")),
    (r"layer_\d+/(delta|mamba|mixer|convolution)", TOKENS, ALL_TOKENS),
)
HEADS: Table = ((r".*/(q|k|v|q_norm|k_norm)", (None, None, "model")),)  # [batch, tokens, heads, width]
WIDTH: Table = ((r".*/(gate|up)", (None, None, "model")),)  # [batch, tokens, width]
FUSED: Table = ((r".*/(qkv|gate_up)", (None, None, None, "model")),)  # [batch, tokens, parts, heads or width, ...]
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
