"""Llama 3's 8B shapes in the least memory: the GPU keeps the layers' inputs alone for the backward pass, 23.6 GB a GPU on 8 of them.

    python -m zerojax.train --config configs/llama3_8b_lean.py --config.data.name=random --config.steps=20

Devices: 8 GPUs of 40 GB or more, and 13.2 GB of the host's memory for each: the widest product waits there. The text and how to change
it: as configs/llama3_8b.py. Result: as there; a step takes about 15% longer; see docs/benchmarks/.
"""

from configs import llama3_8b


def get_config():
    c = llama3_8b.get_config()
    c.model.remat = "full"
    return c
