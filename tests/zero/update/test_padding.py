"""Checks that padding changes no update, and what it adds. This module tests zerojax.zero.update.padding."""

from typing import Any

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState
from optax import contrib

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.optim import master_weights
from zerojax.zero import shard_state, step
from zerojax.zero.update import padding, update

OTHER_ORDER = 2e-5  # gradients summed over 8 devices, through three steps whose updates divide by small roots


PADDED = {
    "adam": optax.adam(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "sm3": optax.sm3(0.1),
    "galore": contrib.galore(0.1, rank=4),
    "muon": contrib.muon(0.1),
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "rms clip": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1, momentum=0.9)),
    "centralize": optax.chain(optax.centralize(), optax.adam(0.1)),
    "flatten": optax.flatten(optax.adam(0.1)),
    "prodigy": contrib.prodigy(0.1),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "its size": optax.stateless(lambda u, p: jax.tree.map(lambda leaf: -leaf / leaf.size**0.5, u)),
    "averages": optax.chain(optax.adam(0.1), optax.ema(0.9)),
    "master weights": master_weights.with_master_weights(optax.lamb(0.1)),
}
STEPS = 3


def odd_state(tx, state_class=TrainState, **fields):
    """A state of which no dim divides by 8."""
    params = {"w": arrays.normal(0, (10, 30)), "b": arrays.normal(1, (9,))}
    fields = {name: make(params) for name, make in fields.items()}
    return state_class.create(apply_fn=None, params=params, tx=tx, **fields)


def odd_loss(params, batch, state):
    return jnp.mean((jnp.tanh(batch @ params["w"])[:, :9] * jnp.exp(params["b"]) - 1) ** 2)


def after_steps(state, stage, **how):
    state, partition = shard_state.shard_train_state(
        state, mesh=mesh_lib.make_mesh(), stage=stage, min_size=0, indivisible="pad"
    )
    train_step = step.make_train_step(odd_loss, partition, **how)
    for number in range(STEPS):
        state, _ = train_step(state, odd_batch(number))
    return state, partition


def odd_batch(number):
    return arrays.normal(number + 1, (16, 10))


def plain_steps(state):
    @jax.jit
    def train_step(state, batch):
        return state.apply_gradients(grads=jax.grad(odd_loss)(state.params, batch, state))

    for number in range(STEPS):
        state = train_step(state, odd_batch(number))
    return state


def assert_is_plain(state, partition, plain):
    assert partition.leaves["params/w"].padding == (0, 2) and partition.leaves["params/b"].padding == (7,)
    found = padding.unpad(state, partition)
    for (path, one), (_, other) in zip(tree.flatten(found), tree.flatten(plain), strict=True):
        np.testing.assert_allclose(raw(one), raw(other), rtol=OTHER_ORDER, atol=OTHER_ORDER, err_msg=path)


def raw(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


ALONE = ("adam", "adafactor", "galore", "sm3", "muon", "lamb", "prodigy")  # other tests pad their leaves too


@pytest.mark.parametrize("name", runs.cases(PADDED, long=ALONE))
def test_padding_changes_no_optimizer(name):
    """Also those that use a weight's shape, mean or norm: all leaves of the state are those of the unpadded, unsharded one."""
    state = odd_state(PADDED[name])
    assert_is_plain(*after_steps(state, 3), plain_steps(state))


@pytest.mark.parametrize("how", [{"stage": 1}, {"stage": 2, "reduce_dtype": jnp.float32}], ids=str)
def test_padding_changes_no_optimizer_at_other_stages(how):
    state = odd_state(PADDED["adafactor"])
    assert_is_plain(*after_steps(state, **how), plain_steps(state))


class AveragedState(TrainState):
    average: Any

    def apply_gradients(self, *, grads, **kwargs):
        new = super().apply_gradients(grads=grads, **kwargs)
        return new.replace(average=optax.incremental_update(new.params, self.average, 0.1))


def test_averages_of_the_users_own_keep_the_models_shapes():
    """A loss function may read them, so they are never padded."""
    state = odd_state(optax.adam(0.1), AveragedState, average=lambda params: jax.tree.map(jnp.copy, params))
    found, partition = after_steps(state, 3)
    assert_is_plain(found, partition, plain_steps(state))
    assert found.average["w"].shape == (10, 30)


def test_elementwise_optimizers_keep_their_padding_during_the_update():
    """Nothing is cut or padded, so nothing moves. Frozen weights do not count."""

    def names(params):
        return {name: jax.tree.map(lambda _, name=name: name, leaf) for name, leaf in params.items()}

    of_b = optax.multi_transform({"w": PADDED["adam"], "b": PADDED["lamb"]}, names)
    for tx, trainable, is_cut in (
        (PADDED["adam"], "", False),
        (PADDED["lamb"], "", True),
        (of_b, "", True),
        (of_b, "w", False),
    ):
        state, how = odd_state(tx), {"min_size": 0, "indivisible": "pad", "trainable": trainable}
        _, partition = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), **how)
        state, grads = partition.abstract_state, partition.abstract_state.params
        traced = jax.make_jaxpr(update.make(partition))(state, state, grads, 1.0, None)
        assert ("pad[" in str(traced)) == is_cut


def test_padding_adds_zeros_at_the_end_of_one_dim():
    params = {"odd": jnp.ones((67, 5))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    sharded, part = shard_state.shard_train_state(
        state, mesh=mesh_lib.make_mesh(), stage=3, min_size=0, indivisible="pad"
    )
    assert sharded.params["odd"].shape == sharded.opt_state[0].mu["odd"].shape == (72, 5)
    assert {s.data.shape for s in sharded.params["odd"].addressable_shards} == {(9, 5)}
    assert sharded.params["odd"][:67].min() == 1 and abs(sharded.params["odd"][67:]).max() == 0
    assert part.leaves["params/odd"].shape == (67, 5)
