"""LoRA on the tiny model of configs/bart_tiny.py: whether a short review is positive or negative. Needs no network.

Rank, alpha and dropout are those of PEFT's guide of sequence-to-sequence models; a tiny model needs adapters in all linear modules and more
epochs.

    python -m zerojax.train --config configs/lora_tiny.py --workdir runs/lora_tiny

Devices: any number that divides 16; without an accelerator 2 CPU devices are emulated. It starts from runs/bart_tiny/export. Result: at
least 95% of the held-out reviews are labelled right, their perplexity is about 1.1, and runs/lora_tiny/export is an adapter for PEFT.
"""

from zerojax.configs import base


def get_config():
    c = base.get_config()
    c.init_from = "runs/bart_tiny/export"
    c.data.name, c.data.task = "short_reviews", "classification"
    c.data.prompt, c.data.answer = "{text}", " {label}"
    # The frozen output projection bounds the perplexity. The sentences' adjectives stand in each other's places, so that the model gives
    # none of them a probability near 1; each of these two words stands in one phrase alone. With ("bad", "good") the bound is 3.3.
    c.data.labels = ("waste", "pleasure")
    c.data.answer_len = 4
    c.seq_len, c.global_batch_size, c.epochs = 24, 16, 18.0
    c.lora.r, c.lora.alpha, c.lora.dropout = 8, 32.0, 0.1
    c.lora.target_modules = "all-linear"
    c.precision = "fp32"
    c.optimizer.learning_rate, c.optimizer.schedule, c.optimizer.final_fraction = 3e-3, "linear", 0.0
    c.evaluate.answers, c.evaluate.batches = 1000, 0
    c.checkpoint.every = 0
    c.emulate_devices = 2
    c.log_every = 50
    c.export.format = "peft"
    return c
