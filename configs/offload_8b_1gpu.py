"""Llama 3's 8B shapes on one GPU: 16-bit weights and gradients on the device, master weights and moments in host memory.

    python -m zerojax.train --config configs/offload_8b_1gpu.py --config.data.name=random --config.steps=20

Devices: 1 GPU with 80 GB or more, and a host with 130 GB of free memory: 12 bytes a weight, the chunks in flight, and what XLA's pool of
pinned memory wastes. 16 passes make up 65,536 tokens a step, beside which the optimizer state passes over the link to the host once. With
--config.offload.late_norm=True it passes beside the last backward pass, and gradients are clipped by the norm of the step before.
Result: 8,560 tokens/s and 69.7 GiB on one H200, and on random tokens the loss falls as that of configs/llama3_1b.py. An H200 has room for
--config.zero.stage=3 --config.model.remat=dots --config.micro_batch_size=4 --config.grad_accum=4: 9,718 tokens/s and 113 GiB. For memory
and the least step time add --target h200 --topology 1x1 to the command of python -m zerojax.plan.
"""

from zerojax.configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "llama3_8b"
    c.micro_batch_size, c.grad_accum, c.global_batch_size = 1, 16, 0
    c.zero.stage = (
        2  # a 16-bit copy of the weights on the device; stage 3 keeps the float32 weights there, and has no copy
    )
    c.offload.optimizer = "host"
    c.evaluate.every = c.checkpoint.every = 0
    c.checkpoint.at_end = False  # 96 GB, and as much host memory again while it is written
    return c
