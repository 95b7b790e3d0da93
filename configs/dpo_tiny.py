"""DPO on a tiny model: of two answers to three letters, the letters backwards are preferred. Needs no network and no GPU.

    python -m zerojax.train --config configs/dpo_tiny.py --workdir runs/dpo_tiny

Devices: any number that divides 24; without an accelerator 2 CPU devices are emulated. Result: reward_margin in
runs/dpo_tiny/metrics.jsonl rises from 0 to about 3.7, and the held-out loss falls from 0.69 to about 0.03, in a minute on two cores.
"""

from zerojax.configs import FOLDER, base


def get_config():
    c = base.get_config()
    c.data.task = "dpo"
    c.data.train_file, c.data.eval_file = str(FOLDER / "letters_train.jsonl"), str(FOLDER / "letters_eval.jsonl")
    c.data.prompt, c.data.answer, c.data.rejected = "{text}=", "{chosen}", "{rejected}"
    c.data.answer_len = 4
    c.model.preset, c.model.num_layers, c.model.vocab_size = "test", 2, 384
    c.seq_len, c.global_batch_size, c.epochs = 8, 24, 20.0
    c.dpo.beta = 0.1
    c.precision = "fp32"
    c.optimizer.learning_rate, c.optimizer.schedule = 1e-3, "constant"
    c.evaluate.batches = 0
    c.checkpoint.every = 0
    c.emulate_devices = 2
    c.log_every = 20
    return c
