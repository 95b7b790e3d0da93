"""Runs an MLP along a ring of devices, and compares with all examples on one. This module tests zerojax.zero.blocks.ring_matmuls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from zerojax import roles, traces
from zerojax.zero.blocks import ring_matmuls

SUM_ORDER = 1e-5  # relative: the same float32 sums, taken in another order
SPECS = {"up": P(None, "model"), "down": P("model"), "scale": P()}


def mlp(weights, arrays, others):
    """Returns terms of one sum; `others` is a mask."""
    (x,), (mask,) = arrays, others
    seen = jnp.where(mask[..., None], jax.nn.silu(x @ weights["up"]), 0)
    return [(seen * weights["scale"][0]) @ weights["down"]]


def inputs(ways, dtype):
    rng = np.random.default_rng(0)
    drawn = lambda *shape: jnp.asarray(rng.uniform(-0.5, 0.5, shape), dtype)  # noqa: E731
    weights = {"up": drawn(6, 4 * ways), "down": drawn(4 * ways, 6), "scale": drawn(1)}
    return weights, [drawn(2 * ways, 3, 6)], [jnp.asarray(rng.random((2 * ways, 3)) < 0.5)]


def ringed(ways, dtype):
    """Returns f(weights, arrays, others), along a ring of devices."""
    mesh = Mesh(np.asarray(jax.devices()[:ways]), ("model",), axis_types=(AxisType.Auto,))
    run = functools.partial(ring_matmuls.around, mlp, ring_matmuls.RingOfExamples("model", ways, "cpu", dtype))
    over = jax.shard_map(run, mesh=mesh, in_specs=(SPECS, P("model"), P()), out_specs=P("model"), check_vma=False)
    return lambda weights, *rest: over({name: own.astype(jnp.float32) for name, own in weights.items()}, *rest)


def loss(function, weights, arrays, others):
    return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in function(weights, arrays, others))


@pytest.mark.parametrize("ways", [2, 4])
def test_a_ring_gives_the_sums_and_gradients_of_one_device(ways):
    weights, arrays, others = inputs(ways, jnp.float32)
    run = jax.jit(jax.value_and_grad(functools.partial(loss, ringed(ways, jnp.float32)), argnums=(0, 1)))
    expected = jax.value_and_grad(functools.partial(loss, mlp), argnums=(0, 1))(weights, arrays, others)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=SUM_ORDER, atol=SUM_ORDER),
        run(weights, arrays, others),
        expected,
    )


def test_each_pass_sends_its_arrays_once_there_and_its_sums_once_home():
    """And what arrives waits for a matmul of the examples before it, in both passes; the matmuls of weights' gradients return float32."""
    ways = 4
    given = inputs(ways, jnp.bfloat16)
    traced = jax.make_jaxpr(jax.grad(functools.partial(loss, ringed(ways, jnp.bfloat16)), argnums=(0, 1)))(*given)
    found = list(traces.equations(traced))
    sent = [eqn for eqn in found if eqn.primitive.name == "ppermute"]
    assert len(sent) == 4 * (ways - 1)
    assert all(eqn.outvars[0].aval.dtype == jnp.bfloat16 for eqn in sent)
    assert all(roles.TENSOR_PARALLEL in str(eqn.source_info.name_stack) for eqn in sent)
    barriers = [eqn for eqn in found if eqn.primitive.name == "optimization_barrier"]
    made = {var: eqn.primitive.name for eqn in found for var in eqn.outvars}
    joined = [{made.get(var) for var in eqn.invars} for eqn in barriers]
    assert len([names for names in joined if names >= {"ppermute", "dot_general"}]) >= 2 * (ways - 1)
    grads = [eqn for eqn in found if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.dtype == jnp.float32]
    assert len(grads) == 2 * ways
