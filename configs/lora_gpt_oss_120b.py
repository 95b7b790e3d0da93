"""gpt-oss-120b's shapes (117B weights) with LoRA adapters on attention, on one GPU: its experts stay in MXFP4, as its files hold them.

    python -m zerojax.train --config configs/lora_gpt_oss_120b.py --config.init_from=opt/gpt-oss-120b

Devices: 1 GPU of 80 GB or more, by an estimate of 66 GiB on an H200: 69.7 GiB were planned when a layer's experts were
copied to bf16, and a plan of two layers needs 3.3 GiB less without the copy. More GPUs share the frozen weights.
Result: a folder of PEFT in WORKDIR/export.
"""

from zerojax.configs import lora_qwen3_30b


def get_config():
    c = lora_qwen3_30b.get_config()
    c.model.preset = "gpt_oss_120b"
    c.lora.quantize = "mxfp4"
    c.micro_batch_size = 1
    return c
