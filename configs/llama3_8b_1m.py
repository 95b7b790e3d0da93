"""Llama 3's 8B shapes on texts of 1,048,576 tokens: each of eight GPUs holds an eighth of every text.

    python -m zerojax.train --config configs/llama3_8b_1m.py --config.data.name=random --config.data.eval_split= --config.steps=3

Devices: 8 GPUs of 141 GB. Weights, float32 masters and moments take 12 bytes a weight, sharded over the eight. Attention exchanges heads
for tokens (Ulysses): a GPU has 4 of 32 heads and all tokens of a text.
Result: 87.6 GiB on each device, planned; nothing was measured. A step should take some 250 s: it has 1.14e17 operations a GPU, and texts
of 262,144 tokens ran at 455 TFLOP/s on one (docs/benchmarks).
"""

from zerojax.configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "llama3_8b_1m"
    c.seq_len = 1048576
    c.mesh.context = 8
    c.micro_batch_size, c.grad_accum, c.global_batch_size = 1, 1, 0
    c.model.tile_tokens = 8192
    c.model.remat = "attention"
    c.optimizer.warmup_steps = 2
    return c
