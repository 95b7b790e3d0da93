"""Reads the group `loss_scale` of a config. This module makes the loss scale that it describes."""

import dataclasses
from typing import Any

from zerojax.errors import UserError
from zerojax.zero.loss_scale import DynamicLossScale, LossScale, StaticLossScale


def make(is_scaled: bool, *, static: float, **dynamic: Any) -> LossScale | None:
    """Returns the loss scale that the group `loss_scale` of a config describes; None where the precision needs none.

    Raises:
      UserError: a setting that cannot take effect, or is out of its range.
    """
    defaults = {"static": 0.0, **dataclasses.asdict(DynamicLossScale())}
    unread = dynamic if static else {}
    for name, value in (unread if is_scaled else {"static": static, **dynamic}).items():
        if value != defaults[name]:
            why = "config.loss_scale.static is set" if is_scaled else "config.precision is not fp16"
            raise UserError(
                f"config.loss_scale.{name}: is {value!r} and cannot take effect, since {why}; leave it at {defaults[name]!r}"
            )
    if not is_scaled:
        return None
    try:
        return StaticLossScale(static) if static else DynamicLossScale(**dynamic)
    except UserError as error:  # a static scale's field has the name `static` in a config
        raise UserError(f"config.{error}".replace("loss_scale.scale", "loss_scale.static")) from error
