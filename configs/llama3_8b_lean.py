"""Llama 3's 8B shapes in the least memory: nothing but the layers' inputs is kept for the backward pass, 23.4 GB a GPU on 8 of them.

    python -m zerojax.train --config configs/llama3_8b_lean.py --config.data.name=random --config.steps=20

Devices: 8 GPUs of 40 GB or more. The text and how to change it: as configs/llama3_8b.py. Result: as there; a step takes about
15% longer; see docs/benchmarks/.
"""

from configs import llama3_8b


def get_config():
    c = llama3_8b.get_config()
    c.model.remat, c.model.recompute = "full", ""
    return c
