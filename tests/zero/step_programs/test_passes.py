"""Checks that each gradient is handed over once, as soon as it is final. This module tests zerojax.zero.step_programs.passes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from block_nets import Net, parts, prepared_layout

from zerojax import tree
from zerojax.zero.gradients import accumulate
from zerojax.zero.step_programs import passes


@pytest.mark.parametrize("count", [pytest.param(1, marks=runs.LONG), 2])
def test_gradients_arrive_in_the_order_of_the_backward_pass_and_are_the_mean_over_passes(count):
    plain, nested, params, batch, state, _ = parts(Net(2), passes=count)
    state = state.replace(params=params)
    together = (
        batch if count == 1 else jax.tree.map(lambda leaf: jnp.stack([leaf * (n + 1) for n in range(count)]), batch)
    )
    found, order = {}, []

    def ready(index, final, weights):
        assert not weights, "no param is on the host"
        assert not set(final) & set(found)
        found.update(final)
        order.extend([(index, path) for path in final])

    steps = passes.Passes(nested, prepared_layout(count), None)
    aux = steps(state, together, ready)
    assert [index for index, _ in order] == sorted(index for index, _ in order)
    blocks = [path.split("/")[1] for _, path in order if "block_" in path]
    assert blocks.index("block_1") < blocks.index("block_0"), "the last block first"
    found_pass = steps.one_pass(state, together)
    assert found_pass.ready_at == {path: index for index, path in order}
    used = found_pass.schedule.used(taken=found_pass.results)
    assert [max(used[n + 1 :], default=0) + room for n, room in enumerate(found_pass.room)] == [max(used)] * len(used)
    assert found_pass.room[0] == 0 < found_pass.room[-1] == found_pass.schedule.peak(taken=found_pass.results)
    assert all(found_pass.over_at[path] >= index for path, index in found_pass.ready_at.items())
    sums = None
    for number in range(count):
        micro = batch if count == 1 else jax.tree.map(lambda leaf, n=number: leaf[n], together)
        (_, _), grads = jax.jit(plain)(params, micro, state, jnp.int32(number))
        sums = accumulate.added(accumulate.zeros(grads) if sums is None else sums, grads, None)
    expected = dict(tree.flatten(accumulate.averaged(sums, count)))
    assert {f"params/{path}" for path in expected} == set(found)
    for path, grad in expected.items():
        np.testing.assert_allclose(found[f"params/{path}"], grad, rtol=2e-5, atol=1e-6, err_msg=path)
    assert float(aux["metrics"]["one"]) == 1


@runs.LONG
def test_sums_in_16_bits_are_rounded_in_all_passes_but_the_last():
    _, nested, params, batch, state, _ = parts(Net(1), passes=2)
    state = state.replace(params=params)
    together = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), batch)

    def grads_of(**how):
        found = {}
        steps = passes.Passes(nested, prepared_layout(2), None, **how)
        steps(state, together, lambda index, final, weights: found.update(final))
        return found

    exact, rounded = grads_of(), grads_of(in_16_bits=True)
    assert {grad.dtype for grad in rounded.values()} == {jnp.dtype(jnp.float32)}
    differs = False
    for path, grad in exact.items():
        differs |= bool(jnp.any(rounded[path] != grad))
        # One of two sums is rounded, by at most a unit in the last of 8 bits.
        limit = 2.0**-7 * float(jnp.abs(grad).max()) * 2 + 1e-12
        np.testing.assert_allclose(rounded[path], grad, atol=limit, rtol=0, err_msg=path)
    assert differs


@runs.LONG
def test_gradients_of_a_pass_in_bf16_add_up_to_the_bits_of_the_same_in_float32():
    """A sum over devices in bf16 has the same bits in either dtype. Where terms of a weight that several blocks read meet, they are rounded
    once more."""
    found: dict[str, dict[str, jax.Array]] = {}
    for dtype in ("float32", "bfloat16"):
        dtypes = {"reduce_dtype": jnp.bfloat16, "grad_dtype": jnp.dtype(dtype)}
        _, nested, params, batch, state, _ = parts(Net(1), passes=3, dtypes=dtypes)
        state = state.replace(params=params)
        together = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, 3 * leaf]), batch)
        steps, sums = passes.Passes(nested, prepared_layout(3), None, in_16_bits=True), found.setdefault(dtype, {})
        steps(state, together, lambda index, final, weights, sums=sums: sums.update(final))
        one_pass = steps.one_pass(state, together)
        for path, number in one_pass.grads.items():
            assert one_pass.schedule.cut.values[number].dtype == (dtype if "block_" in path else "float32"), path
        assert one_pass.elements == {
            path: math.prod(grad.sharding.shard_shape(grad.shape)) for path, grad in sums.items()
        }
    assert found["float32"].keys() == found["bfloat16"].keys()
    for path, grad in found["float32"].items():
        own = found["bfloat16"][path]
        assert grad.dtype == own.dtype == jnp.float32
        limit = 2.0**-6 * float(jnp.abs(grad).max()) if "block_shared" in path else 0
        np.testing.assert_allclose(own, grad, rtol=0, atol=limit, err_msg=path)
