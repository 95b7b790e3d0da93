"""Checks that leaves are named, counted and found by suffix. This module tests zerojax.tree."""

import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from zerojax import tree
from zerojax.errors import UserError

FAST = hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
NAMES = st.sampled_from(["a", "b", "kernel", "scale"])
TREES = st.recursive(st.just(0), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3), max_leaves=8)


def make_state() -> TrainState:
    params = {"layer_0": {"mlp": {"up": {"kernel": jnp.zeros((4, 8))}}}}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def test_paths_of_a_train_state_read_as_text():
    assert [path for path, _ in tree.flatten(make_state())] == [
        "step",
        "params/layer_0/mlp/up/kernel",
        "opt_state/0/count",
        "opt_state/0/mu/layer_0/mlp/up/kernel",
        "opt_state/0/nu/layer_0/mlp/up/kernel",
    ]


def test_paths_of_an_nnx_module_read_as_text():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert {path.removesuffix("/value") for path, _ in tree.flatten(nnx.state(model))} == {"bias", "kernel"}


@FAST
@hypothesis.given(TREES)
def test_flatten_keeps_the_order_of_leaves_and_map_with_path_names_them_alike(nested):
    numbered = jax.tree.unflatten(jax.tree.structure(nested), range(len(jax.tree.leaves(nested))))
    assert [leaf for _, leaf in tree.flatten(numbered)] == jax.tree.leaves(numbered)
    named = tree.map_with_path(lambda path, leaf, other: (path, leaf + other), numbered, numbered)
    leaves = jax.tree.leaves(named, is_leaf=lambda node: isinstance(node, tuple))
    assert leaves == [(path, 2 * leaf) for path, leaf in tree.flatten(numbered)]


def test_abstract_keeps_shape_dtype_and_sharding_and_takes_numbers():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    array = jax.device_put(jnp.zeros((2, 3), jnp.bfloat16), sharding)
    found = tree.abstract({"array": array, "number": 0, "again": jax.ShapeDtypeStruct((5,), jnp.int8)})
    assert found["array"] == jax.ShapeDtypeStruct((2, 3), jnp.bfloat16, sharding=sharding)
    assert (found["number"].shape, found["number"].dtype) == ((), jnp.int32)
    assert (found["again"].shape, found["again"].dtype) == ((5,), jnp.int8)


def test_sizes_and_bytes_are_those_of_arrays():
    for array in (jnp.zeros((3, 5)), jnp.zeros((3, 5), jnp.bfloat16), jnp.zeros(()), jnp.zeros((0, 4), jnp.int8)):
        assert (tree.size(array), tree.nbytes(array)) == (array.size, array.nbytes)
    assert tree.nbytes(jnp.zeros((8, 5)), (2, 5)) == 40


def test_a_random_key_counts_as_its_words():
    keys = jax.random.split(jax.random.key(0), 3)
    assert tree.nbytes(keys) == jax.random.key_data(keys).nbytes


@FAST
@hypothesis.given(TREES.filter(lambda nested: nested != 0))
def test_the_path_below_params_finds_its_own_weight(nested):
    """`kernel` is `params/kernel`, never `params/a/kernel`, even though it is a suffix of both."""
    weights = [path for path, _ in tree.flatten({"params": nested})]
    index = tree.suffix_index(weights)
    for path in weights:
        below = path.removeprefix("params/")
        assert tree.longest_suffix(index, path) == path
        assert tree.longest_suffix(index, below) == path
        assert tree.longest_suffix(index, f"opt_state/0/mu/{below}") == path


def test_a_path_that_shares_no_part_finds_nothing():
    assert tree.longest_suffix(tree.suffix_index(["params"]), "") == "params"  # of params that are one array
    index = tree.suffix_index(["params/a/kernel"])
    assert tree.longest_suffix(index, "opt_state/0/count") is None
    assert tree.longest_suffix({}, "kernel") is None


def test_a_weights_path_in_the_model_is_that_below_params():
    assert tree.below_params("params/layer_0/kernel") == "layer_0/kernel"
    assert tree.below_params("layer_0/params/kernel") == "layer_0/params/kernel"


class Unhashable:
    """A node that cannot be a key, since its static part is a list."""

    def __init__(self, leaf, names):
        self.leaf, self.names = leaf, names


jax.tree_util.register_pytree_with_keys(
    Unhashable,
    lambda node: (((jax.tree_util.GetAttrKey("leaf"), node.leaf),), node.names),
    lambda names, leaves: Unhashable(leaves[0], names),
)


class Strict:
    """A node that is made of arrays alone."""

    def __init__(self, leaf):
        self.leaf = leaf + jnp.zeros(leaf.shape)


jax.tree_util.register_pytree_with_keys(
    Strict, lambda node: (((jax.tree_util.GetAttrKey("leaf"), node.leaf),), None), lambda _, leaves: Strict(leaves[0])
)


def test_nodes_that_cannot_be_keys_or_be_made_of_numbers_are_named_too():
    odd = {"a": Unhashable(jnp.ones(2), ["x"]), "b": Strict(jnp.ones(3))}
    assert [path for path, _ in tree.flatten(odd)] == ["a/leaf", "b/leaf"]
    assert tree.map_with_path(lambda path, leaf: leaf * len(path), odd)["b"].leaf.tolist() == [6.0] * 3
    assert [path for path, _ in tree.flatten(odd, is_leaf=lambda node: isinstance(node, Strict))] == ["a/leaf", "b"]


def test_nested_is_the_inverse_of_flatten():
    leaves = dict(tree.flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3}))
    assert tree.nested(leaves) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert tree.nested({path.replace("/", "."): leaf for path, leaf in leaves.items()}, ".") == tree.nested(leaves)


def test_a_leaf_on_a_disk_whose_successor_was_written_over_it_is_named():
    with pytest.raises(UserError, match=r"^state: a/b was deleted, since the step that took this state reused"):
        tree.undeleted({"a": {"b": types.SimpleNamespace(is_deleted=lambda: True), "c": np.zeros(1)}})


def test_the_regex_that_an_error_advises_matches_the_nearest_path_and_its_equals():
    paths = ["layers/0/mlp/up", "layers/1/mlp/up", "layers/0/attention/q", "head", "block_0/Dense_1"]
    assert tree.such_as(r"layers/\d+/mlp/upp", paths) == r" such as 'layers/\d+/mlp/up'"
    assert tree.such_as("Block/Dense_1", paths) == r" such as 'block_\d+/Dense_\d+'"
    assert tree.such_as("anything", []) == ""
