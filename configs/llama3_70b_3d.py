"""Llama 3's 70B shapes over data 2, pipe 4 and model 8 on 64 GPUs in hosts of 8, stage 1, sequences of 8,192 tokens.

    srun python -m zerojax.train --config configs/llama3_70b_3d.py --workdir /shared/runs/70b --config.data.name=random

Devices: 64 GPUs of 80 GB or more in hosts of 8. The plan for H100s (--target h100 --topology 8x8) has at most 41.1 GiB on a device and a
step of 10.7 s (769 tokens/s/GPU, 34.9% MFU); the bubble is 10.7%, that of equal stages 8.6%. Nobody has measured it. Text: as
configs/llama3_1b.py. Result: as there.
"""

from zerojax.configs import llama3_70b


def get_config():
    c = llama3_70b.get_config()
    c.mesh.pipe, c.mesh.model = 4, 8  # `model` inside a host; hosts send what layers return and gradients
    c.zero.stage = 1
    c.model.remat = "dots"
    c.global_batch_size, c.micro_batch_size, c.grad_accum = 0, 1, 32
    return c
