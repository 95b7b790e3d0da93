"""As configs/llama3_8b.py, with the matmuls of the layers in fp8: e4m3 forward, e5m2 for gradients.

    python -m zerojax.train --config configs/llama3_8b_fp8.py --config.data.name=random --config.steps=20

Devices: 8 GPUs of 80 GB or more with fp8 (Ada, Hopper or newer). Weights, moments and memory are those of configs/llama3_8b.py.
Result: as there, in less time; docs/precision.md.
"""

from configs import llama3_8b


def get_config():
    c = llama3_8b.get_config()
    c.precision = "fp8"
    return c
