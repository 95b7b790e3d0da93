"""Checks what every encoder-decoder computes. This module tests zerojax.models.encoder_decoder."""

import encoder_decoders
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.models import families

ROUNDING = 2e-5  # float32 sums of some hundred terms in another order


@pytest.fixture(params=[encoder_decoders.T5, encoder_decoders.BART], ids=["t5", "bart"])
def logits(request):
    """Returns f(inputs, targets, mask=None) -> the family's logits with fixed weights."""
    config = request.param
    family = next(found for found in families.FAMILIES if isinstance(config, type(next(iter(found.presets.values())))))
    params = encoder_decoders.make_params(family.parts, config)

    def of(inputs, targets, mask=None):
        return family.logits(config, params, {"inputs": inputs} | ({} if mask is None else {"mask": mask}), targets)

    return of


def test_a_later_target_changes_no_earlier_logits_and_every_input_changes_all(logits):
    inputs, targets = encoder_decoders.make_batch()
    before = logits(inputs, targets)
    after = logits(inputs, targets.at[:, 5].add(1) % encoder_decoders.VOCAB)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (abs(before - after)[:, 5:].max(axis=(0, 2)) > 0).all()
    other = logits(inputs.at[:, -1].add(1) % encoder_decoders.VOCAB, targets)
    assert (abs(before - other).max(axis=(0, 2)) > 0).all()


def test_masked_inputs_change_nothing(logits):
    inputs, targets = encoder_decoders.make_batch()
    mask = jnp.broadcast_to(jnp.arange(14) < 10, (2, 14))
    masked = logits(inputs, targets, mask)
    np.testing.assert_array_equal(masked, logits(inputs.at[:, 10:].set(0), targets, mask))
    np.testing.assert_allclose(masked, logits(inputs[:, :10], targets), atol=ROUNDING)
