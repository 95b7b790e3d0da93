"""Qwen3-30B-A3B's shapes (30.5B weights) in 4 bits, with LoRA adapters on attention and on each of its experts (r 8), on one GPU.

    python -m zerojax.train --config configs/qlora_qwen3_30b.py --config.init_from=opt/Qwen3-30B-A3B

Devices: 1 GPU of 80 GB: 41.8 GiB planned for an H100, and 14,409 tokens a second foretold. 22.3 GiB of it is state: 16.0 of frozen
weights, 6.3 of adapters (422 million weights) with gradients and moments. The step compiles in four minutes. Result: with experts' matmuls
recomputed (config.model.recompute as in configs/lora_qwen3_30b.py), and kernels of the time, 34,011 MiB and 12,364 tokens a second on an
H100 (docs/benchmarks/gpu.md).
"""

from zerojax.configs import lora_qwen3_30b


def get_config():
    c = lora_qwen3_30b.get_config()
    c.lora.r, c.lora.alpha, c.lora.quantize = 8, 16.0, "nf4"
    c.lora.target_modules = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    c.model.recompute = ""
    return c
