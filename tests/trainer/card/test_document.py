"""Checks that a card is found, read and refused. This module tests zerojax.trainer.card.document."""

import json
import math

import pytest

from zerojax.errors import UserError
from zerojax.trainer.card import document

CARD = {"schema": 1, "status": "finished", "loss": 2.5}


def test_a_written_card_is_read_from_its_folder_or_its_file(tmp_path):
    document.write(tmp_path, CARD)
    assert document.read(tmp_path) == document.read(tmp_path / "run.json") == CARD
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_numbers_that_are_not_finite_are_text(tmp_path):
    document.write(tmp_path, {"schema": 1, "loss": math.nan, "in": [math.inf, {"a": -math.inf}]})
    assert json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail) == {
        "schema": 1,
        "loss": "nan",
        "in": ["inf", {"a": "-inf"}],
    }


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "there is no run card; name the folder of a run"),
        ("{", "is not JSON"),
        ("\udc80", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a run card"),
        ('{"schema": "1"}', "is not a run card"),
        ('{"schema": 2}', "has schema 2, and this version reads 1"),
    ],
)
def test_what_is_no_card_is_refused_in_one_line(tmp_path, text, words):
    if text is not None:
        (tmp_path / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=words):
        document.read(tmp_path)
    assert document.read_if_there([tmp_path]) is None
