"""As configs/llama3_8b.py, with the matmuls of the layers in fp8: e4m3 forward, e5m2 for gradients.

    python -m zerojax.train --config configs/llama3_8b_fp8.py --config.data.name=random --config.steps=20

Devices: 8 GPUs of 80 GB or more with fp8 (Ada, Hopper or newer). Weights and moments are those of configs/llama3_8b.py.
Result: as there, in less time; docs/benchmarks/gpu.md.
"""

from zerojax.configs import llama3_8b


def get_config():
    c = llama3_8b.get_config()
    c.precision = "fp8"
    # 68.5 GB planned per GPU on 8. The forward pass takes 0.3 s, less than copies to the host would where eight GPUs copy at once.
    c.model.by_columns = c.model.offload = c.model.recompute = ""
    return c
