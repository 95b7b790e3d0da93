"""Checks the loss scale that a config describes. This module tests zerojax.trainer.loss_scale_config."""

import runs

from zerojax.trainer import loss_scale_config
from zerojax.zero import loss_scale


def test_the_defaults_of_the_configs_are_those_of_the_class():
    group = runs.config().loss_scale
    assert loss_scale_config.make(True, **vars(group)) == loss_scale.DynamicLossScale()
    assert loss_scale_config.make(False, **vars(group)) is None
