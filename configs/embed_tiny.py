"""Embeddings on a tiny decoder: three letters are near the same letters backwards. Needs no network and no GPU.

    python -m zerojax.train --config configs/embed_tiny.py --workdir runs/embed_tiny

Devices: any number that divides 32; without an accelerator 2 CPU devices are emulated. Result: nearest in metrics.jsonl, the
share of queries whose own text is the nearest of the batch, rises to 1.0, and the held-out loss falls below 0.1, in ten seconds on two
cores.
"""

from zerojax.configs import FOLDER, base


def get_config():
    c = base.get_config()
    c.data.task = "embed"
    c.data.train_file, c.data.eval_file = str(FOLDER / "letters_train.jsonl"), str(FOLDER / "letters_eval.jsonl")
    c.data.prompt, c.data.answer = "{text}=", "{chosen}"  # the sign tells a query from a text
    c.embedding.pooling = "mean"
    c.model.preset, c.model.num_layers = "test", 2
    c.seq_len, c.global_batch_size, c.epochs = 8, 32, 40.0
    c.precision = "fp32"
    c.optimizer.learning_rate, c.optimizer.schedule = 3e-3, "constant"
    c.evaluate.batches = 0
    c.checkpoint.every = 0
    c.emulate_devices = 2
    c.log_every = 20
    return c
