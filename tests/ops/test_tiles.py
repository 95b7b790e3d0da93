"""Compares a function in tiles with the function of all tokens. This module tests zerojax.ops.tiles."""

import arrays
import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax import traces
from zerojax.errors import UserError
from zerojax.models import layers
from zerojax.ops import tiles

WIDTH, HIDDEN = 8, 24
SUM_ORDER = 1e-6  # relative: the same float32 sums over tokens, taken tile by tile


class Branch(nn.Module):
    """A residual MLP with its norm; the norm of a token of zeros is not a number."""

    @nn.compact
    def __call__(self, x):
        y = layers.Linear((HIDDEN,), name="up", stddev=0.3)(x / jnp.linalg.norm(x, axis=-1, keepdims=True))
        return x + layers.Linear((WIDTH,), name="down", stddev=0.3)(nn.silu(y))


SHAPES = jax.eval_shape(Branch().init, jax.random.key(0), np.ones((1, WIDTH), np.float32))
PARAMS = jax.tree.map(lambda leaf: 0.3 * arrays.normal(sum(leaf.shape), leaf.shape), SHAPES)


def loss(tile):
    def loss(params, x):
        y = tiles.over_tiles(lambda x: Branch().apply(params, x), x, tile)
        return jnp.sum(jnp.sin(y) * jnp.arange(1, WIDTH + 1))

    return loss


def value_and_grads(tile, x):
    return jax.jit(jax.value_and_grad(loss(tile), argnums=(0, 1)))(PARAMS, x)


def assert_equal(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=SUM_ORDER, atol=SUM_ORDER * abs(b).max()), found, expected
    )


@hypothesis.settings(deadline=None, derandomize=True, max_examples=6)
@hypothesis.given(st.sampled_from([(7,), (1, 12), (3, 5), (2, 2, 3)]), st.integers(1, 16))
def test_value_and_gradients_are_those_of_all_tokens_at_once(shape, tile):
    x = arrays.normal(sum(shape), (*shape, WIDTH))
    expected = value_and_grads(0, x)
    assert_equal(value_and_grads(tile, x), expected)


def test_each_result_has_the_same_bits_where_a_tile_of_the_same_size_is_alone():
    x = arrays.normal(1, (12, WIDTH))
    run = jax.jit(lambda x, tile: tiles.over_tiles(lambda x: Branch().apply(PARAMS, x), x, tile), static_argnums=1)
    np.testing.assert_array_equal(run(x, 4), jnp.concatenate([run(x[i : i + 4], 0) for i in (0, 4, 8)]))


@pytest.mark.parametrize("tile", [0, 12, 100])
def test_a_tile_of_all_tokens_leaves_the_program_as_it_is(tile):
    x = jnp.ones((3, 4, WIDTH))
    assert str(jax.make_jaxpr(jax.grad(loss(tile)))(PARAMS, x)) == str(
        jax.make_jaxpr(jax.grad(lambda p, x: jnp.sum(jnp.sin(Branch().apply(p, x)) * jnp.arange(1, WIDTH + 1))))(
            PARAMS, x
        )
    )


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_no_array_of_either_pass_has_all_tokens_and_the_inner_width(policy):
    x, tile = jnp.ones((64, WIDTH)), 8
    run = loss(tile) if policy is None else jax.checkpoint(loss(tile), policy=policy)
    traced = jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(PARAMS, x)
    widths = [
        var.aval.size // HIDDEN for eqn in traces.equations(traced) for var in eqn.outvars if HIDDEN in var.aval.shape
    ]
    assert max(widths) == tile


def test_gradients_of_tiles_add_up_in_float32():
    weight, x = jnp.ones((), jnp.bfloat16), jnp.ones((1000, 1), jnp.bfloat16)
    grad = jax.grad(lambda w: jnp.sum(tiles.over_tiles(lambda x: w * x, x, 1).astype(jnp.float32)))(weight)
    assert grad == jnp.bfloat16(1000)  # sums in bf16 end at 256


@pytest.mark.long
def test_another_width_and_dtype_of_the_result():
    x, weight = arrays.normal(2, (10, WIDTH)), jnp.linspace(-1, 1, WIDTH * 3).reshape(WIDTH, 3)

    def of(tile):
        def value(weight, x):
            y = tiles.over_tiles(lambda x: (x @ weight).astype(jnp.float16), x, tile)
            assert (y.shape, y.dtype) == ((10, 3), jnp.float16)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(value, argnums=(0, 1))(weight, x)

    assert_equal(of(4), of(0))


@pytest.mark.long
def test_several_results_have_the_gradients_of_each():
    x, weight = arrays.normal(2, (10, WIDTH)), jnp.linspace(-1, 1, WIDTH)

    def of(tile):
        def value(weight, x):
            found = tiles.over_tiles(lambda x: {"same": x * weight, "heads": (x * weight).reshape(-1, 2, 4)}, x, tile)
            return jnp.sum(found["same"] ** 2) + jnp.sum(jnp.sin(found["heads"]))

        return jax.value_and_grad(value, argnums=(0, 1))(weight, x)

    assert_equal(of(4), of(0))


@pytest.mark.parametrize(("tile", "ways"), [(3, 1), (4, 1), (100, 1), (3, 4), (8, 2)])
def test_a_tile_knows_the_numbers_of_its_tokens(tile, ways, monkeypatch):
    """Also where the compiler shards the tokens of each row over several devices."""
    monkeypatch.setattr(tiles.mesh_lib, "ways_of_rest", lambda: ways)

    def number(x):
        known = tiles.tokens()
        return x if known is None else known.astype(jnp.float32).reshape(*x.shape[:-1], 1)

    x = jnp.arange(2.0 * 5 * ways).reshape(2, 5 * ways, 1)
    np.testing.assert_array_equal(tiles.over_tiles(number, x, tile), x)


def test_a_trace_that_is_only_read_has_no_tiles():
    with traces.reading():
        program = jax.make_jaxpr(lambda x: tiles.over_tiles(jnp.sin, x, 4))(jnp.ones((10, 2)))
    assert [eqn.primitive.name for eqn in traces.equations(program)] == ["sin"]


def test_the_gradient_of_a_frozen_weight_is_not_computed():
    def matmuls(frozen):
        def value(up, x):
            own = {"params": {**PARAMS["params"], "up": up}}
            return loss(4)(jax.lax.stop_gradient(own) if frozen else own, x)

        traced = jax.make_jaxpr(jax.grad(value, argnums=1 if frozen else (0, 1)))(
            PARAMS["params"]["up"], jnp.ones((8, WIDTH))
        )
        return sum(eqn.primitive.name == "dot_general" for eqn in traces.equations(traced))

    assert matmuls(frozen=False) == matmuls(frozen=True) + 1


def test_a_tile_that_is_no_number_and_a_function_of_other_form_are_refused():
    x = jnp.ones((8, WIDTH))
    with pytest.raises(UserError, match="tile must be a number of tokens, or 0 for all at once, and is 2"):
        tiles.over_tiles(lambda x: x, x, 2.5)
    with pytest.raises(
        UserError, match=r"each token on its own and return arrays of \(4,\) and widths, and returns float32\[8\] "
    ):
        tiles.over_tiles(lambda x: jnp.sum(x, axis=0), x, 4)
    with pytest.raises(UserError, match="draws random numbers, which would be the same in all tiles"):
        tiles.over_tiles(lambda x: x * jax.random.normal(jax.random.key(0), x.shape), x, 4)
