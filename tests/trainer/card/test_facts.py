"""Checks what a card tells of a run before its first step. This module tests zerojax.trainer.card.facts."""

import json
import types

import jax

from zerojax.trainer.card import facts


def test_versions_are_those_installed_and_the_driver_is_named_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setattr(facts, "_DRIVER", tmp_path / "version")
    found = facts.versions()
    assert found["jax"] == jax.__version__ and "driver" not in found
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    )
    assert facts.versions()["driver"] == "580.95.05"


def test_changed_sources_and_settings_have_other_fingerprints(monkeypatch):
    assert facts.sources() == facts.sources() and len(facts.sources()) == 12
    before = facts.sources()
    monkeypatch.setattr(facts, "SOURCES", ("pallas_kernels",))
    assert facts.sources() != before
    assert facts.sha256({"a": 1, "b": (2,)}) == facts.sha256({"b": [2], "a": 1}) != facts.sha256({"a": 2, "b": [2]})


def test_received_bytes_are_summed_by_kind_and_by_role():
    rows = [types.SimpleNamespace(kind=kind, nbytes=nbytes) for kind, nbytes in (("b", 1), ("a", 2), ("b", 4))]
    totals = {"gradients": {"bytes": 5.0}, "scalars": {"bytes": 0}}
    plan = types.SimpleNamespace(ledger=types.SimpleNamespace(rows=rows, totals=lambda: totals))
    found = facts.received(plan)
    assert found == {"by_kind": {"a": 2, "b": 5}, "by_role": {"gradients": 5}} and json.dumps(found)
