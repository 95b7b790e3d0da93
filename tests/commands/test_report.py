"""Checks the facts of a report and their remedies. This module tests zerojax.commands.report."""

import json

import pytest
import runs

from zerojax.commands import facts as facts_lib
from zerojax.commands import report
from zerojax.commands.facts import NOTE, OK, WRONG, Fact


def by_name(facts):
    return {fact.name: fact for fact in facts}


@pytest.fixture
def call(monkeypatch, run_main):
    """Returns f(facts, words) -> (status, stdout, stderr)."""

    def run(facts, *words):
        monkeypatch.setattr(report, "collect", lambda: iter(facts))
        return run_main(report, *words)

    return run


FACTS = [Fact("a", "one", "1"), Fact("a", "two", "2", NOTE, "do this"), Fact("b", "three", "3", WRONG, "do that")]


def test_the_status_is_that_of_the_worst_line(call):
    status, out, err = call(FACTS)
    assert err == "asking devices and compilers, which may take a minute\n"
    assert status == 1 and out.endswith("1 wrong\n") and "\033" not in out
    assert call(FACTS[:2])[0] == 0


def test_json_has_every_fact(call):
    _, out, err = call(FACTS, "--json")
    assert err == ""
    found = json.loads(out)
    assert not found["ok"] and found["facts"][2] == {
        "group": "b",
        "name": "three",
        "value": "3",
        "verdict": "wrong",
        "remedy": "do that",
    }


def test_versions_are_those_that_are_required(monkeypatch):
    assert {fact.verdict for fact in report._versions()} == {OK}
    true = facts_lib.version
    old = {"optax": "0.1.0", "jaxlib": "0.1.0", "flax": None}
    monkeypatch.setattr(facts_lib, "version", lambda name: old.get(name, true(name)))
    found = by_name(report._versions())
    assert found["optax"].verdict == WRONG and "pip install 'optax>=" in found["optax"].remedy
    assert found["flax"].value.startswith("missing, wants") and "the version of jax" in found["jaxlib"].remedy


def test_devices_that_are_here_and_not_used_are_wrong_unless_hidden(monkeypatch):
    answer = {"backend": "cpu", "runtime": "cpu", "devices": [{"kind": "cpu", "memory": None}]}
    monkeypatch.setattr(report, "_ask", lambda *words: (answer, ""))
    monkeypatch.setattr(facts_lib, "lines", lambda command: [])
    monkeypatch.setattr(report.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found = by_name(report._devices())
    assert found["accelerators"].verdict == WRONG and "zerojax[cuda]" in found["accelerators"].remedy
    assert found["driver"].verdict == WRONG
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert by_name(report._devices())["accelerators"].verdict == NOTE
    monkeypatch.setattr(report, "_ask", lambda *words: (None, "RuntimeError: no driver"))
    assert by_name(report._devices())["JAX"].value == "RuntimeError: no driver"


@pytest.mark.parametrize("link, verdict", [("NV18", OK), ("PHB", NOTE)])
def test_links_are_read_off_the_matrix_of_the_driver(monkeypatch, link, verdict):
    rows = ["\tGPU0\tGPU1\tNIC0", f"GPU0\t X \t{link}\tSYS", f"GPU1\t{link}\t X \tSYS", "NIC0\tSYS\tSYS\t X "]
    monkeypatch.setattr(facts_lib, "lines", lambda command: rows)
    found = by_name(report._links())["between GPUs"]
    assert (found.value, found.verdict) == (f"{link} between 1 pairs", verdict)


def test_the_cache_and_the_environment_are_shown_without_secrets(monkeypatch, tmp_path):
    with runs.jax_settings(jax_enable_compilation_cache=False):
        assert next(report._cache()).verdict == NOTE
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "program").write_bytes(b"1234")
    for folder, shown in ((None, f"{tmp_path}/zerojax/xla, 0 B"), (str(tmp_path), f"{tmp_path}, 4 B")):
        with runs.jax_settings(jax_compilation_cache_dir=folder):
            assert next(report._cache()) == Fact("cache", "compiled programs", shown)
    shown = report._environment(
        {"XLA_FLAGS": "--x", "NCCL_DEBUG": "INFO", "HF_TOKEN": "a", "JAX_API_KEY": "b", "HOME": "c"}
    )
    assert [fact.name for fact in shown] == ["NCCL_DEBUG", "XLA_FLAGS"]


def test_a_process_that_fails_or_hangs_is_one_line(monkeypatch):
    assert report._ask("raise ValueError('first; second')") == (None, "ValueError: first; second")
    assert report._ask("import os; os._exit(7)") == (None, "the process ended with status 7")
    monkeypatch.setattr(report, "LIMIT", 0.5)
    assert report._ask("import time; time.sleep(60)") == (None, "no answer within 0.5 s")


def test_kernels_are_compiled_for_a_gpu_that_is_absent():
    found, why = report._ask(report._ASK_KERNEL, "h200")
    assert why == "" and found["calls"] >= 1
