"""A reward model on a tiny decoder: it values the letters backwards above the letters as they are. Needs no network and no GPU.

    python -m zerojax.train --config configs/reward_tiny.py --workdir runs/reward_tiny

Devices: any number that divides 24; without an accelerator 2 CPU devices are emulated. Result: reward_accuracy in
runs/reward_tiny/metrics.jsonl rises to 1.0, and the held-out loss falls from 0.69 below 0.1 (0.00 to 0.03 with other seeds), in half a
minute on two cores.
"""

from zerojax.configs import dpo_tiny


def get_config():
    c = dpo_tiny.get_config()
    c.data.task = "reward"
    c.epochs = 80.0
    c.optimizer.learning_rate = 3e-3
    return c
