"""Checks the command `zerojax calibrate`. This module tests zerojax.commands.calibrate."""

import errno
import itertools
import json

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.clock import rates
from zerojax.commands import calibrate
from zerojax.hlo import syntax
from zerojax.plan import targets


@pytest.fixture
def run(run_main, tmp_path):
    """Returns a function that runs the command, and returns its status, output, error and file."""

    def started(*words):
        path = tmp_path / "rates.json"
        printed = run_main(calibrate, f"--out={path}", *words)
        return (*printed, json.loads(path.read_text()) if path.exists() else None)

    return started


def test_what_is_measured_is_in_the_file_beside_the_table_and_what_fails_or_has_no_time_is_named(run, monkeypatch):
    every = calibrate.cases

    def few(bench, table):
        named = {case.name: case for case in every(bench, table)}
        yield named["matmul.bf16.1024"]
        yield calibrate.Measurement("a case", lambda: 1 / 0)
        yield named["all-gather of 2"]

    monkeypatch.setattr(calibrate, "cases", few)
    status, out, err, document = run("--emulate_devices=2")
    assert status == 0 and "ratio" in out and "not measured: a case (division by zero)" in out
    assert "matmul.bf16.1024" in err and "s  all-gather of 2" in err
    table, figures = rates.of("h200"), document["figures"]
    own = {name for name, (_, source) in figures.items() if source.startswith(rates.MEASURED)}
    assert own == {"matmul.bf16.1024", "alpha.all-gather.2", "beta.alone.all-gather.2"}
    assert all(figures[name][0] > 0 for name in own)
    for name, value in table.figures.items():
        if name not in own and not name.startswith("error."):
            assert figures[name][0] == value and figures[name][1].startswith("not measured, an H200's: ")
    assert not any(name.startswith("error.") for name in figures)
    assert document["versions"].startswith("jax ") and document["date"] and "cpu" in document["machine"]
    status, out, err, _ = run()
    assert status == 2 and "exists" in err

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(calibrate.files, "replace", full)
        status, out, err, _ = run("--force", "--limit_s=1e-9")
    assert (
        status == 2
        and "a case (no time left)" in out
        and err.count("\n") == 1
        and "No space left on device); make room" in err
    )
    status, out, _, document = run("--force", "--limit_s=1e-9")
    assert status == 0 and set(document["not measured"].values()) == {"no time left"}


@pytest.mark.long
def test_every_case_runs_on_emulated_devices(run):
    status, out, _, document = run("--emulate_devices=2", "--limit_s=10000")
    assert status == 0 and not document["not measured"], out
    measured = {name for name, (_, source) in document["figures"].items() if source.startswith(rates.MEASURED)}
    assert len(measured) > 35 and measured >= {"slowdown.matmul", "slowdown.attention", "link.both", "gap"}


def test_two_programs_tell_the_rate_of_a_collective_beside_matmuls_and_their_slow_down():
    for rate, speed in itertools.product((0.4, 0.9), (0.7, 0.95)):
        alone, later_alone, long, short = 3.0, 12.0, 20.0, 2.0
        took = alone / rate
        both = took + (long - took * speed)  # the matmuls' work that is left after the collective runs at full speed
        beside = short / speed
        other = beside + later_alone - beside * rate
        found = calibrate.solved(both - long, other - later_alone, alone, short)
        assert found == pytest.approx((rate, speed), rel=1e-9)


def test_a_rate_of_copies_beyond_the_links_is_not_measured():
    figures = {
        "link.to host": 9e10,
        "link.both": 4e10,
        "host.to host.2": 1.7e11,
        "host.both.2": 1.1e11,
        "bandwidth": 3e12,
    }
    figures = {name: (value, "") for name, value in figures.items()}
    link = targets.get("h100").host_link
    assert set(calibrate.beyond(figures, link)) == {"link.to host", "host.to host.2"}
    assert calibrate.beyond(figures, None) == {}


def test_a_program_copies_each_array_to_the_host():
    devices = np.asarray(compile_only.gpus("h100", "1x2"))
    sharding = NamedSharding(Mesh(devices, "x"), P("x"))
    here = [jax.ShapeDtypeStruct((2, 1024), jnp.float32, sharding=sharding)] * 2
    text = compile_only.compile_gpu(jax.jit(calibrate.copied).lower(here, []))
    copies = [i for i in syntax.parse(text).entry.instructions if i.opcode == "copy-start"]
    assert [copy.arrays[0].is_on_host for copy in copies] == [True, True]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(run, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "cases", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for path in (tmp_path / ("x" * 252), tmp_path / "file" / "rates.json"):
        status, _, err, _ = run(f"--out={path}")
        assert status == 2 and "cannot be " in err and "choose another path" in err and err.count("\n") == 1
