"""Checks the descriptions of GPUs for the compiler. This module tests zerojax.plan.gpu_configs."""

import re

import pytest

from zerojax.plan import gpu_configs, targets

GPUS = list(gpu_configs.EDITS)
FORMS = {"0.10": (0, 10, 2), "0.11": (0, 12, 0)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GPUS)
def test_a_description_has_the_figures_of_the_table(name, form):
    text, target = gpu_configs.text(name, FORMS[form]), targets.TARGETS[name]
    assert f"device_memory_size: {target.memory.value}" in text
    assert f" memory_bandwidth: {target.memory_bandwidth.value:.0f}" in text
    assert text.count(f'name: "{target.device_kind}"') == 1
    assert f'device_description_str: "{target.device_kind}"' in text
    assert f"with {target.memory.value}B RAM" in text
    assert ("matrix_unit_description" in text) == (form == "0.11")


@pytest.mark.parametrize("name", GPUS)
def test_the_compiler_counts_with_the_memory_that_a_run_has(name):
    (memory,) = re.findall(r"device_memory_size: (\d+)", gpu_configs.for_compiler(name, targets.USABLE))
    assert int(memory) * 0.8 == pytest.approx(targets.TARGETS[name].usable, abs=2)  # without a device XLA takes 0.8


@pytest.mark.parametrize("name", GPUS)
def test_every_edit_finds_what_it_changes(name):
    text = gpu_configs.text("h200", FORMS["0.11"])
    for pattern, replacement in gpu_configs.EDITS[name]:
        assert re.search(pattern, text), pattern
        text = re.sub(pattern, replacement, text)
    assert text == gpu_configs.text(name, FORMS["0.11"])
    assert ("H200" in text) == (name == "h200")


def test_every_gpu_that_can_be_planned_for_is_described():
    assert {name for name, target in targets.TARGETS.items() if target.kind == "gpu"} == set(GPUS)
