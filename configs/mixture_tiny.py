"""A mixture of three sources: the source of the Python standard library, short reviews, and answers about letters. Needs no network.

    python -m zerojax.train --config configs/mixture_tiny.py --workdir runs/mixture_tiny

Devices: any number that divides 16; without an accelerator 2 CPU devices are emulated. The share of code falls from a half of the tokens
to a quarter while that of reviews rises. Result: WORKDIR/metrics.jsonl has the loss and the share of each source.
"""

from zerojax.configs import FOLDER, base


def get_config():
    c = base.get_config()
    c.data.sources = (
        {"title": "code", "name": "python_stdlib", "eval_split": "validation", "weight": ((0, 2.0), (100, 1.0))},
        {"title": "reviews", "name": "short_reviews", "weight": ((0, 1.0), (100, 2.0))},
        {
            "title": "letters",
            "train_file": str(FOLDER / "letters_train.jsonl"),
            "eval_file": str(FOLDER / "letters_eval.jsonl"),
            "task": "seq2seq",
            "prompt": "{text} ",
            "answer": "{last}",
            "weight": 0.5,
        },
    )
    c.steps, c.seq_len, c.global_batch_size = 100, 64, 16
    c.optimizer.learning_rate, c.optimizer.warmup_steps = 5e-3, 10
    c.evaluate.every, c.evaluate.batches, c.checkpoint.every = 50, 8, 50
    c.emulate_devices = 2
    return c
