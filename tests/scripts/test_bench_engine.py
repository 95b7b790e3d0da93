"""Checks the benchmark of the engine with a small model. This module tests scripts/bench_engine.py."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import bench_engine


@pytest.mark.long
def test_a_variant_that_fails_is_a_row_beside_the_others(capsys):
    words = ["--preset", "test", "--prompt", "16", "--new_tokens", "4", "--requests", "2", "--together", "9"]
    assert bench_engine.main([*words, "--variants", "int8", "many", "--prefill_tokens", "-1"]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| int8 | 1 | ") and rows[2].startswith(
        "| many | UserError: prefill_tokens: must be 1 or more"
    )


@pytest.mark.long
def test_weights_in_host_memory_are_measured_against_their_link(capsys):
    words = ["--preset", "test", "--prompt", "16", "--new_tokens", "4", "--requests", "2", "--together", "2"]
    assert bench_engine.main([*words, "--variants", "host"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| host | 2 | ")


def test_a_format_is_that_of_many_requests(capsys):
    with pytest.raises(SystemExit):
        bench_engine.main(["--variants", "bf16", "--format", "int8"])
    assert "--format: is that of the variant many" in capsys.readouterr().err
