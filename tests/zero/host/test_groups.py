"""Tests of zerojax.zero.host.groups: items cover each offloaded weight, and groups are chunks."""

import jax
import offloads
import optax
import pytest

import zerojax
from zerojax import tree
from zerojax.errors import UserError
from zerojax.zero.host import groups, memory_kind, selection
from zerojax.zero.offload import updates


@pytest.fixture(scope="module")
def made():
    state, partition = offloads.sharded(offloads.adam(), offloads.PIECES, stage=2)
    return groups.Division(partition), state, partition


def test_items_and_the_rest_cover_each_leaf_once(made):
    found, _, partition = made
    items = [item for group in found.groups for item in group.items]
    positions = [n for item in items for n in (*item.host, *item.device)]
    leaves = jax.tree.leaves(partition.abstract_state.opt_state)
    assert sorted([*positions, *found.rest.positions]) == list(range(len(leaves)))
    assert {n for item in items for n in item.host} == {
        n for n, leaf in enumerate(leaves) if memory_kind.is_on_host(leaf)
    }
    assert set(found.shared) <= set(found.rest.positions)


def test_a_step_by_blocks_has_groups_for_large_weights_wherever_their_state_lives():
    _, partition = offloads.sharded(offloads.adam(), {**offloads.PIECES, "fraction": 0.4, "params": "host"}, stage=3)
    own = updates.of(partition, may_skip=False)
    found = groups.Division(partition, also=own.weights)
    items = [item for group in found.groups for item in group.items]
    resident = {item.weight for item in items if not item.host}
    assert resident and resident.isdisjoint(selection.offloaded_weights(partition))
    assert {item.weight for item in items} == {path for path in partition.placements if not path.endswith("scale")}
    state = jax.tree.leaves(partition.abstract_state.opt_state)
    positions = [n for item in items for n in (*item.host, *item.device)]
    assert sorted([*positions, *found.rest.positions]) == list(range(len(state)))
    assert own.resident_bytes == sum(tree.shard_bytes(leaf) for leaf in state if not memory_kind.is_on_host(leaf))


def test_the_rest_on_the_device_is_the_rest_with_its_params_there():
    _, partition = offloads.sharded(offloads.adam(), {**offloads.PIECES, "params": "host"}, stage=3)
    rest = groups.Division(partition).rest
    found = rest.on_device
    for leaf, own in zip(jax.tree.leaves(rest.partition.abstract_state), jax.tree.leaves(found.abstract_state)):
        assert (own.shape, own.dtype, own.sharding.spec) == (leaf.shape, leaf.dtype, leaf.sharding.spec)
    assert any(map(memory_kind.is_on_host, jax.tree.leaves(rest.partition.abstract_state.params)))
    assert not any(map(memory_kind.is_on_host, jax.tree.leaves(found.abstract_state)))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, found.abstract_state)
    assert found.shardings == shardings and found.placements == rest.partition.placements


def test_groups_hold_a_chunk_and_end_with_their_block(made):
    found, _, partition = made
    for group in found.groups:
        assert group.nbytes <= partition.offload.chunk_bytes or len(group.items) == 1
        assert len({groups.block_of(item.weight) for item in group.items}) == 1
    weights = [weight for group in found.groups for weight in group.weights]
    assert list(dict.fromkeys(weights)) == found.weights


def test_an_optimizer_that_cannot_begin_with_a_part_of_the_weights_is_refused():
    plain = optax.adam(1e-3)
    tx = optax.GradientTransformation(
        lambda params: plain.init(params if params["layer_0"]["wide"].ndim else ()), plain.update
    )
    with pytest.raises(UserError, match="cannot be initialised"):
        _, partition = offloads.sharded(tx, "host")
        zerojax.make_train_step(offloads.loss_fn, partition)


def test_a_block_is_the_path_up_to_a_number():
    assert groups.block_of("params/model/layers_3/mlp/kernel") == "params/model/layers_3"
    assert groups.block_of("params/model/layers/3/mlp/kernel") == "params/model/layers/3"
    assert groups.block_of("params/embed/embedding") == "params/embed"
