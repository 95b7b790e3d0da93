"""GRPO with a tool on a tiny model drawn at random: it learns to call a calculator, and to say the digit that this returns, from rewards.

    python -m zerojax.train --config configs/calculator_tiny.py --workdir runs/calculator_tiny

Devices: any number that divides 128; without an accelerator 1 CPU device is emulated. A call, "?", is rewarded with 0.5, and the right
digit with 1; a second call costs 0.5. Result: `reward` in runs/calculator_tiny/metrics.jsonl rises from 0.02 at step 20 to 1.29 at step
380 and 1.49 of at most 1.5 at step 500, and `turns` from 1 to 2 by step 120, in three minutes on two cores.
"""

from zerojax.configs import FOLDER, base


def get_config():
    c = base.get_config()
    c.data.task = "grpo"
    c.data.train_file = str(FOLDER / "products_train.jsonl")
    c.data.prompt, c.data.answer, c.data.answer_len = "{text}=", "{digit}", 1
    c.grpo.reward, c.grpo.group, c.grpo.environment, c.grpo.turns = "exact", 16, "calculator", 2
    c.model.preset, c.model.num_layers = "test", 2
    c.seq_len, c.global_batch_size, c.steps = 24, 128, 500
    c.precision = "fp32"
    c.optimizer.learning_rate, c.optimizer.schedule = 1e-3, "constant"
    c.optimizer.weight_decay = 0.0
    c.checkpoint.every = 0
    c.emulate_devices = 1
    c.log_every = 20
    return c
