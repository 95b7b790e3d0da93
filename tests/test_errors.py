"""Checks the one exception. This module tests zerojax.errors."""

import zerojax
from zerojax.errors import UserError


def test_a_user_error_is_a_value_error_and_has_one_public_name():
    assert issubclass(UserError, ValueError)
    assert zerojax.UserError is UserError
    assert str(UserError("rule: value; way out")) == "rule: value; way out"
