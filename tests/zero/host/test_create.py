"""Tests of zerojax.zero.host.create: offloaded states begin as others do, and never exist on the device all at once."""

import functools
import weakref

import jax
import jax.numpy as jnp
import offloads
import pytest

import zerojax
from zerojax import train_state, tree
from zerojax.zero import stages
from zerojax.zero.host import create, memory_kind, storage

OPTIMIZERS = {
    "moments": lambda: offloads.adam(),
    "8-bit moments": lambda: zerojax.fused_adamw(1e-2, moments="int8"),
    "master weights": lambda: zerojax.with_master_weights(offloads.adam()),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "moments" else ()) for name in OPTIMIZERS]
)
def test_an_offloaded_state_begins_as_one_on_the_device_does(name, monkeypatch):
    monkeypatch.setattr(create, "MOST_BYTES", 1 << 10)
    tx = OPTIMIZERS[name]()
    offloaded, partition = offloads.sharded(tx, offloads.PIECES, dtype=jnp.bfloat16, stage=2)
    resident, _ = offloads.sharded(tx, None, dtype=jnp.bfloat16, stage=2)
    offloads.assert_equal(offloaded, resident)
    again, _ = zerojax.shard_train_state(
        resident, mesh=zerojax.make_mesh(), stage=2, offload=offloads.PIECES, min_size=64
    )
    assert jax.tree.structure(again) == jax.tree.structure(offloaded)
    assert jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sharding, again)) == jax.tree.leaves(partition.shardings)
    offloads.assert_equal(again, resident)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(resident))


def test_few_offloaded_leaves_are_on_the_device_at_once(monkeypatch):
    """Every program that makes offloaded leaves returns a few, and they are on the host before the next one runs."""
    monkeypatch.setattr(create, "MOST_BYTES", 1 << 10)
    sizes, put = [], storage.to_host

    def noted(array, like):
        held = {id(a): a for a in jax.live_arrays() if not memory_kind.is_on_host(a) and a.size >= 1024}
        sizes.append(sum(a.nbytes // 8 for a in held.values()))
        return put(array, like)

    monkeypatch.setattr(storage, "to_host", noted)
    before = sum(a.nbytes // 8 for a in jax.live_arrays() if not memory_kind.is_on_host(a) and a.size >= 1024)
    state, partition = offloads.sharded(zerojax.with_master_weights(offloads.adam()), offloads.PIECES, stage=2)
    whole = sum(
        tree.shard_bytes(leaf) for leaf in jax.tree.leaves(partition.abstract_state) if memory_kind.is_on_host(leaf)
    )
    assert max(sizes) - before <= 2 * (1 << 10) < whole
    del state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_may_come_part_by_part_and_none_is_kept_longer_than_it_is_needed(name):
    tx = OPTIMIZERS[name]()
    part_of = lambda n: {"kernel": jnp.full((64, 128), n / 7.0), "scale": jnp.linspace(0.0, n, 128)}  # noqa: E731
    params = {f"part_{n}": part_of(n) for n in range(4)}
    begin = functools.partial(_begun, tx)
    partition = stages.partition_state(
        jax.eval_shape(begin, params),
        mesh=zerojax.make_mesh(),
        stage=2,
        min_size=0,
        offload={"optimizer": "host", "chunk_bytes": 1 << 13},
    )
    place = {path: number for number, (path, _) in enumerate(tree.flatten(params))}
    gone = []

    def parts():
        for n in reversed(range(4)):
            assert all(leaf() is None for leaf in gone), "a part is dropped before the next is asked for"
            found = {place[f"part_{n}/{path}"]: leaf for path, leaf in tree.flatten(part_of(n))}
            gone.extend(map(weakref.ref, found.values()))
            yield found
            del found

    wanted, keep = partition.abstract_state, create.begin(partition)
    leaves = create.from_parts(begin, params, parts(), wanted, keep)
    whole = create.from_init(begin, [params], wanted, keep)
    shardings = jax.tree.leaves(partition.shardings)
    for leaf, own, sharding in zip(leaves, whole, shardings, strict=True):
        assert leaf.sharding == own.sharding == sharding
        assert leaf.dtype == own.dtype and bool((jax.device_get(leaf) == jax.device_get(own)).all())
    expected = dict(tree.flatten(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)))
    state = jax.tree.unflatten(jax.tree.structure(partition.abstract_state), leaves)
    for path, leaf in tree.flatten(state.params):
        assert bool((jax.device_get(leaf) == jax.device_get(expected[path])).all()), path


def _begun(tx, params):
    """Returns a state with weights in 16 bits; its optimizer begins with those in float32."""
    return train_state.create(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), tx, jax.random.key(0))
