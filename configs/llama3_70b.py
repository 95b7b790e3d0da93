"""A decoder of Llama 3's 70B shapes (80 layers, 70.6B weights), stage 3, sequences of 8,192 tokens.

    srun python -m zerojax.train --config configs/llama3_70b.py --workdir /shared/runs/70b --config.data.name=random

Devices: 32 or more GPUs of 80 GB. Weights and moments take 12 bytes per weight, 850 GB in total. scripts/slurm.sbatch starts such a
run. Text: as configs/llama3_1b.py. Result: as there.
"""

from zerojax.configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "llama3_70b"
    c.model.remat = "full"  # the matmuls of 80 layers do not fit in memory with the state
    c.seq_len = 8192
    c.micro_batch_size = 1
    return c
