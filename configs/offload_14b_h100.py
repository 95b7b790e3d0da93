"""Qwen2.5's 14B shapes on one GPU of 80 GB: 16-bit weights and moments in host memory, fetched block by block.

    python -m zerojax.train --config configs/offload_14b_h100.py --config.data.name=random --config.steps=5

Devices: 1 GPU with 80 GB, and a host with 110 GB of free memory: 6 bytes a weight, and the chunks in flight. 32 passes make up 524,288
tokens a step. The sums of gradients, 4 bytes a weight, are on the device. Weights are rounded stochastically and have no float32 masters.
Result: not yet run at this size. On random tokens the loss should fall as that of configs/llama3_1b.py. See docs/offload.md.
"""

from configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "qwen2_14b"
    c.model.remat = "full"
    c.seq_len = 1024
    c.micro_batch_size, c.grad_accum, c.global_batch_size = 16, 32, 0
    c.precision = "bf16_sr"
    c.optimizer.moments = "bf16"
    c.offload.optimizer = c.offload.params = "host"
    c.evaluate.every = c.checkpoint.every = 0
    c.checkpoint.at_end = False  # 89 GB, and as much host memory again while it is written
    return c
