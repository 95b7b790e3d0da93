"""Checks that settings without effect are told. This module tests zerojax.trainer.checks.effects."""

import importlib

import jax
import pytest
import runs

import zerojax
from zerojax.trainer import config as config_lib
from zerojax.trainer.checks import effects

TOLD = {  # changed settings -> the one that then has no effect, and words of the reason
    "stage 0": ({"zero__stage": 0, "zero__indivisible": "pad"}, "zero.indivisible='pad'", "shards nothing"),
    "bf16": ({"precision": "bf16", "fp8__first": 1}, "fp8.first=1", "'bf16' computes nothing in fp8"),
    "sgd": (
        {"optimizer__name": "sgd", "optimizer__eps": 1e-6},
        "optimizer.eps=1e-06",
        "sgd does not read it",
    ),
    "lion": ({"optimizer__name": "lion", "optimizer__eps": 1e-6}, "optimizer.eps=1e-06", "lion does not read it"),
    "constant": ({"optimizer__final_fraction": 0.5}, "optimizer.final_fraction=0.5", "constant does not read it"),
    "random": ({"data__train_split": "train[:1%]"}, "data.train_split='train[:1%]'", "not read from files"),
    "keep_best": (
        {"checkpoint__keep_best": 3, "evaluate__batches": 16},
        "checkpoint.keep_best=3",
        "nothing is evaluated",
    ),
    "no checkpoints": (
        {"checkpoint__every": 0, "checkpoint__at_end": False, "checkpoint__keep_last": 5},
        "checkpoint.keep_last=5",
        "no checkpoint",
    ),
    "no sample": ({"sample__prompt": "class "}, "sample.prompt='class '", "sample.length=0"),
    "no pipeline": ({"pipeline__chunks": 2}, "pipeline.chunks=2", "config.mesh.pipe=1"),
    "no adapters": ({"lora__rslora": True}, "lora.rslora=True", "trains no adapters"),
    "no history": ({"precision": "fp8", "fp8__history": 4}, "fp8.history=4", "tensorwise remembers no step"),
    "text": ({"dpo__beta": 0.5}, "dpo.beta=0.5", "config.data.task=text does not read it"),
    "no export": ({"export__dtype": "fp16"}, "export.dtype='fp16'", "'none' converts nothing"),
    "no rows to skip": (
        {"data__task": "dpo", "data__train_file": "a.jsonl", "data__on_bad": "skip"},
        "data.on_bad='skip'",
        "encoded before the first step",
    ),
    "no profile": ({"profile__start": 3}, "profile.start=3", "profile.steps=0"),
}


def test_a_warm_up_longer_than_the_run_is_told_and_no_other():
    told = effects.shortened(runs.config(steps=12, optimizer__warmup_steps=20))
    assert told == [
        "config.optimizer.warmup_steps=20 is longer than the run of config.steps=12: the warm-up takes 1 step"
    ]
    assert effects.shortened(runs.config(steps=20, optimizer__warmup_steps=20)) == []


def test_publications_and_checkpoints_that_no_step_reaches_are_told():
    saves = {"checkpoint__every": 5, "checkpoint__at_end": False}
    assert effects.unreached(runs.config(steps=4, **saves)) == [
        "config.checkpoint.every=5 has no effect: the run has config.steps=4"
    ]
    assert effects.unreached(runs.config(steps=5, **saves)) == []
    told = effects.unreached(runs.config(steps=4, export__deltas_every=5))
    assert told == ["config.export.deltas_every=5 has no effect: the run has config.steps=4"]
    assert effects.unreached(runs.config(steps=4, export__deltas_every=4)) == effects.unreached(runs.config()) == []


def test_a_patience_that_too_few_evaluations_could_exhaust_is_told():
    ends = {**runs.EVALUATED, "evaluate__patience": 2, "evaluate__every": 5}
    assert effects.unreached(runs.config(steps=16, **ends)) == []  # after steps 5, 10 and 15
    (told,) = effects.unreached(runs.config(steps=15, **ends))
    assert told.startswith(
        "config.evaluate.patience=2 cannot end the run of config.steps=15: it takes 3 evaluations before the last step, and there are 2;"
    )
    assert (
        effects.unreached(runs.config(steps=15, **ends | {"evaluate__every": 0})) == []
    )  # of which another line tells


@pytest.mark.parametrize("parts, is_told", [(1, False), (4, False), (5, True)])
def test_parts_that_do_not_divide_a_devices_tokens_are_told(parts, is_told):
    told = effects.undivided(runs.config(seq_len=32, mesh__expert=2, mesh__context=2, experts__parts=parts), rows=3)
    assert bool(told) == is_told and all(
        f"parts={parts} has no effect" in line and "48 tokens" in line for line in told
    )
    assert effects.undivided(runs.config(seq_len=32, experts__parts=5), rows=3) == []


def test_how_the_state_is_sharded_is_told_where_no_axis_shards_it():
    config, devices = runs.config(zero__min_size=0, zero__indivisible="pad"), jax.devices()[:2]
    told = effects.unsharded(config, zerojax.make_mesh(data=1, model=2, devices=devices))
    assert told == [
        f"config.zero.{setting} has no effect: no state is sharded over data=1"
        for setting in ("min_size=0", "indivisible='pad'")
    ]
    assert effects.unsharded(config, zerojax.make_mesh(devices=devices)) == []
    assert effects.unsharded(runs.config(), zerojax.make_mesh(model=2, devices=devices)) == []


@pytest.mark.parametrize("name", sorted(file.stem for file in (runs.ROOT / "configs").glob("*.py")))
def test_a_config_of_the_project_sets_nothing_that_is_not_read(name):
    raw = importlib.import_module(f"zerojax.configs.{name}").get_config()
    assert effects.unread(config_lib.from_dict(raw)) == []


@pytest.mark.parametrize("name", TOLD)
def test_a_setting_that_nothing_reads_is_told_with_the_reason(name):
    changes, setting, why = TOLD[name]
    lines = [line for line in effects.unread(runs.config(**changes)) if setting in line]
    assert lines and all(line.startswith(f"config.{setting} has no effect: ") and why in line for line in lines)


def test_settings_of_clients_are_told_where_no_client_is_named_but_not_that_none_is():
    def told(**changes):
        lines = effects.unread(runs.config(**changes))
        return [line.partition("=")[0] for line in lines if line.startswith("config.metrics.")]

    assert told(metrics__to=(), metrics__name="a", metrics__project="b") == [
        "config.metrics.project",
        "config.metrics.name",
    ]
    assert told(metrics__to=("wandb",), metrics__name="a") == []


def test_defaults_are_never_told():
    config = runs.config(evaluate__batches=16, optimizer__name="lion", zero__stage=0)
    assert effects.unread(config) == []


def test_a_setting_is_told_once_and_one_that_is_off_never():
    lines = effects.unread(
        runs.config(
            data__name="short_reviews",
            data__task="chat",
            epochs=1.0,
            evaluate__every=9,
            data__eval_split="",
            sample__length=0,
        )
    )
    assert sum("evaluate.every" in line for line in lines) == 1 and not any("sample.length" in line for line in lines)
