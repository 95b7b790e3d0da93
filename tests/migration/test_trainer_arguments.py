"""Checks what a Trainer's arguments become. This module tests zerojax.migration.trainer_arguments."""

import pytest

from zerojax.errors import UserError
from zerojax.migration import keys, trainer_arguments

OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}


def lines(found):
    return {line.key: line for line in found.lines}


def test_an_argument_fills_keys_that_deepspeed_has():
    for taken, place in trainer_arguments.ARGUMENTS.values():
        assert place and all(keys.find(name).verdict == keys.TAKEN for name in taken)


def test_a_trainers_arguments_fill_in_auto():
    inner = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    }
    arguments = {
        "deepspeed": "ds.json",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-5,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "bf16": True,
        "logging_steps": 5,
        "label_smoothing_factor": 0.1,
    }
    found = trainer_arguments.translate_trainer(arguments, inner)
    expected = {
        "micro_batch_size": 4,
        "grad_accum": 2,
        "optimizer.learning_rate": 2e-5,
        "optimizer.b2": 0.95,
        "precision": "bf16",
        "log_every": 5,
    }
    assert {place: found.settings[place] for place in expected} == expected
    said = lines(found)
    assert set(arguments) <= said.keys() and [line.key for line in found.unsupported] == ["label_smoothing_factor"]
    assert set(trainer_arguments.ARGUMENTS) & set(arguments) <= {
        key for key, line in said.items() if line.verdict == keys.TAKEN
    }


def test_a_value_that_an_argument_switches_on_is_not_reported_as_off():
    found = trainer_arguments.translate_trainer({"bf16": True}, {"bf16": {"enabled": "auto"}})
    assert lines(found)["deepspeed.bf16.enabled"].verdict == keys.TAKEN


def test_a_key_under_its_older_name_is_the_configs_own():
    holds = [
        trainer_arguments._holds({name: {"enabled": True}}, "bf16.enabled") for name in ("bf16", "bfloat16", "fp16")
    ]
    assert holds == [True, True, False]


def test_arguments_without_deepspeed_decide_alone():
    arguments = {"output_dir": "out", "learning_rate": 1e-4, "bf16": True, "max_steps": 20}
    found = trainer_arguments.translate_trainer(arguments, None)
    expected = {
        "zero.stage": 0,
        "precision": "bf16",
        "steps": 20,
        "micro_batch_size": 8,
        "optimizer.learning_rate": 1e-4,
        "optimizer.b2": 0.999,
        "optimizer.clip_norm": 1.0,
        "optimizer.schedule": "linear",
        "optimizer.final_fraction": 0.0,
    }
    assert {place: found.settings[place] for place in expected} == expected
    said = lines(found)
    absent = {
        name for name, value in trainer_arguments.DEFAULTS.items() if value is not False and name not in arguments
    }
    assert set(said) == {*arguments, *absent, "deepspeed"}
    assert {name for name, line in said.items() if line.verdict == keys.TAKEN} == set(said) - {"output_dir"}
    assert said["weight_decay"].text == "absent: config.optimizer.weight_decay = 0.0, transformers' default"


def test_trainer_makes_what_the_deepspeed_config_lacks():
    found = trainer_arguments.translate_trainer(
        {"learning_rate": 1e-4, "weight_decay": 0.1}, {"bf16": {"enabled": True}}
    )
    assert (found.settings["optimizer.learning_rate"], found.settings["optimizer.schedule"]) == (1e-4, "linear")
    assert found.settings["optimizer.weight_decay_on"] == "matrices"  # Trainer exempts biases and norms
    assert lines(found)["learning_rate"].verdict == keys.TAKEN
    nulls = trainer_arguments.translate_trainer({"learning_rate": 1e-4}, {"optimizer": None, "scheduler": None})
    assert nulls.settings["optimizer.learning_rate"] == 1e-4 and nulls.settings["optimizer.schedule"] == "linear"
    own = {"optimizer": OPTIMIZER, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    found = trainer_arguments.translate_trainer({"lr_scheduler_type": "cosine"}, own)
    assert found.settings["optimizer.weight_decay_on"] == "all"  # DeepSpeed's optimizer gets all weights, as one group
    assert found.settings["optimizer.schedule"] == "WarmupLR"
    assert lines(found)["lr_scheduler_type"].verdict == keys.NO_EFFECT


@pytest.mark.parametrize(
    "given, steps",
    [
        ({"warmup_ratio": 0.1, "max_steps": 35}, 4),
        ({"warmup_steps": 0.1, "max_steps": 35}, 4),
        ({"warmup_steps": 7, "warmup_ratio": 0.1, "max_steps": 35}, 7),
        ({"warmup_ratio": 0.1}, 0.1),
        ({"warmup_ratio": 0.1, "num_train_epochs": 3}, 0.1),
        ({"warmup_steps": 0.1, "num_train_epochs": 3}, 0.1),
        ({"warmup_steps": 7, "lr_scheduler_type": "constant"}, 0),
    ],
)
def test_a_warm_up_is_a_number_of_steps_or_a_share_of_them(given, steps):
    assert trainer_arguments.translate_trainer(given, None).settings["optimizer.warmup_steps"] == steps


@pytest.mark.parametrize(
    "given",
    [
        {"warmup_ratio": float("nan")},
        {"warmup_steps": float("inf"), "lr_scheduler_type": None},
        {"max_steps": 10**400, "warmup_ratio": 0.5},
        {"learning_rate": "nan"},
        {"max_grad_norm": "nan"},
        {"lora_alpha": "nan", "lora_r": 4},
    ],
)
def test_what_is_no_number_is_refused_by_the_arguments_name(given):
    with pytest.raises(UserError, match=rf"^{next(iter(given))}: "):
        trainer_arguments.translate_trainer(given, None)


def test_what_is_not_translated_names_the_setting():
    arguments = {"report_to": "neptune", "num_train_epochs": 3, "lr_scheduler_type": "polynomial"}
    found = trainer_arguments.translate_trainer({**arguments, "deepspeed": "gone.json"}, None)
    said = lines(found)
    assert {line.key for line in found.unsupported} == {*arguments, "deepspeed"}
    assert "config.metrics.to" in said["report_to"].text and "config.epochs" in said["num_train_epochs"].text
    assert "'linear' is taken instead" in said["lr_scheduler_type"].text and "not there" in said["deepspeed"].text


def test_arguments_that_ask_for_nothing_are_not_reported_as_unsupported():
    dumped = {
        "deepspeed": None,
        "fsdp": [],
        "resume_from_checkpoint": None,
        "bf16_full_eval": False,
        "hub_token": "",
        "max_steps": -1,
    }
    found = trainer_arguments.translate_trainer({**dumped, "label_smoothing_factor": 0.1}, None)
    assert [line.key for line in found.unsupported] == ["label_smoothing_factor"]
    assert lines(found)["max_steps"].text == "it is not given; set config.steps" and "steps" not in found.settings


@pytest.mark.parametrize(
    "given, settings, unsaid",
    [
        (
            {"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"fsdp_activation_checkpointing": True}},
            {"zero.stage": 3, "offload.params": "host", "offload.optimizer": "host", "model.remat": "full"},
            (),
        ),
        ({"fsdp": ["shard_grad_op"], "fsdp_config": {"version": 2}}, {"zero.stage": 2}, ()),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, {"zero.stage": 2}, ()),
        ({"fsdp_version": 2, "fsdp_config": {"offload_params": False}}, {"zero.stage": 3}, ("deepspeed",)),
        ({"fsdp": "hybrid_shard", "fsdp_config": "fsdp.json"}, {"zero.stage": 3}, ()),
        (
            {"fsdp": "full_shard", "parallelism_config": {"tp_size": 2, "dp_shard_size": 3}},
            {"zero.stage": 3, "mesh.model": 2, "mesh.data": 3, "emulate_devices": 6},
            (),
        ),
        ({"context_parallel_size": 2, "tensor_parallel_size": 2}, {"mesh.context": 2, "mesh.model": 2}, ()),
        ({"fsdp_config": {"reshard_after_forward": True}}, {"zero.stage": 0}, ()),
        ({"fp8": True, "bf16": True}, {"precision": "fp8"}, ()),
    ],
)
def test_what_fsdp_and_axes_ask_for_is_what_it_is_in_accelerate(given, settings, unsaid):
    found = trainer_arguments.translate_trainer(given, None)
    assert {place: found.settings.get(place) for place in settings} == settings
    said = lines(found)
    assert not said.keys() & set(unsaid)
    for place in settings.keys() - {"emulate_devices"}:
        assert found.sources[place] or settings[place] == 0, place
    assert {line.key for line in found.unsupported} <= {"fsdp_config"}


def test_a_deepspeed_config_decides_over_fsdp():
    inner = {"zero_optimization": {"stage": 1}, "sequence_parallel_size": 4}
    found = trainer_arguments.translate_trainer({"fsdp": "full_shard", "context_parallel_size": 2}, inner)
    assert (found.settings["zero.stage"], found.settings["mesh.context"]) == (1, 4)
    assert lines(found)["fsdp"].verdict == keys.NO_EFFECT


@pytest.mark.parametrize(
    "given",
    [
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 2e-5}},
        {"lr_scheduler_type": "cosine", "cosine_min_lr_ratio": 0.2},
    ],
)
def test_a_cosine_ends_at_its_lowest_rate(given):
    settings = trainer_arguments.translate_trainer({"learning_rate": 1e-4, **given}, None).settings
    assert settings["optimizer.schedule"] == "cosine"
    assert settings["optimizer.final_fraction"] == pytest.approx(0.2)
