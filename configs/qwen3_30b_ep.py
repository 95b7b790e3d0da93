"""Qwen3-30B-A3B's shapes (30.5B weights, 3.3B of them for each token) on eight GPUs that hold 16 of its 128 experts each, stage 3.

    python -m zerojax.train --config configs/qwen3_30b_ep.py --config.data.name=random --config.steps=20

Devices: 8 GPUs of 141 GB, of one host. Weights and moments take 12 bytes a weight, 46 GB on each. With --config.model.num_layers=2 and
--config.mesh.expert=2 the plan for two H100s is 20.7 GiB and 86 ms a step, 1.9 GiB of tokens received, 55% of it beside matmuls. Nobody has
run it. Text: as configs/llama3_1b.py. Result: as there.
"""

from zerojax.configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "qwen3_30b_a3b"
    c.mesh.expert = 8
    c.experts.parts = 2  # rows of a half, 1,024 an expert, fill a matmul
    c.micro_batch_size = 2
    return c
