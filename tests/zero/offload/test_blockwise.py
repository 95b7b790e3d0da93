"""Checks a step with params in host memory against the same step on the device. This module tests zerojax.zero.offload.blockwise."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from block_nets import Net, X
from flax.training.train_state import TrainState

import zerojax
from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.optim import fused, master_weights
from zerojax.zero import shard_state, step
from zerojax.zero.offload import kept

NET = Net(3)
SCALE = jnp.linspace(0.5, 1.5, 16)[:, None]
BOTH = {"optimizer": "host", "params": "host", "chunk_bytes": 600}
DISK = {"optimizer": "nvme", "params": "nvme", "chunk_bytes": 600, "nvme_buffers": 2}


class ScaledState(TrainState):
    loss_scale: Any = None


@functools.cache
def first_params() -> Any:
    shapes = jax.eval_shape(NET.init, jax.random.key(0), X, SCALE)["params"]
    keys = iter(jax.random.split(jax.random.key(2), 99))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) / 3, shapes)


def loss_of(params: Any, batch: Any, state: Any) -> tuple[Any, dict]:
    """Returns a mean over a mask, so that passes and devices differ in weight."""
    losses = jax.vmap(lambda x, scale: NET.apply({"params": params}, x[None], scale[None]))(batch["x"], batch["scale"])
    return zerojax.Mean(jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])), {
        "metrics": {"count": jnp.sum(batch["mask"] > 0)}
    }


def plain_loss(params: Any, batch: Any, state: Any) -> Any:
    return NET.apply({"params": params}, batch["x"], batch["scale"]) * batch["factor"][0]


def run(offload: Any, loss_fn: Any = plain_loss, tx: Any = None, accum: int = 1, steps: int = 4, **how: Any) -> Any:
    """Returns the metrics of each step, the last state and its partition."""
    dtype, trainable, scaler = how.pop("dtype", jnp.float32), how.pop("trainable", ""), how.pop("scaler", None)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), first_params())
    scale = {} if scaler is None else {"loss_scale": scaler.init()}
    state = (TrainState if scaler is None else ScaledState).create(
        apply_fn=None, params=params, tx=tx or optax.adamw(1e-2), **scale
    )
    state, part = shard_state.shard_train_state(
        state, mesh=mesh_lib.make_mesh(2, 4), stage=3, min_size=0, offload=offload, trainable=trainable
    )
    train_step = step.make_train_step(
        loss_fn,
        part,
        grad_accum=accum,
        blocks=r"block_\w+",
        heads="head",
        reduce_dtype=jnp.float32,
        loss_scale=scaler,
        **how,
    )
    rows = []
    for number in range(steps):
        huge = 1e30 if scaler is not None and number == 1 else 1.0  # this step overflows
        mask = (jnp.arange(16) % (number + 2) == 0).astype(jnp.float32)
        batch = {"x": X, "scale": SCALE, "mask": mask, "factor": jnp.full((16,), huge)}
        if accum > 1:
            batch = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), batch)
        state, metrics = train_step(state, batch)
        rows.append({name: np.asarray(value) for name, value in metrics.items()})
    return rows, state, part


def agree(how: dict[str, Any], **tolerance: float) -> Any:
    offload = how.pop("offload", BOTH)
    rows, state, _ = run(None, **how)
    own_rows, own_state, part = run(offload, **how)
    for row, own in zip(rows, own_rows):
        for name in row:
            np.testing.assert_allclose(own[name], row[name], err_msg=name, **tolerance)
    for (path, leaf), own in zip(tree.flatten(state.params), jax.tree.leaves(own_state.params)):
        np.testing.assert_allclose(np.asarray(own, np.float32), np.asarray(leaf, np.float32), err_msg=path, **tolerance)
    jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(leaf)), own_state, part.shardings)
    return own_state


MASTER = master_weights.with_master_weights(optax.adamw(1e-2))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"clip_norm": 0.5, "accum": 2, "offload": DISK},
        {"loss_fn": loss_of, "accum": 2},
        {"trainable": "narrow|head", "clip_norm": 0.5},
        {"dtype": jnp.bfloat16, "tx": MASTER, "offload": {**BOTH, "fraction": 0.5, "params_fraction": 0.5}},
        {"dtype": jnp.bfloat16, "tx": fused.fused_adamw(1e-2, moments="bf16", stochastic_rounding=True)},
        {"scaler": zerojax.DynamicLossScale(init_scale=2.0**10, window=2), "clip_norm": 0.5},
    ],
    ids=["early", "clip", "mean", "frozen", "master", "rounded", "scaled"],
)
def test_a_step_by_blocks_is_the_step(how, tmp_path):
    offload = how.get("offload", BOTH)
    place = {"nvme_path": str(tmp_path)} if offload is DISK else {}
    state = agree({**how, "offload": {**offload, **place}}, rtol=2e-4, atol=2e-5)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)}
    assert "pinned_host" in kinds


def test_a_disk_gives_the_bits_of_host_memory_and_a_checkpoint_restores_into_either(tmp_path):
    """Params are read twice in each pass, and written over while the reads of the next step wait."""
    rows, state, part = run(BOTH, accum=2, steps=3)
    own_rows, own_state, own_part = run({**DISK, "nvme_path": str(tmp_path / "disk")}, accum=2, steps=3)
    assert [row["loss"] for row in own_rows] == [row["loss"] for row in rows]
    on_disk = {path for path, leaf in tree.flatten(own_state) if kept.is_on_disk(leaf)}
    assert on_disk == own_part.on_host == part.on_host and any(path.startswith("params/") for path in on_disk)
    with zerojax.Checkpointer(tmp_path / "steps") as saver:
        saver.save(3, own_state, partition=own_part)
        restored = [saver.restore(3, wanted)[0] for wanted in (part, own_part)]
    for tested in (own_state, *restored):
        for (path, own), leaf in zip(tree.flatten(tested), jax.tree.leaves(state), strict=True):
            assert np.array_equal(np.asarray(own), np.asarray(leaf)), path
    assert [any(map(kept.is_on_disk, jax.tree.leaves(tested))) for tested in restored] == [False, True]


def test_the_old_state_is_given_up_and_the_new_one_is_complete():
    params = first_params()
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))
    state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=3, min_size=0, offload=BOTH)
    train_step = step.make_train_step(plain_loss, part, blocks=r"block_\w+", heads="head", reduce_dtype=jnp.float32)
    batch = {"x": X, "scale": SCALE, "factor": jnp.ones(16)}
    new, _ = train_step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state[0].mu)))
    assert jax.tree.structure(new) == jax.tree.structure(state) and int(new.step) == 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


@pytest.mark.parametrize("how", [{"blocks": r"block_\w+"}, {"reduce_dtype": jnp.float32}])
def test_params_on_the_host_need_blocks_and_explicit_sums(how):
    state = TrainState.create(apply_fn=None, params=first_params(), tx=optax.adam(1e-2))
    _, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=3, min_size=0, offload=BOTH)
    lacking = "reduce_dtype" if "blocks" in how else "blocks"
    with pytest.raises(UserError, match=rf"^offload\.params: .* and {lacking} is not given"):
        step.make_train_step(plain_loss, part, **how)
