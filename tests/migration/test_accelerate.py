"""Checks what Accelerate configs and hostfiles become. This module tests zerojax.migration.accelerate."""

import pytest

from zerojax.errors import UserError
from zerojax.migration import accelerate, keys

PLAIN = {"compute_environment": "LOCAL_MACHINE", "num_processes": 8, "num_machines": 2, "mixed_precision": "bf16"}


def translated(*more, **how):
    content = dict(PLAIN)
    for one in more:
        content |= one
    return accelerate.translate_accelerate(content, **how)


def lines(found):
    return {line.key: line for line in found.lines}


@pytest.mark.parametrize(
    "strategy, stage, replica",
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, 3, None),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, 2, None),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, 0, None),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, 3, 2),
        ({"fsdp_sharding_strategy": 1}, 3, None),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, 3, None),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, 2, None),
        ({"fsdp_reshard_after_forward": "FULL_SHARD"}, 3, None),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, 2, 2),
    ],
)
def test_a_strategy_of_fsdp_is_a_stage(strategy, stage, replica):
    found = translated({"distributed_type": "FSDP", "fsdp_config": strategy})
    assert (found.settings["zero.stage"], found.settings.get("mesh.replica")) == (stage, replica)
    assert found.settings["precision"] == "bf16" and found.devices == 8


@pytest.mark.parametrize(
    "strategy, offloaded", [("FULL_SHARD", ["optimizer", "params"]), ("SHARD_GRAD_OP", ["optimizer"]), ("NO_SHARD", [])]
)
def test_what_fsdp_offloads_follows_from_what_is_sharded_and_is_reported(strategy, offloaded):
    block = {"fsdp_sharding_strategy": strategy, "fsdp_offload_params": True}
    found = translated({"distributed_type": "FSDP", "fsdp_config": block})
    assert [place for place in found.settings if place.startswith("offload.")] == [f"offload.{p}" for p in offloaded]
    line = lines(found)["fsdp_config.fsdp_offload_params"]
    assert line.verdict == (keys.TAKEN if offloaded else keys.NO_EFFECT)


def test_the_deepspeed_keys_of_accelerate_are_taken():
    block = {
        "zero_stage": 3,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero3_init_flag": True,
        "offload_optimizer_device": "cpu",
    }
    found = translated({"distributed_type": "DEEPSPEED", "deepspeed_config": block})
    assert {
        place: found.settings[place] for place in ("zero.stage", "grad_accum", "optimizer.clip_norm", "precision")
    } == {
        "zero.stage": 3,
        "grad_accum": 4,
        "optimizer.clip_norm": 0.5,
        "precision": "bf16",
    }
    said = lines(found)
    assert said["deepspeed_config.zero_stage"].verdict == keys.TAKEN
    assert said["mixed_precision"].verdict == keys.TAKEN
    assert said["deepspeed_config.offload_optimizer_device"].verdict == keys.TAKEN
    assert found.settings["offload.optimizer"] == "host"


def test_a_deepspeed_config_file_decides_alone_and_its_keys_follow():
    block = {"deepspeed_config_file": "ds.json", "zero_stage": 1}
    inner = {"zero_optimization": {"stage": 2}, "train_batch_size": 16, "fp16": {"enabled": True}}
    found = translated({"distributed_type": "DEEPSPEED", "deepspeed_config": block}, deepspeed=inner)
    assert (found.settings["zero.stage"], found.settings["precision"]) == (2, "fp16")
    said = lines(found)
    assert said["deepspeed_config.zero_stage"].verdict == keys.NO_EFFECT
    assert said["ds.json: zero_optimization.stage"].verdict == keys.TAKEN
    with pytest.raises(
        UserError, match=r"deepspeed_config_file: is 'ds.json', which decides the stage.*put it beside this file"
    ):
        translated({"distributed_type": "DEEPSPEED", "deepspeed_config": block})


def test_groups_of_another_kind_of_run_have_no_effect():
    found = translated({"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}})
    assert found.settings["zero.stage"] == 0
    assert lines(found)["fsdp_config.fsdp_sharding_strategy"].verdict == keys.NO_EFFECT


def test_megatrons_sizes_become_the_mesh_the_passes_and_the_stage():
    sizes = {
        "megatron_lm_tp_degree": 2,
        "megatron_lm_pp_degree": "2",
        "megatron_lm_num_micro_batches": 8,
        "megatron_lm_gradient_clipping": 0.5,
        "megatron_lm_use_distributed_optimizer": True,
        "megatron_lm_recompute_activations": True,
        "megatron_lm_sequence_parallelism": True,
    }
    found = translated({"distributed_type": "MEGATRON_LM", "megatron_lm_config": sizes})
    expected = {"mesh.model": 2, "mesh.pipe": 2, "grad_accum": 8, "optimizer.clip_norm": 0.5, "zero.stage": 1}
    assert {place: found.settings[place] for place in (*expected, "model.remat")} == {**expected, "model.remat": "full"}
    assert not found.unsupported
    assert translated({"distributed_type": "MEGATRON_LM", "megatron_lm_config": {}}).settings["zero.stage"] == 0


def test_sizes_of_parallelism_become_the_mesh_and_those_without_counterpart_are_named():
    sizes = {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
        "parallelism_config_tp_size": 1,
    }
    found = translated({"distributed_type": "FSDP", "fsdp_config": {}, "parallelism_config": sizes})
    assert (found.settings["mesh.replica"], found.settings["mesh.data"]) == (2, 4)
    assert not found.unsupported
    tensor = translated({"distributed_type": "FSDP", "parallelism_config": {**sizes, "parallelism_config_tp_size": 2}})
    assert (tensor.settings["mesh.data"], tensor.settings["mesh.model"], tensor.unsupported) == (4, 2, ())
    context = translated({"distributed_type": "FSDP", "parallelism_config": {**sizes, "parallelism_config_cp_size": 2}})
    assert (context.settings["mesh.data"], context.settings["mesh.context"], context.unsupported) == (4, 2, ())


@pytest.mark.parametrize("value, expected", [("no", "fp32"), (False, "fp32"), ("fp16", "fp16"), ("fp8", "fp8")])
def test_mixed_precision_is_read_as_yaml_gives_it(value, expected):
    found = translated({"distributed_type": "NO", "mixed_precision": value})
    assert found.settings["precision"] == expected
    assert not found.unsupported
    found = translated(
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "mixed_precision": value}
    )
    assert found.settings["precision"] == expected


@pytest.mark.parametrize(
    "backend, expected", [("TE", {"fp8.recipe": "delayed", "fp8.history": 32}), ("AO", {"fp8.recipe": "tensorwise"})]
)
@pytest.mark.parametrize("kind", ["MULTI_GPU", "DEEPSPEED"])
def test_an_fp8_backend_becomes_the_recipe_that_scales_alike(kind, backend, expected):
    block = {"backend": backend, "amax_history_len": 32, "margin": 0, "fp8_format": "HYBRID"}
    found = translated({"distributed_type": kind, "mixed_precision": "fp8", "fp8_config": block})
    assert {place: value for place, value in found.settings.items() if place.startswith("fp8.")} == expected
    assert found.settings["precision"] == "fp8" and not found.unsupported
    found = translated({"distributed_type": kind, "mixed_precision": "bf16", "fp8_config": block})
    assert not any(place.startswith("fp8.") for place in found.settings) and not found.unsupported
    block |= {"backend": "MSAMP", "margin": 2}
    found = translated({"distributed_type": kind, "mixed_precision": "fp8", "fp8_config": block})
    assert {line.key for line in found.unsupported} == {"fp8_config.backend", "fp8_config.margin"}


@pytest.mark.parametrize("value", ["NO", "no", False, None, "MULTI_GPU"])
def test_a_config_without_sharding_is_stage_0(value):
    found = translated({"distributed_type": value})
    assert found.settings["zero.stage"] == 0 and not found.unsupported


def test_a_wrong_value_is_named():
    with pytest.raises(UserError, match=r"mixed_precision: must be one of no, .*, and is 'fp4'"):
        translated({"mixed_precision": "fp4"})


def test_a_hostfile_is_a_number_of_devices():
    found = accelerate.translate_hostfile("# two\nworker-0 slots=4\nworker-1 slots=4 # rack 2\n\n")
    assert (found.devices, found.settings["emulate_devices"]) == (8, 8)
    assert [line.key for line in found.lines] == ["worker-0", "worker-1"]
    for text, message in (
        ("a slots=4\na slots=2", "line 2: must be"),
        ("a", "line 1: must be"),
        ("# none", "names no host"),
    ):
        with pytest.raises(UserError, match=message):
            accelerate.translate_hostfile(text)
