"""Checks that a state is sharded as its partition describes. This module tests zerojax.zero.shard_state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.optim import master_weights
from zerojax.zero import shard_state, stages
from zerojax.zero.update import padding

# A last place: a compiled init may round a matmul differently than an eager one.
LAST_PLACE = 1e-6


def make_params(key, dtype=jnp.float32):
    keys = jax.random.split(key, 3)
    return {
        "dense": {
            "kernel": jax.random.normal(keys[0], (64, 40), dtype),
            "bias": jax.random.normal(keys[1], (64,), dtype),
        },
        "table": jax.random.normal(keys[2], (24, 8), dtype),
    }


def init(key, tx=optax.adam(1e-3), dtype=jnp.float32):
    return TrainState.create(apply_fn=None, params=make_params(key, dtype), tx=tx)


def make_mesh(data: int):
    return mesh_lib.make_mesh(data=data, devices=jax.devices()[:data])


def bytes_held(state, device) -> int:
    """Counts the bytes on one device of params, master weights and moments: all but the counts."""
    leaves = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim]
    return sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device)


# Bytes a parameter with Adam, N-way: (stage, has 16-bit compute) -> bytes; stage 3 casts, then gathers, and keeps no copy.
TABLE = {
    (0, False): lambda n: 12,
    (1, False): lambda n: 4 + 8 / n,
    (2, False): lambda n: 4 + 8 / n,
    (3, False): lambda n: 12 / n,
    (0, True): lambda n: 14,
    (1, True): lambda n: 2 + 12 / n,
    (2, True): lambda n: 2 + 12 / n,
    (3, True): lambda n: 12 / n,
}


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize(("stage", "is_16_bit"), TABLE)
def test_each_device_holds_the_papers_bytes_a_parameter(stage, is_16_bit, ways):
    keeps_copy = is_16_bit and not stages.STAGES[stage].params
    tx = master_weights.with_master_weights(optax.adam(1e-3)) if keeps_copy else optax.adam(1e-3)
    dtype = jnp.bfloat16 if keeps_copy else jnp.float32
    mesh = make_mesh(ways)
    state, part = shard_state.shard_train_state(init(jax.random.key(0), tx, dtype), mesh=mesh, stage=stage, min_size=0)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert not part.kept_whole
    for device in mesh.devices.flat:
        assert bytes_held(state, device) == TABLE[stage, is_16_bit](ways) * count


@pytest.mark.parametrize("stage", stages.STAGES)
def test_replicated_leaves_explain_every_byte_above_the_table(stage):
    ways, min_size = 8, 100
    state, part = shard_state.shard_train_state(
        init(jax.random.key(0)), mesh=make_mesh(ways), stage=stage, min_size=min_size
    )
    assert set(part.kept_whole) == {"params/dense/bias"}
    sizes = {f"params/{path}": leaf.size for path, leaf in tree.flatten(state.params)}
    expected = sum(
        size * (TABLE[0, False](ways) if path in part.kept_whole else TABLE[stage, False](ways))
        for path, size in sizes.items()
    )
    assert bytes_held(state, jax.devices()[3]) == expected


@pytest.mark.parametrize("stage", stages.STAGES)
def test_replicas_hold_copies_of_the_sharded_state(stage):
    mesh = mesh_lib.make_mesh(replica=2, data=4)
    state, _ = shard_state.shard_train_state(init(jax.random.key(0)), mesh=mesh, stage=stage, min_size=0)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert bytes_held(state, jax.devices()[7]) == TABLE[stage, False](4) * count


@pytest.mark.parametrize(("stage", "indivisible"), [(0, "pad"), (1, "pad"), (2, "whole"), (3, "pad")])
def test_an_init_function_and_its_state_are_sharded_alike(stage, indivisible):
    mesh, options = make_mesh(3), {"stage": stage, "min_size": 0, "indivisible": indivisible}
    concrete = init(jax.random.key(1))
    born, part = shard_state.shard_train_state(init, jax.random.key(1), mesh=mesh, **options)
    moved, _ = shard_state.shard_train_state(concrete, mesh=mesh, **options)
    for (path, a), (_, b) in zip(tree.flatten(born), tree.flatten(moved)):
        assert a.sharding == b.sharding == NamedSharding(mesh, part.leaves[path].spec)
        np.testing.assert_allclose(a, b, rtol=LAST_PLACE)
    for (_, a), (_, b) in zip(tree.flatten(padding.unpad(moved, part)), tree.flatten(concrete)):
        np.testing.assert_array_equal(a, b)


def test_nothing_unsharded_exists_while_an_init_function_runs():
    """The temporaries of the compiled init are smaller than one unsharded leaf, and so are a device's outputs."""
    mesh, shape = make_mesh(8), (4096, 256)

    def big(key):
        params = {"kernel": jax.random.normal(key, shape)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    born = jax.jit(lambda key: shard_state.shard_train_state(big, key, mesh=mesh, stage=3)[0])
    memory = born.lower(jax.random.key(0)).compile().memory_analysis()
    unsharded = 4 * shape[0] * shape[1]
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < unsharded


def test_the_state_given_stays_usable_after_its_copy_is_donated():
    state = init(jax.random.key(0))
    mesh = mesh_lib.make_mesh(data=1, devices=jax.devices()[:1])
    sharded, _ = shard_state.shard_train_state(state, mesh=mesh, stage=3)
    jax.jit(lambda s: jax.tree.map(lambda leaf: leaf + 1, s), donate_argnums=0)(sharded)
    assert jnp.isfinite(state.params["table"]).all()


def test_arguments_for_a_state_are_refused():
    with pytest.raises(UserError, match="init arguments need an init function"):
        shard_state.shard_train_state(init(jax.random.key(0)), jax.random.key(0), mesh=make_mesh(8))


def test_options_reach_the_partition():
    with pytest.raises(UserError, match="stage: must be one of 0, 1, 2, 3, and is 4"):
        shard_state.shard_train_state(init, jax.random.key(0), mesh=make_mesh(8), stage=4)


def test_an_axis_that_only_overrides_shard_and_none_names_is_warned_of():
    params = {"params": {"kernel": jnp.zeros((64, 64))}}
    for state in (params, lambda: params):
        with pytest.warns(
            UserWarning,
            match=r"^mesh: model is 2, and no weight is sharded .* repeat .*; name weights in overrides, as in",
        ):
            shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(model=2))
    shard_state.shard_train_state(params, mesh=mesh_lib.make_mesh(context=2, expert=2))  # a stage shards over these
