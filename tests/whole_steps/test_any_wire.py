"""Trains with a wire of its own, which sends 8 bits a weight. This module tests that a form of sending is one class (`placement.Wire`)."""

import contextlib
import dataclasses

import block_nets
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState

import zerojax
from zerojax import tree
from zerojax.traces import equations
from zerojax.zero.weights import gather

X = block_nets.X


@jax.custom_vjp
def rounded(weight, scale, sink):
    """Returns the nearest multiples of a scale, of which the gradient is the sink's."""
    return (jnp.round(weight / scale) * scale).astype(sink.dtype)


rounded.defvjp(lambda weight, scale, sink: (rounded(weight, scale, sink), None), lambda _, grad: (None, None, grad))


@dataclasses.dataclass(frozen=True)
class Int8(gather.Plain):
    """Sends a weight as the nearest of 255 multiples of a scale, which is that of the weight."""

    def known(self, shards):
        largest = jnp.stack([jnp.max(jnp.abs(shard)) for shard in shards.values()])
        return dict(zip(shards, jax.lax.pmax(largest, "data") / 127))

    def send(self, shard, known, placement, dtype):
        return gather.all_gather(jnp.round(shard / known).astype(jnp.int8), placement, None), known

    def differentiated(self, sent, dtype):
        return jnp.zeros(sent[0].shape, dtype)

    def used(self, path, sent, differentiated):
        codes, scale = sent
        return contextlib.nullcontext(rounded(codes * scale, scale, differentiated))


class Net(nn.Module):
    """Two blocks and a head."""

    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = block_nets.Block(name=f"block_{number}")(x)
        return block_nets.Head(name="head")(x)


def is_sent(path, leaf):
    return "block" in path and leaf.ndim == 2


@pytest.mark.parametrize("passes", runs.cases([1, 2], long=[1]))
def test_a_step_trains_with_a_wire_that_no_module_of_it_knows(passes):
    params, tx = Net().init(jax.random.key(0), X)["params"], optax.sgd(0.1)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    mesh = zerojax.make_mesh(2, 4)
    state, partition = zerojax.shard_train_state(state, mesh=mesh, stage=3, min_size=0)
    weights = dict(tree.flatten(partition.abstract_state))
    chosen = [path for path in partition.placements if is_sent(path, weights[path])]
    partition = partition.with_wires(dict.fromkeys(chosen, Int8()))
    step = zerojax.make_train_step(
        lambda params, batch, state: Net().apply({"params": params}, batch),
        partition,
        blocks=r"block_\d",
        heads="head",
        reduce_dtype=jnp.float32,
        grad_accum=passes,
        donate=False,
    )
    batch = X if passes == 1 else X.reshape(passes, -1, *X.shape[1:])
    traced = step.trace(state, batch)
    sent = [eqn.outvars[0].aval for eqn in equations(traced.jaxpr.jaxpr) if eqn.primitive.name == "all_gather"]
    in_8_bits = [aval for aval in sent if aval.dtype == jnp.int8]
    assert len(in_8_bits) == 2 * len(chosen)  # forward and backward

    def plain_loss(params):
        def of_weight(path, leaf):
            scale = jnp.max(jnp.abs(leaf)) / 127
            return leaf + jax.lax.stop_gradient(jnp.round(leaf / scale) * scale - leaf) if is_sent(path, leaf) else leaf

        return Net().apply({"params": tree.map_with_path(of_weight, params)}, X)

    opt_state, plain = tx.init(params), jax.jit(jax.value_and_grad(plain_loss))
    for _ in range(3):
        state, metrics = step(state, batch)
        loss, grads = plain(params)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6), state.params, params
    )
