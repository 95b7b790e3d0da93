"""Llama 3's 8B shapes in little memory: layers keep their inputs and attention's output for the backward pass, 25.8 GB per GPU on 8 GPUs.

    python -m zerojax.train --config configs/llama3_8b_lean.py --config.data.name=random --config.steps=20

Devices: 8 GPUs of 40 GB or more, and 6.6 GB of host memory for each, which holds the output of the widest matmul. Text: as
configs/llama3_8b.py. Result: as there, in steps that take about 15% longer; see docs/benchmarks/.
"""

from zerojax.configs import llama3_8b


def get_config():
    c = llama3_8b.get_config()
    # All matmuls are computed again but those that are offloaded. Attention is not: for its bytes it takes twice the time of a matmul.
    # With remat = "full" and recompute = "" it is, in 22.5 GB.
    c.model.recompute = r"layer_\d+/(attention/[qkvo]|mlp/gate)|layer_(\d?[13579]|28|30)/mlp/up"
    return c
