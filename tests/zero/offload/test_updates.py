"""Tests of zerojax.zero.offload.updates: equal items share a program, which is optax's update."""

import jax
import jax.numpy as jnp
import numpy as np
import offloads
import optax
import pytest

import zerojax
from zerojax import tree
from zerojax.zero.host import memory_kind
from zerojax.zero.offload import updates


@pytest.fixture(scope="module")
def made():
    state, partition = offloads.sharded(offloads.adam(), offloads.PIECES, stage=2)
    found = updates.Updates(partition, may_skip=False)
    found.set_grad_dtypes(dict.fromkeys(found.weights, jnp.float32))
    return found, state, partition


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
    assert found.executable((one,)) is not found.executable((other,))
    pieces = [item for item in items.values() if item.weight == one.weight and item.length == one.length]
    assert len({id(found.executable((item,))) for item in pieces}) == 1 < len(pieces)


FIXED = {f"layer_{n}": {"wide": n == 0, "narrow": False, "scale": False} for n in range(2)}

READS_ONE = optax.GradientTransformation(
    lambda params: optax.EmptyState() if params["layer_0"]["wide"].ndim else None, optax.identity().update
)


@pytest.mark.parametrize(
    ("tx", "programs"),
    [
        (optax.adamw(1e-2), 1),
        (zerojax.fused_adamw(1e-2), 1),
        (optax.chain(optax.scale_by_adam(), optax.masked(optax.scale(0.1), is_first), optax.scale(-1e-2)), 2),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), 0),
        (optax.chain(optax.adam(1e-2), optax.masked(optax.scale(0.1), FIXED)), 2),
        (optax.chain(optax.adam(1e-2), READS_ONE), 0),
        (zerojax.muon(1e-2), 0),
    ],
    ids=["plain", "fused", "told apart", "global", "fixed masks", "reads a weight", "matrices"],
)
def test_each_kind_of_block_has_one_program_where_weights_are_updated_one_by_one(tx, programs):
    _, partition = offloads.sharded(tx, None, stage=3)
    found = updates.of_blocks(partition, r"layer_\d+", may_skip=False)
    found.set_grad_dtypes(dict.fromkeys(found.weights, jnp.float32))
    assert len(found.compile()) == programs
    assert [len(group.weights) for group in found.groups] == ([3, 3] if programs else [])


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
    assert all(memory_kind.is_on_host(leaf) for leaf in stored)
    plain = optax.adamw(1e-2, weight_decay=0.1)
    before = np.asarray(tree.flatten(offloads.weights(jax.random.key(0)))[0][1])
    change, _ = plain.update(0.125 * jnp.ones_like(before), plain.init(before), before)
    (own,) = jax.tree.leaves(done.params)
    index = tuple(slice(item.start, item.start + item.length) if d == item.dim else slice(None) for d in range(2))
    np.testing.assert_allclose(own[index], (before + change)[index], rtol=0, atol=2 * np.finfo(np.float32).eps)
    rest = np.delete(own, np.r_[index[item.dim]], item.dim)
    np.testing.assert_array_equal(rest, np.delete(before, np.r_[index[item.dim]], item.dim))


def test_a_gradient_that_the_compiler_left_replicated_updates_a_weight_that_is_sharded_over_model():
    over_model = ((".*/wide", jax.sharding.PartitionSpec(None, "model")),)
    state, partition = offloads.sharded(
        offloads.adam(), offloads.PIECES, stage=2, mesh=zerojax.make_mesh(model=2), overrides=over_model
    )
    found = updates.Updates(partition, may_skip=False)
    found.set_grad_dtypes(dict.fromkeys(found.weights, jnp.float32))
    (group,) = (group for group in found.groups if "params/layer_0/wide" in group.weights)
    leaves = jax.tree.leaves(state.opt_state)
    replicated = found.handed_shardings.factor
    ends = []
    for is_replicated in (False, True):
        params = {f"params/{path}": leaf + 0 for path, leaf in tree.flatten(state.params)}
        wanted = {w: replicated if is_replicated else found.handed_shardings.grads[w] for w in group.weights}
        grads = {w: jax.device_put(jnp.full_like(params[w], 0.25), wanted[w]) for w in group.weights}
        handed = updates.Handed(
            grads, [leaves[n] for n in found.shared], jax.device_put(jnp.float32(1), replicated), None
        )
        ends.append(found.update(group, found.load(group, leaves), leaves, params, handed).params)
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_a_param_whose_master_weight_is_read_gives_its_memory_to_the_new_one():
    tx = zerojax.with_master_weights(optax.adamw(1e-2))
    state, partition = offloads.sharded(tx, offloads.PIECES, stage=2, dtype=jnp.bfloat16)
    found = updates.Updates(partition, may_skip=False)
    found.set_grad_dtypes(dict.fromkeys(found.weights, jnp.float32))
    group, leaves = found.groups[0], jax.tree.leaves(state.opt_state)
    params = {f"params/{path}": leaf for path, leaf in tree.flatten(state.params)}
    wanted = found.handed_shardings
    grads = {w: jax.device_put(jnp.ones(params[w].shape, jnp.float32), wanted.grads[w]) for w in group.weights}
    shared = [leaves[n] for n in found.shared]
    handed = updates.Handed(grads, shared, jax.device_put(jnp.float32(1), wanted.factor), None)
    found.update(group, found.load(group, leaves), leaves, params, handed)
    assert all(params[weight].is_deleted() for weight in group.weights)
