"""Checks the names of Accelerate's keys. This module tests zerojax.interop.deepspeed.accelerate_keys."""

from zerojax.interop.deepspeed import accelerate_keys, keys


def test_keys_are_known_with_and_without_their_groups_prefix():
    for name in ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy"):
        assert accelerate_keys.canonical(name) == "fsdp_config.sharding_strategy"
    assert accelerate_keys.canonical("parallelism_config.parallelism_config_tp_size") == "parallelism_config.tp_size"
    assert accelerate_keys.canonical("num_processes") == "num_processes"


def test_a_trainers_argument_fills_keys_that_deepspeed_has():
    for taken, place in accelerate_keys.TRAINER.values():
        assert place and all(keys.find(name).verdict == keys.TAKEN for name in taken)
