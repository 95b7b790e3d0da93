"""Checks what a draft says of keys. This module tests zerojax.migration.draft."""

import pytest

from zerojax.errors import UserError
from zerojax.migration import draft, keys
from zerojax.migration.keys import ASSUMED, NO_EFFECT, TAKEN, UNSUPPORTED, Key

TABLE = {
    "size": Key(TAKEN, "", ("steps",)),
    "extra.*": Key(UNSUPPORTED, "there is none", (), (0,)),
    "share": Key(TAKEN, "", ("seed",)),
}


def verdicts(content, fill=lambda found: None, **how):
    found = draft.Draft(content, TABLE, **how)
    fill(found)
    return {line.key: (line.verdict, line.text) for line in found.finish().lines}


def test_a_key_is_taken_only_if_it_decided_a_setting():
    said = verdicts({"size": 3, "share": 2}, lambda found: found.put("steps", found.whole("size"), "size"))
    assert said == {"size": (TAKEN, "config.steps = 3"), "share": (NO_EFFECT, "other keys decide it")}


def test_a_group_that_is_off_asks_for_nothing():
    assert verdicts({"extra": {"enabled": False, "deep": {"er": 1}}})["extra.deep.er"][0] == NO_EFFECT
    assert verdicts({"extra": {"enabled": True, "deep": {"er": 1}}})["extra.deep.er"][0] == UNSUPPORTED
    assert (
        verdicts({"extra": {"shared_parameters": {"enabled": "no"}, "group": {"x": 1}}})["extra.group.x"][0]
        == NO_EFFECT
    )
    assert verdicts({"extra": {"value": 0}})["extra.value"] == (NO_EFFECT, "it is off")


def test_auto_is_filled_in_or_left_to_the_script():
    assert verdicts({"size": "auto"})["size"] == (ASSUMED, "the training script's; set config.steps")
    found = draft.Draft({"size": "auto", "share": 2}, TABLE)
    assert found.is_auto("size") and not found.is_auto("share")
    found = draft.Draft({"size": "auto"}, TABLE, auto={"size": 4})
    assert found.whole("size") == 4 and not found.is_auto("size") and found.is_auto("size", filled=True)


def test_an_unknown_key_is_named_with_the_nearest():
    assert verdicts({"sizes": 1})["sizes"] == (
        UNSUPPORTED,
        "the format has no such key, and nothing reads it; did you mean size?",
    )
    assert verdicts({"_comment": "x"})["_comment"][0] == NO_EFFECT


def test_numbers_are_read_strictly_and_texts_of_numbers_too():
    found = draft.Draft({"a": "1e-4", "b": 3.0, "c": True, "d": 2.5, "e": "no", "f": 10**400}, keys.KEYS)
    assert (found.number("a"), found.whole("b"), found.flag("e"), found.number("none", 7.0)) == (1e-4, 3, False, 7.0)
    for text, is_on in {"Yes": True, " on ": True, "1": True, "FALSE": False, "auto": False, "": False}.items():
        assert draft.Draft({"e": text}, keys.KEYS).flag("e") is is_on
    with pytest.raises(UserError, match=r"^e: must be true or false, and is 'maybe'; correct"):
        draft.Draft({"e": "maybe"}, keys.KEYS).flag("e")
    for name in ("c", "d", "f"):
        with pytest.raises(UserError, match=rf"{name}: must be a"):
            found.whole(name)
