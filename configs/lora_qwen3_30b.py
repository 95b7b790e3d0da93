"""Qwen3-30B-A3B's shapes (30.5B weights, 3.3B of them for each token) with LoRA adapters on attention (r 16), on one GPU.

    python -m zerojax.train --config configs/lora_qwen3_30b.py --config.init_from=opt/Qwen3-30B-A3B

Devices: 1 GPU of 80 GB or more (67.8 GiB planned for an H100); more GPUs share the frozen weights. One H200 has room
for what is recomputed here: with --config.model.recompute= it trains 22,400 tokens/s in 77.1 GiB. Result: a folder of PEFT in
WORKDIR/export, which `zerojax merge` merges.
"""

from zerojax.configs import lora_llama3_8b


def get_config():
    c = lora_llama3_8b.get_config()
    c.model.preset = "qwen3_30b_a3b"
    c.lora.target_modules = "q_proj,k_proj,v_proj,o_proj"
    c.model.recompute = r"layer_\d+/mlp"  # what experts' matmuls return is 9 GiB more than a GPU of 80 GB has room for
    return c
