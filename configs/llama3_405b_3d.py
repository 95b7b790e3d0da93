"""Llama 3's 405B shapes over data 8, pipe 8, context 2 and model 8 on 1,024 GPUs, stage 2, sequences of 8,192 tokens.

    srun python -m zerojax.train --config configs/llama3_405b_3d.py --workdir /shared/runs/405b --config.data.name=random

Devices: 1,024 GPUs of 80 GB or more in hosts of 8. The plan for H200s, made when the head's time was counted too short: 42 to 47 GiB on
the devices of a group, and a bubble of 19.6%, where 17.9% is that of equal stages: 126 layers and the head do not divide by 8. Gradients
of each of the 32 micro-batches travel between hosts, 797 GB a device and step, so at 400 Gb/s a step takes 43 s, an MFU of 12%. Nobody
has measured it. Text: as configs/llama3_1b.py. Result: as there.
"""

from zerojax.configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "llama3_405b"
    c.mesh.pipe, c.mesh.context, c.mesh.model = 8, 2, 8
    c.zero.stage = 2  # gradients of each micro-batch are reduce-scattered, which is half of an all-reduce
    c.model.remat = "full"
    c.seq_len = 8192
    c.global_batch_size, c.micro_batch_size, c.grad_accum = 0, 1, 32
    return c
