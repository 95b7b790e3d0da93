"""Checks what every encoder-decoder computes. This module tests zerojax.models.encoder_decoder."""

import dataclasses
import functools

import encoder_decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.models import families

ROUNDING = 2e-5  # float32 sums of some hundred terms in another order


@pytest.fixture(
    params=[encoder_decoders.T5, pytest.param(encoder_decoders.BART, marks=pytest.mark.long)], ids=["t5", "bart"]
)
def model(request):
    """Returns a family, a config and fixed weights."""
    config = request.param
    family = next(found for found in families.FAMILIES if isinstance(config, type(next(iter(found.presets.values())))))
    return family, config, encoder_decoders.make_params(family.parts, config)


@pytest.fixture
def logits(model):
    """Returns f(inputs, targets, mask=None) -> the family's logits."""
    family, config, params = model
    compiled = jax.jit(functools.partial(family.logits, config))

    def of(inputs, targets, mask=None):
        return compiled(params, {"inputs": inputs} | ({} if mask is None else {"mask": mask}), targets)

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


def test_the_loss_of_padded_rows_is_the_mean_over_the_labels_of_rows_without_padding(model):
    family, config, params = model
    inputs, targets = (np.array(array) for array in encoder_decoders.make_batch())
    mask, labeled = np.ones_like(inputs), np.ones_like(targets)
    mask[1, 9:], labeled[1, 5:], labeled[:, 0] = 0, 0, 0
    batch = {"inputs": inputs, "targets": targets, "mask": mask, "labeled": labeled}
    loss = jax.jit(functools.partial(family.loss, config))
    found = loss(params, batch)
    each = [loss(params, {**batch, "labeled": labeled * np.eye(2, dtype=int)[:, row, None]}) for row in range(2)]
    np.testing.assert_allclose(found, np.average(each, weights=[8, 4]), rtol=ROUNDING)
    alone = loss(params, {"inputs": inputs[1:, :9], "targets": targets[1:, :5]})
    np.testing.assert_allclose(each[1], alone, rtol=ROUNDING)


def test_dropout_is_drawn_by_the_key_alone_and_is_off_without_one(model):
    family, config, params = model
    inputs, targets = encoder_decoders.make_batch()
    batch = {"inputs": inputs, "targets": targets}
    dropped = dataclasses.replace(config, dropout=0.2)
    loss = jax.jit(functools.partial(family.loss, dropped))
    first, again, other = (loss(params, batch, jax.random.key(seed)) for seed in (0, 0, 1))
    assert first == again != other
    without = [jax.jit(functools.partial(family.loss, used)).lower(params, batch) for used in (dropped, config)]
    assert without[0].as_text() == without[1].as_text() != loss.lower(params, batch, jax.random.key(0)).as_text()
