"""Qwen2.5's 14B shapes on one GPU of 80 GB: 16-bit weights and moments in host memory, fetched block by block.

    python -m zerojax.train --config configs/offload_14b_h100.py --config.data.name=random --config.steps=5

Devices: 1 GPU with 80 GB, and a host with 110 GB of free memory: 4 bytes a weight of moments, a third of the layers' weights, the chunks
in flight, and what XLA's pool of pinned memory wastes. 128 passes make up 524,288 tokens a step. On the device are the sums of gradients,
2 bytes a weight, and as many weights as the link cannot bring beside a layer's forward pass of 4,096 tokens (3.8 ms); so nothing is
recomputed. The head and the embedding stay too: each would take 29 ms. Weights and sums are rounded stochastically, gradients of a pass to
the nearest, and there are no float32 masters. Gradients are not clipped: the norm is known at the end of the backward pass, until when all
gradients would wait in float32.
Result: on an H100 6,440 tokens/s (the median of steps 2 to 4) with 77.0 GB in use at most; on an H200, which has faster memory, 6,400 with
older code. The GPU's power limits both. On random tokens the loss should fall as that of configs/llama3_1b.py.
"""

from zerojax.configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "qwen2_14b"
    c.seq_len = 1024
    c.micro_batch_size, c.grad_accum, c.global_batch_size = 4, 128, 0
    c.precision = "bf16_sr"
    c.optimizer.moments = c.accum_dtype = c.reduce_dtype = "bf16"
    c.optimizer.clip_norm = 0.0
    c.optimizer.warmup_steps = 2
    c.offload.optimizer = c.offload.params = "host"
    c.offload.params_fraction, c.offload.params_on_device = 0.3, "head|embed"
    c.offload.chunk_bytes = 128 << 20  # 8 in flight take 1 GiB
    c.evaluate.every = c.checkpoint.every = 0
    c.evaluate.batches = 1  # of 512 sequences
    c.checkpoint.at_end = False  # 89 GB, and as much host memory again while it is written
    return c
