"""Llama 3's 8B shapes on one GPU of 141 GB: a text of 262,144 tokens in each step.

    python -m zerojax.train --config configs/llama3_8b_262k_h200.py --config.steps=3

Devices: 1 H200, and a host with 80 GB of free memory. MLPs run for 8,192 tokens at a time. Layers keep their inputs in host memory (69 GB)
and what attention returns on the device (70 GB), so that no attention runs twice. Weights have 16 bits and moments 8, 32 GB on the device;
they are rounded stochastically, and there are no float32 masters.
Result: 1,818 tokens/s (144.2 s a step) and 121.2 GiB on the device, as planned there (docs/benchmarks). A plan for an absent GPU says
112.5 GiB, since it does not know the scratch memory of cuDNN's backward pass. 131,072 tokens: 3,307 tokens/s; 65,536: 5,446.
"""

from zerojax.configs import base, llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "llama3_8b_1m"
    c.seq_len = 262144
    c.micro_batch_size, c.grad_accum, c.global_batch_size = 1, 1, 0
    c.model.long_texts = True
    c.precision, c.optimizer.moments = "bf16_sr", "int8"
    c.optimizer.warmup_steps = 2
    c.data.name, c.data.eval_split = "random", ""
    c.evaluate.every = base.get_config().evaluate.every  # nothing is held out
    c.checkpoint.every = 0
    c.checkpoint.at_end = False
    return c
