"""Checks that kept losses come back as they were, or are refused. This module tests zerojax.trainer.card.past."""

import json
import sys

import pytest
import runs

from zerojax.errors import UserError
from zerojax.trainer import command
from zerojax.trainer import config as config_lib
from zerojax.trainer.card import past

DEVICES, VERSIONS = {"platform": "cpu", "kind": "cpu", "count": 4}, {"jax": "0.10.2"}
KEPT = past.PastRun({"steps": 2, "metrics.to": []}, [1 / 3, 0.25], [1.0, 2.0], DEVICES, VERSIONS, ["0", "3"])


def test_numbers_come_back_with_the_digits_of_a_float32(tmp_path):
    path = str(tmp_path / "kept.json")
    past.write(path, KEPT)
    found = past.read(path)
    assert found.losses == [0.333333333, 0.25] and found.machine == "4 x cpu, jax 0.10.2"
    assert (found.config, found.norms, found.settings) == (KEPT.config, KEPT.norms, KEPT.settings)


def test_the_flags_of_kept_settings_give_the_same_config(monkeypatch):
    config = runs.config(metrics__to=(), zero__stage=2, zero__overrides=(("a|b", ("data", None)),))
    kept = past.PastRun(json.loads(json.dumps(past.differing(config))), [1.0], [1.0], DEVICES, VERSIONS, [])
    assert "steps" in kept.config and "zero.min_size" not in kept.config
    words = ["zerojax verify", *kept.flags]
    monkeypatch.setattr(sys, "argv", words)
    runs.forget_flags()
    found = config_lib.from_dict(command.parse(words))
    assert json.dumps(config_lib.to_dict(found)) == json.dumps(config_lib.to_dict(config))  # for which lists are tuples
    runs.forget_flags()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-9], "is not JSON; write it again with --save"),
        (lambda text: text.replace("0.25", "0.26"), "is altered"),
        (
            lambda text: text.replace('"schema": 1', '"schema": 2'),
            "holds no losses of a past run that this version reads",
        ),
        (lambda text: "[]", "holds no losses"),
        (lambda text: '{"schema": 1}', "is altered"),
    ],
)
def test_what_is_not_as_written_is_refused_with_its_name(tmp_path, change, words):
    path = tmp_path / "kept.json"
    past.write(path, KEPT)
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=words) as error:
        past.read(str(path))
    assert str(path) in str(error.value)


def test_losses_that_are_missing_or_not_finite_are_refused(tmp_path):
    for losses in ([], [1.0], [1.0, float("inf")]):
        past.write(tmp_path / "kept.json", past.PastRun({}, losses, [1.0, 2.0], DEVICES, VERSIONS, []))
        with pytest.raises(UserError, match=r"lacks losses or norms|is not JSON"):
            past.read(str(tmp_path / "kept.json"))
