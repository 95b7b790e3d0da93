"""Checks that the tiny configs of compared answers learn their tasks, from beginning to end."""

import importlib

import pytest
import runs

from zerojax import train
from zerojax.trainer import config as config_lib
from zerojax.trainer import metrics


def trained(name, folder, devices, **changes):
    raw = importlib.import_module(f"configs.{name}").get_config()
    raw.update_from_flattened_dict(changes)
    raw.metrics.to = ()
    with runs.on_devices(devices):
        train.train(config_lib.from_dict(raw), folder)
    return metrics.read(folder)


@runs.LONG
def test_dpos_margin_rises(cache_dir, tmp_path):
    lines = trained("dpo_tiny", tmp_path, 2)
    margins = [line["reward_margin"] for line in lines if "loss" in line]
    assert margins[0] < 0.2 and margins[-1] > 2.0 and lines[-1]["eval_loss"] < 0.1


@runs.LONG
def test_a_reward_model_tells_all_pairs_apart(cache_dir, tmp_path):
    lines = trained("reward_tiny", tmp_path, 2)
    shares = [line["reward_accuracy"] for line in lines if "loss" in line]
    assert shares[0] < 0.9 and shares[-1] == 1 and lines[-1]["eval_loss"] < 0.1


@runs.LONG
def test_texts_that_belong_together_become_the_nearest(cache_dir, tmp_path):
    lines = trained("embed_tiny", tmp_path, 2)
    shares = [line["nearest"] for line in lines if "loss" in line]
    assert shares[0] < 0.8 and shares[-1] == 1 and lines[-1]["eval_loss"] < 0.1


@runs.LONG
@pytest.mark.parametrize("variant, aside", [("grpo", 0), ("rloo", 0), ("grpo", 1)])
def test_grpo_learns_from_chance_to_nine_in_ten(cache_dir, tmp_path, variant, aside):
    lines = trained("grpo_tiny", tmp_path, 1 + aside, **{"grpo.variant": variant, "grpo.rollout_devices": aside})
    rewards = [line["reward"] for line in lines if "loss" in line]
    shares = [line["eval_exact_match"] for line in lines if "eval_exact_match" in line]
    assert rewards[0] < 0.02 and rewards[-1] > 0.9 and shares[-1] >= 0.9


@runs.LONG
def test_a_student_comes_within_a_twentieth_of_its_teachers_loss(cache_dir, tmp_path, stdlib_dir):
    data = {"data.dir": str(stdlib_dir)}
    of_teacher = {"distill.teacher": "", "model.num_layers": 2, **data}
    lines = trained("distill_tiny", tmp_path / "teacher", 2, **of_teacher)
    student = trained("distill_tiny", tmp_path / "student", 2, **{"distill.teacher": str(tmp_path / "teacher"), **data})
    wanted, found = (one[-1]["eval_loss"] for one in (lines, student))
    assert wanted < 2.7 and found < 1.05 * wanted


@runs.LONG
def test_a_calculator_is_called_from_chance_to_nearly_always(cache_dir, tmp_path):
    lines = [line for line in trained("calculator_tiny", tmp_path, 1) if "loss" in line]
    assert lines[0]["turns"] < 1.1 and lines[-1]["turns"] > 1.9
    assert lines[0]["reward"] < 0.1 and lines[-1]["reward"] > 1.2
