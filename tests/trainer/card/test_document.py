"""Checks that a card is found, read and refused. This module tests zerojax.trainer.card.document."""

import contextlib
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
    written = json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    assert written.pop("crc32") and written == document.read(tmp_path)
    assert written == {"schema": 1, "loss": "nan", "in": ["inf", {"a": "-inf"}]}


def test_no_flipped_bit_changes_what_a_card_says(tmp_path, recwarn):
    document.write(tmp_path, {"schema": 1, "loss": 2.5, "parts": [{"status": "finished", "first_step": 1}]})
    path = tmp_path / "run.json"
    whole, card = path.read_bytes(), document.read(tmp_path)
    name = whole.index(b'"crc32"')  # a card of older code has no such field
    refused = 0
    for place in set(range(len(whole))) - set(range(name, name + 7)):
        path.write_bytes(bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]]))
        found = document.read_if_there([tmp_path])
        refused += found is None
        assert found in (None, card)  # a space may be another one
    assert refused > 50 and all(str(one.message).startswith(f"{path}: ") for one in recwarn)
    path.write_text('{"schema": 1, "loss": 2.5}')
    assert document.read(tmp_path) == {"schema": 1, "loss": 2.5}


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
    with pytest.warns(UserWarning, match=words) if text is not None else contextlib.nullcontext():
        assert document.read_if_there([tmp_path]) is None
