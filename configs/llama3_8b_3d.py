"""Llama 3's 8B shapes over data 2, pipe 2 and model 2 on the 8 GPUs of a host, stage 1, sequences of 8,192 tokens.

    python -m zerojax.train --config configs/llama3_8b_3d.py --config.data.name=random

Devices: 8 GPUs of 80 GB or more, of one host, in one process. On GPUs whose rates are known the first group has 17 layers, and the second
15 and the head: the plan for H200s has 40.2 and 32.9 GB on their devices, a step of 3.60 s (9,090 tokens/s/GPU), and a bubble of 6.8%,
where 5.9% is that of equal stages. Nobody has measured it. Text: as configs/llama3_1b.py. Result: as there.
"""

from zerojax.configs import llama3_8b


def get_config():
    c = llama3_8b.get_config()
    c.mesh.pipe, c.mesh.model = 2, 2
    c.zero.stage = 1  # the weights of a group's layers fit without a gather in each of 16 passes
    c.model.offload, c.model.by_columns = "", ""  # activations fit, and a pipeline has no by_columns
    c.global_batch_size, c.micro_batch_size, c.grad_accum = 0, 1, 16
    return c
