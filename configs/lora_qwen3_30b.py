"""Qwen3-30B-A3B's shapes (30.5B weights, 3.3B of them for each token) with LoRA adapters on attention (r 16), on one GPU.

    python -m zerojax.train --config configs/lora_qwen3_30b.py --config.init_from=opt/Qwen3-30B-A3B

Devices: 1 GPU of 80 GB or more (68.2 GiB planned and measured); more GPUs share the frozen weights. On one H200: 18,147 tokens/s. Result: a
folder of PEFT in WORKDIR/export, which `zerojax merge` merges.
"""

from zerojax.configs import lora_llama3_8b


def get_config():
    c = lora_llama3_8b.get_config()
    c.model.preset = "qwen3_30b_a3b"
    c.lora.target_modules = "q_proj,k_proj,v_proj,o_proj"
    return c
