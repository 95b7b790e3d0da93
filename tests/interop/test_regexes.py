"""Checks the limit on regexes of others. This module tests zerojax.interop.regexes."""

import re
import subprocess
import time

import pytest

from zerojax.errors import UserError
from zerojax.interop import regexes

NAMES = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(40) for name in "qkvo"]


def regex(pattern, method="fullmatch"):
    return regexes.Regex("adapter_config.json: target_modules", pattern, pattern, method)


@pytest.mark.parametrize("pattern", ["(.*)*(.*)*x", "(?i)" + "[\0-\U0010ffff]" * 900, "(((.*)*)*)*" * 9 + "x"])
def test_a_regex_that_would_take_minutes_is_refused_in_seconds(pattern, monkeypatch):
    began = time.monotonic()
    monkeypatch.setattr(regexes, "SECONDS", 0.5)
    with pytest.raises(UserError, match=r"^adapter_config.json: target_modules: .* takes .*; write it without"):
        regexes.check([regex(r".*\.(q|v)_proj.*"), regex(pattern)], NAMES)
    assert time.monotonic() - began < 60


def test_the_regexes_that_adapters_have_pass_with_lookaheads_and_many_names(monkeypatch):
    usual = r"^(?!.*vision).*(?:self_attn|mlp).*(?:q_proj|v_proj)$"
    assert sum(re.fullmatch(usual, name) is not None for name in NAMES) == 80
    regexes.check([regex(usual), regex(f"(.*\\.)?({usual})$", "match")], NAMES * 25)
    regexes.check([regex("(a)+(b"), regex("(" * 5000 + "a*b*")], NAMES)  # no regexes, as their reader says
    monkeypatch.setattr(subprocess, "Popen", None)  # no process for what cannot be slow
    regexes.check([regex("q_proj"), regex(r".*\.(q|v)_proj"), regex("model.layers.1.mlp")], NAMES)


def test_a_wait_that_ends_leaves_no_process(monkeypatch):
    monkeypatch.setattr(regexes, "_WAIT", 0.0)
    with pytest.raises(UserError, match="takes more than"):
        regexes.check([regex("(.*)*(.*)*x")], NAMES)
