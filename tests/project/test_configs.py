"""Tests configs/: each is valid, names its command, and builds a program."""

import importlib
import pathlib
import re

import jax
import pytest

from zerojax.models.llama import model as llama
from zerojax.optim import schedules
from zerojax.trainer import config as config_lib
from zerojax.trainer import program
from zerojax.zero import state_bytes

FILES = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.py"))
LLAMA_WEIGHTS = {"llama3_1b": 1.50e9, "llama3_8b": 8.03e9, "llama3_70b": 70.6e9}
ROUNDING = 0.01  # of the published numbers above


def load(name):
    module = importlib.import_module(f"configs.{name}")
    return config_lib.from_dict(module.get_config()), module.__doc__


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_every_config_is_valid_and_opens_with_its_command_devices_and_result(name):
    config, doc = load(name)
    assert f"python -m zerojax.train --config configs/{name}.py" in doc
    assert "Devices: " in doc
    assert "Result: " in doc
    (steps,) = re.findall(r"--config\.steps=(\d+)", doc) or [config.steps]
    warmup = config.optimizer.warmup_steps
    assert schedules.fitting_warmup(config.optimizer.schedule, warmup, int(steps)) == warmup


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_configs_differ_in_their_stage_alone(stage):
    here, _ = load(f"zero{stage}")
    there, _ = load("zero3")
    assert here.zero.stage == stage
    here, there = config_lib.to_dict(here), config_lib.to_dict(there)
    del here["zero"]["stage"], there["zero"]["stage"]
    assert here == there


@pytest.mark.parametrize("name", LLAMA_WEIGHTS)
def test_llama_configs_hold_twelve_bytes_a_weight_over_eight_devices(name):
    config, _ = load(name)
    built = program.build(config, tokenizer_vocab=320)
    weights = llama.count_params(built.model)
    assert abs(weights / LLAMA_WEIGHTS[name] - 1) < ROUNDING
    counted = state_bytes.bytes_per_device(built.partition)
    held = counted["params"] + counted["opt_state"]
    assert abs(held / (12 * weights / jax.device_count()) - 1) < ROUNDING
    assert built.sizes.global_batch_size == config.micro_batch_size * jax.device_count()


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_every_config_has_a_row_in_the_page_of_the_trainer(name):
    page = pathlib.Path(__file__).parents[2] / "docs" / "trainer.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert any(f"`configs/{name}.py`" in row for row in rows) or re.fullmatch(r"zero[0-3]", name)
