"""Llama 3's 8B shapes with LoRA adapters on all linear modules (r 16), sequences of 4,096 tokens, on one GPU.

    python -m zerojax.train --config configs/lora_llama3_8b.py --config.init_from=opt/llama-3.1-8b

Devices: 1 GPU with 80 GB. With --config.lora.quantize=nf4 --config.micro_batch_size=1 --config.model.remat=full a GPU with 12 GB (8.7 GB
planned). More GPUs share the frozen weights. Result: a folder of PEFT in WORKDIR/export, which `zerojax merge` merges.
"""

from zerojax.configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "llama3_8b"
    c.seq_len = 4096
    c.micro_batch_size, c.grad_accum, c.global_batch_size = 2, 1, 0
    c.lora.r, c.lora.alpha = 16, 32.0
    c.lora.target_modules = "all-linear"
    c.optimizer.learning_rate, c.optimizer.weight_decay = 2e-4, 0.0
    c.export.format = "peft"
    return c
