"""Qwen2.5's 14B shapes on one GPU of 80 GB: 16-bit weights and moments in host memory, fetched block by block.

    python -m zerojax.train --config configs/offload_14b_h100.py --config.data.name=random --config.steps=5

Devices: 1 GPU with 80 GB, and a host with 110 GB of free memory: 6 bytes a weight, and the chunks in flight. 64 passes make up 524,288
tokens a step. On the device are the sums of gradients, 2 bytes a weight, and a fifth of the weights, so that the link keeps up.
Weights and sums are rounded stochastically, and there are no float32 masters. Gradients are not clipped: the norm is known at the end of
the backward pass, until when all gradients would wait in float32.
Result: not yet run at this size. The loss needs 5.7 GB of device memory in one piece, so some 12 GB are left free (docs/offload.md). On
random tokens the loss should fall as that of configs/llama3_1b.py.
"""

from configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "qwen2_14b"
    c.model.recompute = r"layer_\d+/mlp/(up|gate)"
    c.seq_len = 1024
    c.micro_batch_size, c.grad_accum, c.global_batch_size = 8, 64, 0
    c.precision = "bf16_sr"
    c.optimizer.moments = c.accum_dtype = "bf16"
    c.optimizer.clip_norm = 0.0
    c.offload.optimizer = c.offload.params = "host"
    c.offload.params_fraction = 0.8
    c.evaluate.every = c.checkpoint.every = 0
    c.checkpoint.at_end = False  # 89 GB, and as much host memory again while it is written
    return c
