"""Checks copies of weights, and answers that some devices draw by them while others train. This module tests
zerojax.trainer.tuning.weight_copies."""

import itertools
import shutil
from unittest import mock

import arrays
import asking
import jax
import numpy as np
import pytest
import runs

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.launch import signals
from zerojax.plan import report
from zerojax.trainer import metrics, plans, rewarded
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import weight_copies
from zerojax.zero.host import memory_kind

ROUNDING = 1e-4  # of log-probabilities: a cache and a full pass sum in another order
ONE_STEP = {"grpo__inner_steps": 1, "grpo__reward": "asking:long"}
ARRAYS = ("tokens", "targets", "labeled", rewarded.REWARD, rewarded.ADVANTAGE, rewarded.CHOICES)


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return asking.write_prompts(tmp_path_factory.mktemp("prompts"))


def moved(params, partition, number):
    """Returns trained weights that differ with the number."""
    seeds = itertools.count()

    def move(path, leaf):
        noise = 0.1 * number * arrays.normal(next(seeds), leaf.shape)
        if not partition.placements[f"params/{path}"].trainable:
            return leaf
        return jax.device_put((np.asarray(leaf) + noise).astype(leaf.dtype), leaf.sharding)  # also in host memory

    return tree.map_with_path(move, params)


def plain(batch):
    return {name: np.asarray(array).reshape(8, -1) for name, array in batch.items()}


@pytest.mark.parametrize(
    "rollout, changes",
    [
        (1, {"zero__stage": 3, "lora__r": 4, "grpo__kl": 0.1}),
        pytest.param(1, {"zero__stage": 0, "precision": "bf16"}, marks=runs.LONG),
        pytest.param(2, {"zero__stage": 1, "grad_accum": 2, "grpo__inner_steps": 2}, marks=runs.LONG),
        pytest.param(3, {"zero__stage": 2, "model__preset": "t5_test"}, marks=runs.LONG),
        pytest.param(2, {"zero__stage": 3, "mesh__model": 2, "zero__min_size": 0}, marks=runs.LONG),
        pytest.param(1, {"zero__stage": 3, "model__preset": "moe_test", "mesh__expert": 2}, marks=runs.LONG),
        pytest.param(2, {"mesh__pipe": 2, "grad_accum": 2, "model__num_layers": 2, "mesh__model": 2}, marks=runs.LONG),
        pytest.param(1, {"model__preset": "moe_test", "mesh__expert": 2, "grpo__replay": True}, marks=runs.LONG),
        pytest.param(1, {"zero__stage": 3, "offload__optimizer": "host", "offload__params": "host"}, marks=runs.LONG),
        pytest.param(1, {"zero__stage": 3, "lora__r": 4, "lora__quantize": "nf4"}, marks=runs.LONG),
        pytest.param(1, {"zero__stage": 3, "wire__weights": "int8"}, marks=runs.LONG),
        pytest.param(2, {"grpo__environment": "asking:echo", "grpo__turns": 2, "seq_len": 24}, marks=runs.LONG),
    ],
    ids=str,
)
def test_answers_are_those_of_weights_one_update_older(prompts_file, cache_dir, rollout, changes):
    """Beside a run whose devices all draw and train, at whose steps the weights are those of a step before."""
    changes = {**ONE_STEP, **changes}
    built, ahead = asking.opened(prompts_file, 4 + rollout, **changes, grpo__rollout_devices=rollout)
    other, in_turn = asking.opened(prompts_file, 4, **{**changes, "mesh__expert": 1})
    assert built.mesh.size == 4 and built.rollout_mesh.size == rollout
    assert not set(built.mesh.devices.flat) & set(built.rollout_mesh.devices.flat)
    state, alike = state_lib.first(built), state_lib.first(other)
    inner = built.config.grpo.inner_steps
    staleness, norms = [], []
    for step in (1, 2, 3):
        at = (step - 1) * inner + 1
        older = max(at - 2, 0)
        sent = ahead.next(at, moved(state.params, built.partition, at - 1))
        found = plain(sent)
        staleness.append(ahead.told["rollout_staleness"])
        for inside in range(at + 1, at + inner):
            batch = ahead.next(inside, moved(state.params, built.partition, inside - 1))
            staleness.append(ahead.told["rollout_staleness"])
            np.testing.assert_array_equal(plain(batch)[rewarded.DRAWN], found[rewarded.DRAWN])
        own = in_turn.next(at, moved(alike.params, other.partition, older))
        wanted = plain(own)
        if step == 1:  # of equal weights and answers, so the ratios are 1
            steps = ((built, state_lib.first(built), sent), (other, state_lib.first(other), own))
            norms = [float(one.train_step(first, batch)[1]["grad_norm"]) for one, first, batch in steps]
        for name in set(ARRAYS) & wanted.keys():
            np.testing.assert_array_equal(found[name], wanted[name], f"{name} of step {at}")
        counts = wanted["labeled"][:, 1:] > 0
        for name in {rewarded.DRAWN, rewarded.REFERENCE} & wanted.keys():
            both = (one[name].view(np.float32)[counts] for one in (found, wanted))
            np.testing.assert_allclose(*both, rtol=ROUNDING if built.config.precision == "fp32" else 0.1, err_msg=name)
        gap = np.abs((found[rewarded.OLD].view(np.float32) - found[rewarded.DRAWN].view(np.float32))[counts])
        assert gap.max() < (ROUNDING if built.config.precision == "fp32" else 0.1), "log-probabilities of other weights"
    if "wire__weights" not in changes:  # a step reads rounded weights, copies are not rounded, and the ratio tells it
        np.testing.assert_allclose(*norms, rtol=ROUNDING if built.config.precision == "fp32" else 0.05)
    assert staleness == {1: [0, 1, 1], 2: [0, 1, 1, 2, 1, 2]}[inner]


def test_frozen_weights_are_sent_once_and_former_copies_are_freed(prompts_file, cache_dir):
    built, ahead = asking.opened(prompts_file, 3, **ONE_STEP, lora__r=4, zero__stage=3, grpo__rollout_devices=1)
    state = state_lib.first(built)
    ahead.next(1, state.params)
    before = dict(tree.flatten(ahead._copies.params))
    ahead.next(2, moved(state.params, built.partition, 1))
    after = dict(tree.flatten(ahead._copies.params))
    for path, leaf in before.items():
        trained = built.partition.placements[f"params/{path}"].trainable
        assert (after[path] is leaf) == (not trained) and leaf.is_deleted() == trained, path
        assert after[path].devices() == set(built.rollout_mesh.devices.flat)
    assert {True, False} == {own.trainable for own in built.partition.placements.values()}


@pytest.mark.parametrize("stage", [0, 3])
def test_copies_are_the_weights_also_in_parts_and_when_a_step_has_written_over_these(prompts_file, cache_dir, stage):
    built, ahead = asking.opened(prompts_file, 3, **ONE_STEP, zero__stage=stage, grpo__rollout_devices=1)
    waits, wait = [], jax.block_until_ready
    write = jax.jit(lambda params: jax.tree.map(lambda leaf: 0 * leaf + 7, params), donate_argnums=0)
    for most in (2**28, -1):
        params = state_lib.first(built).params
        wanted = jax.tree.map(np.array, params)
        with (
            mock.patch.object(weight_copies, "AT_ONCE", most),
            mock.patch.object(jax, "block_until_ready", lambda held: waits.append(wait(held))),
        ):
            ahead._copies.renew(params, 0)
        assert bool(waits) == (most == -1)
        write(params)
        for (path, leaf), (_, own) in zip(tree.flatten(ahead._copies.params), tree.flatten(wanted)):
            np.testing.assert_array_equal(np.asarray(leaf), own, path)


def test_copies_are_sharded_in_another_way_over_the_groups_of_a_pipeline_and_are_arrays_of_their_own(
    prompts_file, cache_dir
):
    changes = {"mesh__pipe": 2, "grad_accum": 2, "model__num_layers": 2, "zero__stage": 3}
    built, _ = asking.opened(prompts_file, 4, **ONE_STEP, **changes)
    params = state_lib.first(built).params
    mesh = mesh_lib.make_mesh(data=1, model=4, devices=built.mesh.devices.ravel().tolist())
    partition = built.at_stage_0(mesh)
    copies = weight_copies.WeightCopies(built, partition)
    copies.renew(params)
    wanted = dict(tree.flatten(partition.shardings.params))
    for (path, leaf), (_, own) in zip(tree.flatten(copies.params), tree.flatten(params), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(own), path)
        assert leaf.sharding == wanted[path]
    copies.free()
    jax.block_until_ready(jax.tree.map(jax.numpy.copy, params))  # raises for one whose memory was freed


def test_a_run_that_is_stopped_anywhere_goes_on_with_the_same_numbers(prompts_file, cache_dir, tmp_path, capsys):
    """After a save that was due, and after one that a signal asked for, whose next answers are of weights that are not in it."""
    settings = {**asking.TASK, **ONE_STEP, "data__train_file": prompts_file, "checkpoint__every": 2}
    settings |= {"grpo__rollout_devices": 1, "zero__stage": 3, "optimizer__learning_rate": 0.1, "evaluate__answers": 0}
    whole = runs.run(tmp_path / "whole", devices=3, steps=6, **settings)
    assert "1 process, the last 1 for rollouts; everything goes to" in capsys.readouterr().out
    names = ("loss", "grad_norm", "reward", "clipped", "gap_max", "rollout_staleness")
    wanted = runs.numbers(whole, names=names)
    assert [line[-1] for line in wanted] == [0, 1, 1, 1, 1, 1]
    lines = [line for line in metrics.read(whole) if "loss" in line]
    assert all(line["train_seconds"] >= 0 and line["train_wait_seconds"] >= 0 for line in lines)
    assert len({line["reward"] for line in lines}) > 2
    for stops, done in ((1, 1), (3, 3), (6, 6)):
        agreed = iter([False] * (stops - 1) + [True])
        with mock.patch.object(signals.StopSignal, "agreed", lambda self, agreed=agreed: next(agreed, False)):
            stopped = runs.run(tmp_path / f"stopped{stops}", devices=3, steps=6, **settings)
        assert max(runs.losses(stopped)) == done
        parts = shutil.copytree(
            stopped, tmp_path / f"parts{stops}"
        )  # of the first this process has the lock until it ends
        runs.run(parts, devices=3, steps=6, **settings)
        assert runs.numbers(parts, names=names) == wanted
    longer = shutil.copytree(whole, tmp_path / "longer")
    # Another number of devices, and none, are a choice of the run that resumes.
    runs.run(longer, devices=2, steps=7, **{**settings, "grpo__rollout_devices": 0})
    assert len(runs.losses(longer)) == 7


def nbytes_on(device, arrays):
    """The bytes that arrays hold on a device."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(arrays)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"model__preset": "moe_test", "mesh__expert": 2},
        pytest.param({"mesh__pipe": 2, "grad_accum": 2, "model__num_layers": 2}, marks=runs.LONG),
        {"lora__r": 4, "lora__quantize": "nf4", "offload__params": "host"},
    ],
    ids=["experts", "pipeline", "nf4 on host"],
)
def test_the_plan_counts_what_devices_hold_that_draw_and_then_train(prompts_file, cache_dir, changes):
    """At stage 3 copies of the weights beside the state. The copies are freed before the step, and the caches are not."""
    built, ahead = asking.opened(prompts_file, 2, **{**ONE_STEP, "zero__stage": 3, "precision": "bf16", **changes})
    state = state_lib.first(built)
    planned = plans.rollouts_of(built)
    drawer, device, sizes = ahead._drawer, built.mesh.devices.flat[0], []
    release = drawer.release

    def released():
        sizes.extend(nbytes_on(device, one) for one in (drawer._copies._made, drawer._engine.caches))
        release()

    drawer.release = released
    ahead.next(1, state.params)
    assert [planned.weights, planned.caches] == sizes[:2] and planned[:2] == (0, 8)
    near = [leaf for leaf in jax.tree.leaves(state) if not memory_kind.is_on_host(leaf)]
    assert planned.state == max(nbytes_on(one, near) for one in built.mesh.devices.flat)
    assert not drawer._copies.params and planned.caches == nbytes_on(device, drawer._engine.caches)


def test_the_plan_tells_what_the_devices_hold_that_draw_answers(prompts_file, cache_dir):
    """Of one device and of two, beside the arrays that they hold when they have drawn."""
    for rollout in (1, 2):
        changes = {"grpo__rollout_devices": rollout, "zero__stage": 3, "lora__r": 4, "precision": "bf16"}
        built, ahead = asking.opened(prompts_file, 2 + rollout, **{**ONE_STEP, **changes})
        ahead.next(1, state_lib.first(built).params)
        planned = plans.rollouts_of(built)
        device = built.rollout_mesh.devices.flat[-1]
        found = [nbytes_on(device, one) for one in (ahead._copies.params, ahead._drawer._engine.caches)]
        assert [planned.weights, planned.caches] == found and planned[:2] == (rollout, 8)
    line = report._rollouts(planned)
    assert "each of the 2 devices that draw answers holds" in line and "of 8 answers" in line
    exact, _ = asking.opened(prompts_file, 2, **ONE_STEP, grpo__exact=True)
    assert plans.rollouts_of(exact) is None
    with pytest.raises(UserError, match=r"config.grpo.rollout_devices: is 2, and --search compares meshes"):
        plans.search_config(built.config, "cpu")


@pytest.mark.parametrize(
    "devices, changes, words",
    [
        (
            2,
            {"grpo__rollout_devices": 2},
            "config.grpo.rollout_devices: is 2, and of 2 devices none is left to train; lower it, or take more .*emulate_devices",
        ),
        (
            3,
            {"grpo__rollout_devices": 1, "mesh__data": 3},
            "rollout_devices: is 1, and 2 of 3 devices are left to train: .*data 3",
        ),
        (
            4,
            {"grpo__rollout_devices": 1, "mesh__model": 3},
            "rollout_devices: is 1, and config.mesh.model=3 devices share .* set it to 3",
        ),
        (
            2,
            {"grpo__rollout_devices": 1, "grpo__exact": True},
            "config.grpo.rollout_devices: is 1, and with config.grpo.exact=True",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_compiles(prompts_file, devices, changes, words):
    with pytest.raises(UserError, match=words):
        asking.opened(prompts_file, devices, **{**ONE_STEP, **changes})
