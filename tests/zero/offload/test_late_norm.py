"""Checks the rule of a late norm, and what it refuses. This module tests zerojax.zero.offload.late_norm; `test_step_by_block` its steps."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax.errors import UserError
from zerojax.train_state import TrainState
from zerojax.zero.host import settings
from zerojax.zero.offload import late_norm
from zerojax.zero.update import update


def partition_of(late: bool, **fields):
    state = TrainState.create(
        apply_fn=None,
        params={"w": jnp.ones(2)},
        tx=optax.sgd(1.0),
        rng=jax.random.key_data(jax.random.key(0)),
        **fields,
    )
    offload = settings.Offload(optimizer="host", late_norm=late)
    return types.SimpleNamespace(offload=offload, abstract_state=jax.eval_shape(lambda: state))


@pytest.mark.parametrize(("last", "norm", "factor"), [(-1, 4, 0.5), (8, 1, 0.25), (1, 100, 1), (0, 4, 1)])
def test_the_factor_is_of_the_last_norm_and_of_the_own_one_where_there_is_none(last, norm, factor):
    clip, state = late_norm.LateClip(2.0), TrainState.create(apply_fn=None, params={}, tx=optax.sgd(1.0), rng=None)
    state, own = state.replace(last_norm=jnp.float32(last)), jnp.float32(norm)
    assert float(clip.factor(state, own)) == factor
    after, metrics = clip.after(state, state, own)
    assert float(after.last_norm) == norm and float(metrics["clipped_norm"]) == (norm if last < 0 else last)
    assert late_norm.is_known(state.last_norm) == (last >= 0)


def test_the_norm_is_late_where_the_partition_says_so():
    late = partition_of(True, last_norm=zerojax.first_norm())
    assert late_norm.clip(late, 1.0, may_skip=False) == late_norm.LateClip(1.0)
    assert late_norm.clip(partition_of(False), 1.0, may_skip=True) == update.Clip(1.0, may_skip=True)
    early = [update.Clip(limit, may_skip=skips).is_early for limit in (0.0, 1.0) for skips in (False, True)]
    assert early == [True, False, False, False] and late_norm.LateClip(1.0).is_early


def test_what_cannot_take_effect_is_refused_in_one_line():
    late = partition_of(True, last_norm=zerojax.first_norm())
    for partition, limit, may_skip, line in (
        (late, 0.0, False, "is True and cannot take effect, since clip_norm is 0"),
        (late, 1.0, True, "does not go together with loss scaling"),
        (partition_of(True), 1.0, False, "needs a field `last_norm`"),
    ):
        with pytest.raises(UserError, match=f"^offload.late_norm: {line}"):
            late_norm.clip(partition, limit, may_skip=may_skip)
