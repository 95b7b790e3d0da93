"""A tiny BART, pre-trained on short sentences: something to fine-tune where no weights can be downloaded.

    python -m zerojax.train --config configs/bart_tiny.py --workdir runs/bart_tiny

Devices: any number that divides 32; without an accelerator 2 CPU devices are emulated. It fills in missing spans of the sentences of
short_reviews, without their labels. Result: runs/bart_tiny/export holds the model as transformers writes one, for configs/lora_tiny.py.
"""

from zerojax.configs import FOLDER, base

TOKENIZER = FOLDER / "short_reviews" / "tokenizer.json"  # of these sentences' words


def get_config():
    c = base.get_config()
    c.model.preset = "bart_test"
    c.data.name, c.data.tokenizer = "short_reviews", str(TOKENIZER)
    c.seq_len, c.global_batch_size, c.steps = 24, 32, 300
    c.precision = "fp32"
    c.evaluate.batches, c.evaluate.every, c.checkpoint.every = 2, 0, 0
    c.emulate_devices = 2
    c.sample.length = 0
    c.log_every = 50
    c.export.format, c.export.dtype = "huggingface", "fp32"
    return c
