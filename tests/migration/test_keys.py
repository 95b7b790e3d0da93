"""Checks the table of DeepSpeed's keys. This module tests zerojax.migration.keys."""

import pytest
import runs

from zerojax.migration import accelerate_keys, keys
from zerojax.trainer import config as config_lib


@pytest.mark.parametrize("table", [keys.KEYS, accelerate_keys.KEYS], ids=["deepspeed", "accelerate"])
def test_a_taken_key_names_settings_that_exist_and_every_other_key_a_reason(table):
    config = config_lib.to_dict(runs.config())
    for name, row in table.items():
        assert row.verdict in keys.VERDICTS, name
        assert bool(row.into) == (row.verdict == keys.TAKEN), name
        assert row.why or row.into, name
        for place in row.into:
            node = config
            for part in place.split("."):
                node = node[part]


def test_an_older_name_leads_to_a_row_and_is_none_itself():
    for old, new in keys.ALIASES.items():
        assert keys.find(new) is not None or any(name.startswith(f"{new}.") for name in keys.KEYS), new
        assert old not in keys.KEYS


def test_the_nearest_row_counts():
    assert keys.find("checkpoint.load_universal").verdict == keys.IMPLIED
    assert keys.find("checkpoint.anything.below").verdict == keys.NO_EFFECT
    assert keys.find("aio") is keys.KEYS["aio.*"]
    assert keys.find("nothing.like.it") is None
    assert keys.canonical("bfloat16.enabled") == "bf16.enabled"
    assert keys.canonical("zero_optimization.cpu_offload") == "zero_optimization.offload_optimizer.device"
