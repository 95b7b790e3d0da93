"""Checks that every kind of leaf is restored from its stored form. This module tests zerojax.checkpoint.logical."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import train_state, tree
from zerojax.checkpoint import logical
from zerojax.optim import master_weights


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_random_keys_are_stored_as_their_words_and_come_back(impl, shape):
    keys = jax.random.split(jax.random.key(7, impl=impl), shape) if shape else jax.random.key(7, impl=impl)
    ((path, words),) = logical.to_stored({"rng": keys}).items()
    form = logical.form(jax.eval_shape(lambda: keys))
    assert path == "rng" and (words.shape, words.dtype) == (form.shape, form.dtype) and words.dtype == jnp.uint32
    again = logical.from_stored(words, jax.eval_shape(lambda: keys))
    assert again.dtype == keys.dtype and np.array_equal(jax.random.key_data(again), jax.random.key_data(keys))


def test_numbers_become_arrays_and_arrays_stay_where_they_are():
    array = jnp.arange(3)
    found = logical.to_stored({"a": array, "b": 2, "c": [0.5, np.float64(3)]})
    assert found["a"] is array
    assert {path: (type(x), x.dtype.name) for path, x in found.items() if path != "a"} == {
        "b": (np.ndarray, "int32"),
        "c/0": (np.ndarray, "float32"),
        "c/1": (np.ndarray, "float64"),
    }
    assert logical.from_stored(found["b"], tree.abstract(2)) == 2


def test_a_sharding_that_does_not_divide_is_refused_before_a_file_is_read():
    spec = NamedSharding(mesh_lib.make_mesh(), P("data"))
    assert logical.form(jax.ShapeDtypeStruct((16,), jnp.float32, sharding=spec)).sharding == spec
    with pytest.raises(ValueError, match="evenly divide"):
        logical.form(jax.ShapeDtypeStruct((15,), jnp.float32, sharding=spec))


@pytest.mark.parametrize("copy_dtype", [None, jnp.bfloat16])
def test_the_logical_form_is_the_same_with_and_without_a_copy(copy_dtype):
    keys = jax.random.split(jax.random.key(0))
    params = {"kernel": jax.random.normal(keys[0], (16, 8)), "scale": jax.random.normal(keys[1], (8,))}
    state = train_state.create(params, optax.adamw(1e-3), jax.random.key(0))
    stored = logical.from_logical(state, copy_dtype)
    if copy_dtype is None:
        assert stored is state
    else:
        assert jax.tree.leaves(stored.params)[0].dtype == copy_dtype
        expected = master_weights.with_master_weights(optax.adamw(1e-3)).init(stored.params)
        assert jax.tree.structure(stored.opt_state) == jax.tree.structure(expected)
    again = logical.to_logical(stored)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    chex.assert_trees_all_equal(again, state)
