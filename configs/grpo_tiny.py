"""GRPO on a tiny model drawn at random: it learns to say the last of three letters from rewards alone. Needs no network and no GPU.

    python -m zerojax.train --config configs/grpo_tiny.py --workdir runs/grpo_tiny

Devices: any number that divides 128; without an accelerator 1 CPU device is emulated. Result: the share of right answers to
held-out prompts rises from below 1%, which is chance, to 95% or more within 200 steps, in two minutes on two cores. With
--config.emulate_devices=2 --config.grpo.rollout_devices=1 one device draws answers while the other trains, with the same result.
"""

from zerojax.configs import FOLDER, base


def get_config():
    c = base.get_config()
    c.data.task = "grpo"
    c.data.train_file, c.data.eval_file = str(FOLDER / "letters_train.jsonl"), str(FOLDER / "letters_eval.jsonl")
    c.data.prompt, c.data.answer, c.data.answer_len = "{text}", "{last}", 1
    c.grpo.reward, c.grpo.group = "exact", 16
    c.model.preset, c.model.num_layers = "test", 2
    c.seq_len, c.global_batch_size, c.steps = 8, 128, 200
    c.precision = "fp32"
    c.optimizer.learning_rate, c.optimizer.schedule = 1e-3, "constant"
    c.optimizer.weight_decay = 0.0
    c.evaluate.every = 100
    c.checkpoint.every = 0
    c.emulate_devices = 1
    c.log_every = 20
    return c
