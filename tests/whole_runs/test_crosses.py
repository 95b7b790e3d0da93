"""Crosses the settings of the trainer. This module runs the covering array of tests/support/crosses.py, and proves its rules."""

import shutil
from unittest import mock

import crosses
import jax
import pytest
import runs

from zerojax.trainer.checks import effects

MOST = 200  # rows of the covering array, which takes seconds to make: no process makes it to collect its tests
# The case that runs by default, the others with -m long.
BRIEF = {
    "precision": "bf16",
    "stage": "3",
    "mesh": "1x6x1",
    "indivisible": "pad",
    "min_size": "0",
    "optimizer_offload": "host",
    "by_block": "off",
    "task": "seq2seq",
    "evaluate": "yes",
    "checkpoint": "yes",
    "export": "huggingface",
}


@pytest.fixture(scope="module")
def bases(cache_dir, tmp_path_factory):
    """Returns f(row) -> how its baseline ended; cases share baselines."""
    ends = {}

    def of(row):
        plain = crosses.baseline(row)
        key = str(sorted(crosses.changes(plain).items(), key=str))
        if key not in ends:
            folder = tmp_path_factory.mktemp("baseline")
            ends[key] = crosses.attempt(plain, folder)
            shutil.rmtree(folder)
        return ends[key]

    return of


def row_of(rows, number):
    if number >= len(rows):
        pytest.skip("the array has fewer rows")
    return rows[number]


def check(row, end, bases):
    assert end.error is None, (crosses.command(row), end.error)
    assert not crosses.fault(row, end, bases(row)), crosses.command(row)


def test_some_settings_together_have_the_losses_of_one_device(bases, tmp_path):
    row = {**crosses.SPACE.plain, **BRIEF}
    assert not any(rule.breaks(row) for rule in crosses.SPACE.rules)
    check(row, crosses.attempt(row, tmp_path), bases)


@runs.LONG
@pytest.mark.parametrize("number", range(MOST))
def test_a_cross_has_the_losses_of_the_same_settings_on_one_device(number, bases, tmp_path):
    row = row_of(crosses.SPACE.rows, number)
    end = crosses.attempt(row, tmp_path)
    shutil.rmtree(tmp_path)
    check(row, end, bases)
    if number % 10 == 0:
        jax.clear_caches()


@runs.LONG
@pytest.mark.parametrize("part", range(MOST // 8))
def test_a_cross_in_two_processes_has_the_losses_of_the_same_settings_on_one_device(part, bases, commands, tmp_path):
    rows = [row for row in crosses.SPACE.rows if crosses.changes(row)["emulate_devices"] == 8]
    row = row_of(rows[::8], part)
    check(row, crosses.attempt_in_two(row, tmp_path / "run", commands), bases)


# Settings that a mixture of experts, which the array has not, is crossed with.
MIXTURE = [
    {"stage": "3", "mesh": "1x8x1"},
    {"stage": "3", "mesh": "2x2x2"},
    {"stage": "3", "mesh": "context"},
    {"stage": "2", "mesh": "1x8x1", "grad_accum": "2", "tile_tokens": "24", "task": "seq2seq"},
    {"stage": "3", "mesh": "1x8x1", "lora": "on", "quantize": "nf4", "lora_targets": "all"},
    {"stage": "3", "mesh": "1x8x1", "precision": "bf16", "optimizer_offload": "host", "params_offload": "host"},
    {"stage": "3", "mesh": "1x8x1", "precision": "fp8", "remat": "full"},
    {"stage": "1", "mesh": "2x4x1", "precision": "fp16", "activations": "mlp", "remat": "dots"},
    {"stage": "3", "mesh": "1x6x1", "indivisible": "pad", "export": "huggingface", "sample": "yes"},
    {"stage": "1", "mesh": "experts_context", "grad_accum": "2"},
    {"stage": "3", "mesh": "experts_model", "precision": "bf16"},
    {"stage": "3", "mesh": "experts", "lora": "on", "quantize": "nf4", "lora_targets": "all"},
    {"stage": "3", "mesh": "experts", "precision": "bf16", "optimizer_offload": "host"},
    {
        "stage": "3",
        "mesh": "experts",
        "optimizer_offload": "host",
        "params_offload": "host",
        "parts": "2",
        "sample": "yes",
    },
    {"stage": "2", "mesh": "experts", "optimizer_offload": "host", "late_norm": "yes", "grad_accum": "2"},
    {"stage": "3", "mesh": "experts", "precision": "fp8"},
    {"stage": "2", "mesh": "experts", "precision": "fp16", "loss_scale": "overflow", "optimizer": "adafactor"},
    {
        "stage": "3",
        "mesh": "experts",
        "indivisible": "pad",
        "export": "huggingface",
        "sample": "yes",
        "checkpoint": "yes",
    },
    {"stage": "3", "mesh": "experts", "by_columns": "both"},
    {"stage": "3", "mesh": "experts", "task": "seq2seq", "evaluate": "yes", "optimizer": "lion", "moments": "int8"},
]
# Meshes with `expert`, which other families refuse.
OF_EXPERTS = {
    "experts": {**crosses.SETTINGS["mesh"]["1x8x1"], "mesh.expert": 4},
    "experts_context": {
        **crosses.SETTINGS["mesh"]["context"],
        "mesh.expert": 4,
        "experts.parts": 2,
        "experts.load": 1.0,
    },
    "experts_model": {**crosses.SETTINGS["mesh"]["2x2x2"], "mesh.expert": 2},
}


def mixture(row, monkeypatch):
    """Returns a row of settings of a mixture of experts."""
    monkeypatch.setattr(crosses, "MODELS", crosses.MODELS | {"llama": "moe_test"})
    for name, changes in OF_EXPERTS.items():
        monkeypatch.setitem(crosses.SETTINGS["mesh"], name, changes)
    return {name: crosses.first_value(name) for name in crosses.SETTINGS} | {"min_size": "0"} | row


@runs.LONG
@pytest.mark.parametrize("number", range(len(MIXTURE)))
def test_a_mixture_of_experts_has_the_losses_of_one_device(number, bases, tmp_path, monkeypatch):
    row = mixture(MIXTURE[number], monkeypatch)
    check(row, crosses.attempt(row, tmp_path), bases)


@runs.LONG  # as the cases are
def test_every_pair_of_values_is_in_the_array_or_refused():
    space = crosses.SPACE
    assert len(space.rows) <= MOST
    assert not any(rule.breaks(row) for row in space.rows for rule in space.rules)
    there = set().union(*map(space.pairs, space.rows))
    assert all(pair in there or space.completed(values) is None for pair, values in space.all_pairs())


def names_of(rules):
    return [f"{number} {' '.join(rule.settings)}" for number, rule in enumerate(rules)]


@pytest.mark.parametrize("rule", crosses.EXCLUSIVE, ids=names_of(crosses.EXCLUSIVE))
def test_what_is_exclusive_is_refused_in_one_line_before_it_compiles(rule, cache_dir, tmp_path):
    row = crosses.SPACE.breaking(rule)
    with mock.patch.object(jax.stages.Lowered, "compile", side_effect=AssertionError("it compiles")):
        end = crosses.attempt(row, tmp_path)
    assert end.error is not None and not crosses.fault(row, end, None), (crosses.command(row), end.error)


@pytest.mark.parametrize("rule", crosses.UNREAD, ids=names_of(crosses.UNREAD))
def test_what_has_no_effect_is_named(rule):
    row = crosses.SPACE.breaking(rule)
    assert any(rule.words in line for line in effects.unread(crosses.config(row))), crosses.command(row)
