"""Tests of zerojax.zero.offload.updates: items cover each offloaded weight, groups are chunks, equal programs are compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import offloads
import optax
import pytest

import zerojax
from zerojax import tree
from zerojax.errors import UserError
from zerojax.zero.offload import layout, updates


@pytest.fixture(scope="module")
def made():
    state, partition = offloads.sharded(offloads.adam(), offloads.PIECES, stage=2)
    found = updates.Updates(partition, may_skip=False)
    found.set_grad_dtypes(dict.fromkeys(found.weights, jnp.float32))
    return found, state, partition


def test_items_and_the_rest_cover_each_leaf_once(made):
    found, _, partition = made
    items = [item for group in found.groups for item in group.items]
    positions = [n for item in items for n in (*item.host, *item.device)]
    leaves = jax.tree.leaves(partition.abstract_state.opt_state)
    assert sorted([*positions, *found.rest.positions]) == list(range(len(leaves)))
    assert {n for item in items for n in item.host} == {n for n, leaf in enumerate(leaves) if layout.is_on_host(leaf)}
    assert set(found.shared) <= set(found.rest.positions)


def test_a_step_by_blocks_has_groups_for_large_weights_wherever_their_state_lives():
    _, partition = offloads.sharded(offloads.adam(), {**offloads.PIECES, "fraction": 0.4}, stage=3)
    found = updates.Updates(partition, may_skip=False, has_all=True)
    items = [item for group in found.groups for item in group.items]
    resident = {item.weight for item in items if not item.host}
    assert resident and resident.isdisjoint(layout.offloaded_weights(partition))
    assert {item.weight for item in items} == {path for path in partition.placements if not path.endswith("scale")}
    state = jax.tree.leaves(partition.abstract_state.opt_state)
    positions = [n for item in items for n in (*item.host, *item.device)]
    assert sorted([*positions, *found.rest.positions]) == list(range(len(state)))
    assert found.resident_bytes == sum(layout.shard_bytes(leaf) for leaf in state if not layout.is_on_host(leaf))


def test_groups_hold_a_chunk_and_end_with_their_block(made):
    found, _, partition = made
    for group in found.groups:
        assert group.nbytes <= partition.offload.chunk_bytes or len(group.items) == 1
        assert len({updates.block_of(item.weight) for item in group.items}) == 1
    weights = [weight for group in found.groups for weight in group.weights]
    assert list(dict.fromkeys(weights)) == found.weights


def test_equal_items_share_a_program(made):
    found, _, _ = made
    items = [item for group in found.groups for item in group.items]
    kinds = {(item.weight.rsplit("/", 1)[-1], item.length) for item in items}  # layers are equal
    assert len(found.compile()) == len(kinds) < len(items)


def is_first(params):
    return {name: jax.tree.map(lambda _, name=name: name == "layer_0", layer) for name, layer in params.items()}


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.scale_by_adam(), optax.masked(optax.scale(0.1), is_first), optax.scale(-1e-2)),
        zerojax.fused_adamw(1e-2, weight_decay=0.1, mask=is_first),
    ],
    ids=["rate", "decay"],
)
def test_weights_of_one_shape_that_the_optimizer_tells_apart_share_no_program(tx):
    _, partition = offloads.sharded(tx, offloads.PIECES, stage=2)
    found = updates.Updates(partition, may_skip=False)
    found.set_grad_dtypes(dict.fromkeys(found.weights, jnp.float32))
    items = {(item.weight, item.start): item for group in found.groups for item in group.items}
    one, other = (items[f"params/layer_{n}/wide", 0] for n in (0, 1))
    assert one.length == other.length and one.structure != other.structure
    assert found.executable(one) is not found.executable(other)
    pieces = [item for item in items.values() if item.weight == one.weight and item.length == one.length]
    assert len({id(found.executable(item)) for item in pieces}) == 1 < len(pieces)


def test_a_group_alone_updates_its_weights_as_optax_does(made):
    found, state, _ = made
    group = found.groups[0]
    (item, *_) = group.items
    params = {f"params/{path}": leaf + 0 for path, leaf in tree.flatten(state.params)}
    grads = {weight: jnp.full_like(params[weight], 0.25) for weight in group.weights}
    grads = {weight: jax.device_put(grad, found.handed_shardings.grads[weight]) for weight, grad in grads.items()}
    leaves = jax.tree.leaves(state.opt_state)
    factor = jax.device_put(jnp.float32(0.5), found.handed_shardings.factor)
    handed = updates.Handed(grads, [leaves[n] for n in found.shared], factor, None)
    done = found.update(group, found.load(group, leaves), leaves, params, handed)
    stored = found.store(group, done.leaving, leaves)
    assert all(layout.is_on_host(leaf) for leaf in stored)
    plain = optax.adamw(1e-2, weight_decay=0.1)
    before = np.asarray(tree.flatten(offloads.weights(jax.random.key(0)))[0][1])
    change, _ = plain.update(0.125 * jnp.ones_like(before), plain.init(before), before)
    (own,) = jax.tree.leaves(done.params)
    index = tuple(slice(item.start, item.start + item.length) if d == item.dim else slice(None) for d in range(2))
    np.testing.assert_allclose(own[index], (before + change)[index], rtol=0, atol=2 * np.finfo(np.float32).eps)
    rest = np.delete(own, np.r_[index[item.dim]], item.dim)
    np.testing.assert_array_equal(rest, np.delete(before, np.r_[index[item.dim]], item.dim))


def test_an_optimizer_that_cannot_begin_with_a_part_of_the_weights_is_refused():
    plain = optax.adam(1e-3)
    tx = optax.GradientTransformation(
        lambda params: plain.init(params if params["layer_0"]["wide"].ndim else ()), plain.update
    )
    with pytest.raises(UserError, match="cannot be initialised"):
        _, partition = offloads.sharded(tx, "host")
        zerojax.make_train_step(offloads.loss_fn, partition)


def test_a_block_is_the_path_up_to_a_number():
    assert updates.block_of("params/model/layers_3/mlp/kernel") == "params/model/layers_3"
    assert updates.block_of("params/model/layers/3/mlp/kernel") == "params/model/layers/3"
    assert updates.block_of("params/embed/embedding") == "params/embed"
