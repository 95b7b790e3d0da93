"""Checks that wrong fields are refused by name. This module tests zerojax.models.config_json."""

import pytest

from zerojax.errors import UserError
from zerojax.models import config_json

FIELDS = config_json.Fields(
    {
        "width": 12,
        "eps": 1e-5,
        "tied": True,
        "act": "silu",
        "rope": {"factor": 2},
        "nothing": None,
        "text": "x",
        "zero": 0,
    }
)


def test_fields_are_read_and_missing_ones_have_their_default():
    assert FIELDS.count("width") == 12 and FIELDS.count("nothing", 3) == FIELDS.count("absent", 3) == 3
    assert FIELDS.number("eps") == 1e-5 and FIELDS.number("width") == 12.0
    assert FIELDS.flag("tied", False) and not FIELDS.flag("absent", False)
    assert FIELDS.activation("act", "gelu") == "silu" and FIELDS.activation("absent", "gelu") == "gelu"
    assert FIELDS.group("rope").count("factor") == 2 and FIELDS.group("absent").raw == {}


@pytest.mark.parametrize(
    "read, message",
    [
        (lambda: FIELDS.count("absent"), "config.json: absent: must be a whole number above 0, and is missing"),
        (lambda: FIELDS.count("zero"), "zero: must be a whole number above 0, and is 0"),
        (lambda: FIELDS.count("tied"), "tied: must be a whole number above 0, and is True"),
        (lambda: config_json.Fields({"n": 2**31 - 1}).count("n"), "n: must be at most 1073741824, and is 2147483647"),
        (lambda: FIELDS.number("text"), "text: must be a number above 0, and is 'x'"),
        (lambda: config_json.Fields({"n": 10**400}).number("n"), "n: must be a number above 0, and is 1000000"),
        (
            lambda: config_json.Fields({"n": [1, 10**309]}).numbers("n", 2),
            "n: must be 2 numbers above 0, and is [1, 1000",
        ),
        (lambda: FIELDS.flag("text", True), "text: must be true or false, and is 'x'"),
        (lambda: FIELDS.choice("text", ("a", "b"), "a"), "text: must be one of a, b, and is 'x'"),
        (lambda: FIELDS.group("text"), "text: must be a group of fields, and is 'x'"),
        (lambda: FIELDS.group("rope").flag("factor", True), "config.json: rope: factor: must be true or false"),
        (lambda: config_json.Fields({"d": 10, "h": 4}).heads("d", "h"), "d: must be a multiple of h=4, and is 10"),
    ],
)
def test_a_wrong_field_is_refused_with_its_name_and_value(read, message):
    with pytest.raises(UserError) as caught:
        read()
    assert message in str(caught.value)
