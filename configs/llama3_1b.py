"""A decoder of Llama 3's 1B shapes (16 layers, 1.50B weights with an untied head), stage 3, sequences of 4,096 tokens.

    python -m zerojax.train --config configs/llama3_1b.py --config.data.name=random --config.steps=20

Devices: one or more GPUs with 80 GB or more each; the state is sharded over all. The default text is the Python standard library
as bytes. --config.data.name=random trains on random tokens, and a dataset such as "lm1b" needs
--config.data.tokenizer=TOKENIZER.json, a Hugging Face tokenizer of 128,256 entries or fewer. Result: on random tokens
the loss falls from 11.8, a uniform guess over the vocabulary, towards 5.8, one over the byte tokenizer's 320 ids. Speed and
memory: docs/benchmarks/.
"""

from zerojax.configs import base


def get_config():
    c = base.get_config()
    c.steps = 1000
    c.model.preset = "llama3_1b"
    c.seq_len = 4096
    c.micro_batch_size, c.global_batch_size, c.grad_accum = 8, 0, 1  # the global batch grows with the devices
    c.optimizer.learning_rate = 3e-4
    c.evaluate.every = c.checkpoint.every = 500
    c.log_every = 1
    c.sample.length = 0
    return c
