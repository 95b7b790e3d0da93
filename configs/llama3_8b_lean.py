"""Llama 3's 8B shapes in the least memory: only the layers' inputs are kept on the GPU for the backward pass, 23.6 GB per GPU on 8 GPUs.

    python -m zerojax.train --config configs/llama3_8b_lean.py --config.data.name=random --config.steps=20

Devices: 8 GPUs of 40 GB or more, and 6.6 GB of host memory for each, which holds the output of the widest matmul. Text: as
configs/llama3_8b.py. Result: as there, in steps that take about 15% longer; see docs/benchmarks/.
"""

from configs import llama3_8b


def get_config():
    c = llama3_8b.get_config()
    c.model.remat = "full"
    c.model.recompute = ""  # all is recomputed but what is offloaded
    return c
