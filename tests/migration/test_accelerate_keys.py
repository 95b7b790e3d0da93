"""Checks the names of Accelerate's keys. This module tests zerojax.migration.accelerate_keys."""

from zerojax.migration import accelerate_keys


def test_keys_are_known_with_and_without_their_groups_prefix():
    for name in ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy"):
        assert accelerate_keys.canonical(name) == "fsdp_config.sharding_strategy"
    assert accelerate_keys.canonical("parallelism_config.parallelism_config_tp_size") == "parallelism_config.tp_size"
    assert accelerate_keys.canonical("num_processes") == "num_processes"
