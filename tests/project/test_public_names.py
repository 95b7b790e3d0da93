"""Compares what users may rely on with docs/public_names.txt. This module runs scripts/public_names.py, and judges what it finds."""

import pathlib
import sys

import pytest

import zerojax

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import public_names

KEPT = (public_names.ROOT / "docs" / "public_names.txt").read_text()


def test_public_names_flags_and_settings_are_those_of_the_committed_list():
    found, kept = public_names.text().splitlines(), KEPT.splitlines()
    lost, new = ([line for line in a if line not in b] for a, b in ((kept, found), (found, kept)))
    assert (lost, new) == ([], []) and found == kept, (
        "see the rule of deprecation in CONTRIBUTING.md; then: python scripts/public_names.py > docs/public_names.txt"
    )


def test_every_public_name_has_a_line_and_those_of_pages_too():
    starts = {line.removeprefix("class ").split("(")[0].split(":")[0] for line in KEPT.splitlines()}
    modules = {f"zerojax.{name}" for name in zerojax.__all__} - starts
    assert modules == {"zerojax.fp8"} and "zerojax.fp8.dot_general" in starts
    assert {"zerojax.launch.devices.emulate_cpu_devices", "config.zero.stage", "zerojax.Blocks.pattern"} <= starts


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("def f(a, *, b: int = 2) -> str: ...", "x.f(a, *, b: int=2) -> str"),
        ("class f(Base):\n    b: int = 2\n    _c: int = 3\n    @property\n    def d(self) -> int: ...", "x.f.d -> int"),
        ("f = 3", "x.f = 3"),
    ],
)
def test_a_line_shows_what_a_caller_passes_and_gets(monkeypatch, code, line):
    monkeypatch.setattr(public_names, "_node", lambda _: public_names.ast.parse(code).body[0])
    lines = public_names.of_name("x.f", "x.f")
    assert lines[-1] == line and not [one for one in lines if "_c" in one]
