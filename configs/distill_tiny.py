"""Distillation on a tiny model: a student of one layer learns the probabilities of a teacher of two. Needs no network and no GPU.

    python -m zerojax.train --config configs/distill_tiny.py --workdir runs/teacher_tiny --config.distill.teacher= \\
        --config.model.num_layers=2
    python -m zerojax.train --config configs/distill_tiny.py --workdir runs/distill_tiny

The first command trains the teacher on labels. Devices: any number that divides 32; without an accelerator 2 CPU devices are emulated.
Result: the student's held-out loss is within 5% of the teacher's, in a minute on two cores.
"""

from zerojax.configs import base


def get_config():
    c = base.get_config()
    c.distill.teacher = "./runs/teacher_tiny"
    c.model.preset, c.model.num_layers = "test", 1
    c.seq_len, c.global_batch_size, c.steps = 64, 32, 300
    c.precision = "fp32"
    c.optimizer.learning_rate = 3e-3
    c.evaluate.every, c.evaluate.batches = 100, 8
    c.checkpoint.every = 0
    c.sample.length = 0
    c.emulate_devices = 2
    c.log_every = 50
    return c
