"""Qwen3-30B-A3B's shapes (30.5B weights) in 4 bits, with LoRA adapters on attention and on each of its experts (r 8), on one GPU.

    python -m zerojax.train --config configs/qlora_qwen3_30b.py --config.init_from=opt/Qwen3-30B-A3B

Devices: 1 GPU of 80 GB. Result: 34,011 MiB, as planned, and 12,364 tokens a second on an H100; the step compiles in four minutes
(docs/benchmarks/gpu.md). 22.3 GiB of it is state: 16.0 of frozen weights, 6.3 of adapters (422 million weights) with gradients and moments.
"""

from zerojax.configs import lora_qwen3_30b


def get_config():
    c = lora_qwen3_30b.get_config()
    c.lora.r, c.lora.alpha, c.lora.quantize = 8, 16.0, "nf4"
    c.lora.target_modules = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    return c
