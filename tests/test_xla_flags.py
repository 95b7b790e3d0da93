"""Checks the names of the user's options. This module tests zerojax.xla_flags."""

import os

import pytest

from zerojax import xla_flags


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, set()),
        ("", set()),
        ("--xla_dump_to=/tmp/x", {"xla_dump_to"}),
        ("--xla_a=1 --xla_b --xla_c=--x", {"xla_a", "xla_b", "xla_c", "x"}),
    ],
)
def test_names_are_those_of_the_variable(monkeypatch, value, names):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if value is not None:
        monkeypatch.setenv("XLA_FLAGS", value)
    assert xla_flags.names() == names


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_a=1 --xla_gpu_exclude_nondeterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops_of_others=true", False),
    ],
)
def test_a_deterministic_process_is_told_by_the_last_value_of_an_option(monkeypatch, value, expected):
    monkeypatch.setenv("XLA_FLAGS", value)
    assert xla_flags.is_deterministic() is expected
    xla_flags.make_deterministic()
    assert xla_flags.is_deterministic()
    assert os.environ["XLA_FLAGS"].startswith(value)


def test_options_in_a_file_are_read_and_kept(monkeypatch, tmp_path):
    file = tmp_path / "options"
    file.write_text("--xla_force_host_platform_device_count=3\n--xla_gpu_deterministic_ops=false\n")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    assert xla_flags.names() == {"xla_force_host_platform_device_count", "xla_gpu_deterministic_ops"}
    assert xla_flags.num_cpu_devices() == 3
    assert not xla_flags.is_deterministic()
    xla_flags.make_deterministic()
    assert xla_flags.is_deterministic()
    assert os.environ["XLA_FLAGS"].startswith("--xla_force_host_platform_device_count=3")


@pytest.mark.parametrize("value", ["", "--xla_allow_excess_precision=true", "--xla_b"])
def test_roundings_are_kept_once_that_is_asked_for(monkeypatch, value):
    monkeypatch.setenv("XLA_FLAGS", value)
    assert not xla_flags.keeps_roundings()
    xla_flags.keep_roundings()
    assert xla_flags.keeps_roundings()
    assert os.environ["XLA_FLAGS"].startswith(value)
