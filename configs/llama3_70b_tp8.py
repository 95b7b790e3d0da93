"""Llama 3's 70B shapes, stage 3 over data and tensor parallelism over the 8 GPUs of a host, sequences of 8,192 tokens.

    srun python -m zerojax.train --config configs/llama3_70b_tp8.py --workdir /shared/runs/70b --config.data.name=random

Devices: 64 GPUs of 80 GB in hosts of 8. The plan for 64 H200s: 43.7 GiB on each, 12.3 of them weights and moments; no weight is gathered
over `model`, and gathers over `data` move an eighth of each. Text: as configs/llama3_1b.py. Result: as there.
"""

from zerojax.configs import llama3_70b


def get_config():
    c = llama3_70b.get_config()
    c.mesh.model = 8  # inside a host: every layer waits for its activations
    c.model.remat = "dots"  # an eighth of a layer's matmuls is on each device
    c.micro_batch_size = 2
    return c
