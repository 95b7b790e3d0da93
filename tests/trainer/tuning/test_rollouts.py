"""Checks that a run learns from answers of its own weights. This module tests zerojax.trainer.tuning.rollouts."""

import itertools
import shutil
import types
from unittest import mock

import arrays
import asking
import jax
import numpy as np
import pytest
import runs

from zerojax import tree
from zerojax.errors import UserError
from zerojax.launch import signals
from zerojax.lora import adapters
from zerojax.models import family
from zerojax.trainer import program, rewarded, rollout_sizes
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import conversations, drawing, rollouts

FAR = {"zero__stage": 3, "offload__optimizer": "host", "offload__params": "host"}
EXPERTS = {"model__preset": "moe_test", "mesh__expert": 4}
PIPE = {"zero__stage": 3, "mesh__pipe": 2, "grad_accum": 2, "model__num_layers": 2}
ROUNDING = 1e-4  # of log-probabilities: a cache and a full pass sum in another order


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return asking.write_prompts(tmp_path_factory.mktemp("prompts"))


def test_advantages_are_those_of_each_group_of_neighbours():
    found = rollouts.advantages(np.array([0, 1, 0, 1, 5, 5, 5, 5], np.float32), 4, "grpo")
    np.testing.assert_allclose(found, [-1, 1, -1, 1, 0, 0, 0, 0], rtol=1e-3)
    np.testing.assert_allclose(rollouts.advantages(np.array([-3e38, 3e38], np.float32), 2, "grpo"), [-1, 1], rtol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "lora__r": 4, "grpo__kl": 0.1},
        pytest.param({"zero__stage": 3, "grad_accum": 2, "lora__r": 4, "lora__quantize": "nf4"}, marks=runs.LONG),
        pytest.param({"zero__stage": 2, "model__preset": "t5_test"}, marks=runs.LONG),
        pytest.param({"zero__stage": 1, "mesh__model": 2}, marks=runs.LONG),
        pytest.param({"zero__stage": 1, "offload__optimizer": "host"}, marks=runs.LONG),
        {**FAR, "model__preset": "moe_test", "mesh__expert": 2},
        PIPE,
        pytest.param({**PIPE, "model__preset": "moe_test", "mesh__expert": 2, "grpo__replay": True}, marks=runs.LONG),
        pytest.param(FAR, marks=runs.LONG),
        pytest.param({**EXPERTS, "zero__stage": 1, "lora__r": 4, "grpo__kl": 0.1}, marks=runs.LONG),
        pytest.param({**FAR, "lora__r": 4, "lora__quantize": "nf4", "grpo__kl": 0.1}, marks=runs.LONG),
        pytest.param({**FAR, "model__preset": "t5_test", "zero__indivisible": "pad"}, marks=runs.LONG),
        pytest.param({**FAR, "model__preset": "moe_test", "mesh__model": 2, "grpo__replay": True}, marks=runs.LONG),
        pytest.param({**FAR, "offload__params": "nvme"}, marks=runs.LONG),
    ],
    ids=str,
)
def test_answers_are_drawn_by_the_weights_as_they_are_and_are_the_same_on_one_device(
    prompts_file, cache_dir, tmp_path, changes
):
    changes = changes | ({"offload__nvme_path": str(tmp_path)} if "nvme" in changes.values() else {})
    plain = {name: value for name, value in changes.items() if not name.startswith(("zero", "mesh", "offload", "grad"))}
    found = []
    for devices, settings in ((4, changes), (1, {**plain, "zero__stage": 0})):
        built, asked = asking.opened(prompts_file, devices, **settings)
        state = state_lib.first(built)
        batch = asked.next(1, state.params)
        found.append({name: np.asarray(array).reshape(8, -1) for name, array in batch.items()})
        assert asked.next(2, state.params) is batch  # an inner step
        again = asked.next(3, state.params)
        read = "targets" if built.family.is_encoder_decoder else "tokens"
        assert (np.asarray(again[read]) != np.asarray(batch[read])).any()
    for name, array in found[1].items():
        if name in (rewarded.DRAWN, rewarded.OLD, rewarded.REFERENCE):
            counts = found[1]["labeled"][:, 1:] > 0
            both = (one[name].view(np.float32)[counts] for one in found)
            np.testing.assert_allclose(*both, rtol=ROUNDING)
        else:
            np.testing.assert_array_equal(found[0][name], array, name)
    advantage = found[0][rewarded.ADVANTAGE].view(np.float32).reshape(2, 4)
    np.testing.assert_allclose(advantage.mean(axis=1), 0, atol=1e-5)
    if rewarded.REFERENCE in found[0]:  # fresh adapters change nothing
        np.testing.assert_allclose(
            found[0][rewarded.OLD].view(np.float32), found[0][rewarded.REFERENCE].view(np.float32), rtol=ROUNDING
        )


FORMS = {None: "gathered once a step", 400_000: "sharded once a step over 4 devices", 1: "gathered for each token"}


def test_answers_are_drawn_by_the_largest_copies_that_fit_and_are_the_same(prompts_file, cache_dir, monkeypatch):
    """Of free bytes that are unknown, that hold a device's shards beside the caches, and that hold nothing."""
    found, told = [], []
    monkeypatch.setattr(rollout_sizes, "of_state", lambda program: 0)
    for free in FORMS:
        monkeypatch.setattr(drawing, "_free", lambda free=free: free)
        built, asked = asking.opened(prompts_file, 4, zero__stage=3, tell=told.append)
        drawer, state = asked._drawer, state_lib.first(built)
        with mock.patch.object(drawer, "release", wraps=drawer.release) as released:
            for step in (1, 3):
                batch = asked.next(step, state.params)
                found.append({name: np.asarray(array) for name, array in batch.items()})
        held, own = jax.tree.leaves(drawer._engine._params), jax.tree.leaves(state.params)
        assert released.call_count == 2 and not any(leaf.is_deleted() for leaf in own)
        shared = [one is leaf for one, leaf in zip(held, own)]  # norms, of copies
        assert any(shared) and [leaf.is_deleted() for leaf in held] == [not one for one in shared]
        assert all(shared) == (free == 1)
        largest = max(held, key=lambda leaf: leaf.size)
        assert largest.sharding.shard_shape(largest.shape) != largest.shape or free is None
    for one, other in zip(found[:2] * 2, found[2:]):
        for name in ("tokens", "labeled", rewarded.ADVANTAGE):
            np.testing.assert_array_equal(one[name], other[name], name)
    for line, form in zip(told, FORMS.values(), strict=True):
        assert form in line, line
    far = (
        r"config.offload.params: is 'host', so answers are drawn by copies of the weights, which do not fit: gathered .* on each device "
        "beside .* of caches; sharded .*, and 1 B are free; take more devices, .* or set --config.offload.params=none$"
    )
    with (
        pytest.raises(UserError, match=far),
        mock.patch.object(jax.stages.Lowered, "compile", side_effect=AssertionError),
    ):
        asking.opened(prompts_file, 4, **FAR)
    assert "are free" not in told[0] and "390.62 KiB are free" in told[1] and "1 B are free" in told[2]


def test_a_run_with_an_environment_learns_the_models_tokens_alone(prompts_file, cache_dir):
    """The environment's letters are read, are no label, and have no log-probability; rewards add up."""
    built, asked = asking.opened(prompts_file, 2, grpo__environment="asking:echo", grpo__turns=3, seq_len=24, lora__r=4)
    state = state_lib.first(built)
    batch = {name: np.asarray(array).reshape(8, -1) for name, array in asked.next(1, state.params).items()}
    for row, tokens in enumerate(batch["tokens"]):
        own, drawn = batch["labeled"][row] > 0, batch[rewarded.DRAWN][row].view(np.float32)
        said = np.flatnonzero(tokens == ord("#"))
        assert len(said) >= 2 and not own[said].any() and not own[0]
        assert ((drawn < 0) == own[1:]).all()
    assert asked.told["turns"] == 3 and asked.told["late"] == 0
    assert asked.told["rollout_tokens_per_second"] > 0 and asked.told["rollout_seconds"] > 0
    rewards = batch[rewarded.REWARD].view(np.float32)
    assert (rewards >= 3 * 2).all() and (rewards < 3 * 2 + 1).all()


def test_the_reference_is_the_model_without_adapters_and_the_old_one_is_that_with_them(prompts_file, cache_dir):
    """Of adapters that have learned something, against all logits of the model without and of merged kernels."""
    built, asked = asking.opened(prompts_file, 1, lora__r=4, grpo__kl=0.1, zero__stage=0, grad_accum=2)
    state, seeds = state_lib.first(built), itertools.count()
    moved = lambda path, leaf: leaf + arrays.normal(next(seeds), leaf.shape) if path.endswith("lora_b") else leaf  # noqa: E731
    params = tree.map_with_path(moved, state.params)
    batch = {name: np.asarray(array).reshape(8, -1) for name, array in asked.next(1, params).items()}
    plain, chosen = built.weights.family, built.weights.adapted.chosen
    logits = jax.jit(lambda params, tokens: plain.logits(built.model, params, {}, tokens))
    without = tree.map_with_path(lambda path, leaf: 0 * leaf if path.endswith("lora_b") else leaf, params)
    for name, own in ((rewarded.REFERENCE, without), (rewarded.OLD, params)):
        own = adapters.merge(own, chosen)
        logs = jax.nn.log_softmax(logits(own, batch["tokens"][:, :-1]))
        wanted = np.take_along_axis(np.asarray(logs), batch["tokens"][:, 1:, None], axis=-1)[..., 0]
        counts = batch["labeled"][:, 1:] > 0
        np.testing.assert_allclose(batch[name].view(np.float32)[counts], wanted[counts], rtol=1e-3, err_msg=name)
    apart = batch[rewarded.REFERENCE].view(np.float32) - batch[rewarded.OLD].view(np.float32)
    assert np.abs(apart[counts]).min() > 1e-2, "another model would show"


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "grad_accum": 2, "lora__r": 4},
        pytest.param({"zero__stage": 1, "model__preset": "moe_test"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, **EXPERTS}, marks=runs.LONG),
        pytest.param(FAR, marks=runs.LONG),
        pytest.param({"zero__stage": 2, "model__preset": "t5_test"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__preset": "mamba2_test"}, marks=runs.LONG),
    ],
    ids=["LoRA, two passes", "experts", "experts on several devices", "offload", "T5", "Mamba-2"],
)
def test_exact_rollouts_have_the_log_probabilities_of_training_and_others_are_told(prompts_file, cache_dir, changes):
    """The gap is 0 with exact rollouts, rounding with the engine, and jumps where one weight of the rollouts is off."""
    found = {}
    for name, exact in (("exact", True), ("engine", False), ("wrong", False)):
        built, asked = asking.opened(prompts_file, 4, **{"grpo__inner_steps": 1, **changes, "grpo__exact": exact})
        state = state_lib.first(built)
        off = {"wrong": 10.0}.get(name, 0.0)
        (path,) = (path for path, _ in tree.flatten(state.params) if path in ("norm/scale", "decoder_norm/scale"))
        moved = lambda at, leaf, path=path, off=off: leaf.at[0].add(off) if off and at == path else leaf  # noqa: E731
        asked._drawer.renew(tree.map_with_path(moved, state.params))
        with mock.patch.object(asked._drawer, "renew"):
            batch = asked.next(1, state.params)
        counts = np.asarray(batch["labeled"]).reshape(8, -1)[:, 1:] > 0
        drawn = np.asarray(batch[rewarded.DRAWN]).view(np.float32).reshape(8, -1)
        assert (drawn[counts] < 0).all() and (drawn[~counts] == 0).all()
        _, metrics = built.train_step(state, batch)
        found[name] = [float(metrics[f"gap_{kind}"]) for kind in ("mean", "max", "share")]
    assert found["exact"] == [0.0, 0.0, 0.0]
    rounding, largest, share = found["engine"]
    assert 0 < rounding < largest < ROUNDING and share == 0
    mean, largest, share = found["wrong"]
    assert largest > mean > max(0.01, 100 * rounding) and share > 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "grad_accum": 2, "grpo__inner_steps": 2},
        pytest.param({"zero__stage": 1, "mesh__model": 2, "lora__r": 4, "grpo__kl": 0.1}, marks=runs.LONG),
        pytest.param({"zero__stage": 2, "offload__optimizer": "host", "model__programs": "one"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__programs": "kinds"}, marks=runs.LONG),
        pytest.param({"zero__stage": 2, "mesh__expert": 2}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__preset": "hybrid_test"}, marks=runs.LONG),
    ],
    ids=str,
)
def test_a_step_takes_the_experts_that_the_engine_chose(prompts_file, cache_dir, changes):
    """Gradients are those of the step's own choice where both choose alike, in any order of rows, and others' where they are changed."""
    changes = {"model__preset": "moe_test", "model__num_layers": 2, "grpo__inner_steps": 1, **changes}
    found, batches = {}, {}
    for name, replay in (("own", False), ("replayed", True)):
        built, asked = asking.opened(prompts_file, 4, **changes, grpo__replay=replay)
        batches[name] = asked.next(1, state_lib.first(built).params)
        _, metrics = built.train_step(state_lib.first(built), batches[name])
        found[name] = float(metrics["grad_norm"])
    chosen = np.asarray(batches["replayed"][rewarded.CHOICES])
    flat = chosen.reshape(8, -1, 2, 2)  # layers, experts of a token
    labeled = np.asarray(batches["own"]["labeled"]).reshape(8, -1)
    ends = [np.flatnonzero(row)[-1] for row in labeled]
    for row, end in zip(flat, ends):
        assert (row[:end, :, 0] != row[:end, :, 1]).all()  # each token that is read has two experts
        assert not row[end:].any()
    np.testing.assert_allclose(found["replayed"], found["own"], rtol=ROUNDING)
    order = np.random.default_rng(0).permutation(chosen.shape[-2] if chosen.ndim == 3 else 8)
    mixed = {key: array[..., order, :] for key, array in batches["replayed"].items()}
    mixed = {key: jax.device_put(array, batches["replayed"][key].sharding) for key, array in mixed.items()}
    other = {
        **batches["replayed"],
        rewarded.CHOICES: jax.device_put(3 - chosen, batches["replayed"][rewarded.CHOICES].sharding),
    }
    for name, batch in (("mixed", mixed), ("other", other)):
        _, metrics = built.train_step(state_lib.first(built), batch)
        found[name] = float(metrics["grad_norm"])
    np.testing.assert_allclose(found["mixed"], found["replayed"], rtol=ROUNDING)
    assert abs(found["other"] / found["replayed"] - 1) > 5 * ROUNDING


def test_tokens_that_a_model_always_gives_are_no_labels():
    """The first of an answer to no text, and the last of one that is as long as it may be."""
    special = family.SpecialTokens(start=9, forced_first=7, forced_last=2)
    for is_pair, prompt, new, labeled in (
        (False, [1], [7, 5, 2], [False, False, True, False]),
        (False, [1, 4], [7, 5, 2], [False, False, True, True, False]),
        (False, [1, 4], [7, 2], [False, False, True, True]),
        (True, [4], [7, 5, 2], [False, False, True, False]),
    ):
        own, answer = (
            types.SimpleNamespace(_special=special, _is_pair=is_pair),
            drawing.DrawnAnswer(0, prompt, 0, 3, new),
        )
        talk = conversations.Conversation(0, [], [*prompt], [False] * len(prompt), [])
        talk.add(new, [0.0] * len(new), rollouts.Rollouts._learned(own, answer).tolist())
        example = rollouts.Rollouts._example(own, talk)
        assert example.labeled.tolist() == labeled
        assert (example.targets if is_pair else example.inputs).tolist() == ([9] if is_pair else prompt) + new


@runs.LONG
@pytest.mark.parametrize("changes", [{}, {"zero__stage": 3, "offload__params": "host"}, PIPE], ids=str)
def test_a_run_that_resumes_after_its_inner_steps_has_the_same_numbers(prompts_file, cache_dir, tmp_path, changes):
    settings = {**asking.TASK, "data__train_file": prompts_file, "lora__r": 4, "grpo__kl": 0.1, **changes}
    whole = runs.run(tmp_path / "whole", devices=2, steps=4, **settings)
    with mock.patch.object(signals.StopSignal, "agreed", return_value=True):  # a signal in the first step
        stopped = runs.run(tmp_path / "stopped", devices=2, steps=4, **settings)
    assert [*runs.losses(stopped)] == [1, 2]
    parts = shutil.copytree(stopped, tmp_path / "parts")  # of the first this process has the lock until it ends
    runs.run(parts, devices=2, steps=4, **settings)
    names = ("loss", "reward", "kl", "clipped")
    assert runs.numbers(parts, names=names) == runs.numbers(whole, names=names)


@pytest.mark.slow
@runs.LONG
@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "lora__r": 4, "grpo__kl": 0.1},
        {"zero__stage": 2, "model__preset": "t5_test", "mesh__model": 2, "grad_accum": 2},
        PIPE,
    ],
    ids=["stage 3, LoRA", "T5, tensor parallel", "pipeline"],
)
def test_two_processes_answer_and_learn_as_one(prompts_file, commands, tmp_path, changes):
    task = {**asking.TASK, "data__train_file": prompts_file, "grpo__reward": "crosses:spread", "steps": 4, **changes}
    flags = [*runs.flags(emulate_devices=2, **task), f"--workdir={tmp_path / 'two'}"]
    both = commands.start_two(*flags, before=(runs.FINDS_SUPPORT, runs.FINDS_SUPPORT))
    assert [command.wait().status for command in both] == [0, 0], both[0].err + both[1].err
    one = runs.run(tmp_path / "one", devices=4, **task)
    names = ("loss", "reward", "grad_norm")
    found, wanted = (runs.numbers(folder, names=names) for folder in (tmp_path / "two", one))
    np.testing.assert_allclose(found, wanted, rtol=ROUNDING, atol=1e-6)
    assert len(found) == 4


@pytest.mark.slow
@runs.LONG
def test_a_reward_that_fails_on_the_first_process_ends_both(prompts_file, commands, tmp_path):
    task = {**asking.TASK, "data__train_file": prompts_file, "grpo__reward": "posixpath:join", "steps": 4}
    both = commands.start_two(*runs.flags(emulate_devices=1, **task), f"--workdir={tmp_path}")
    assert 0 not in [command.wait().status for command in both]
    assert "zerojax: config.grpo.reward: posixpath:join failed for the answer" in both[0].err
    assert both[1].err.count("\n") == 1, both[1].err


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"grpo__kl": 0.1}, "config.grpo.kl: is 0.1, .*without adapters"),
        ({"grpo__group": 3}, "config.grpo.group: 3 answers .*global_batch_size=24"),
        ({"grpo__reward": "none"}, "config.grpo.reward: must be one of"),
        ({"seq_len": 4}, "config.seq_len: is 4, and the longest prompt .*set --config.seq_len=7"),
        ({"mesh__context": 2}, "config.mesh.context: is 2"),
        ({"checkpoint__every": 3}, "config.checkpoint.every: is 3, .* set --config.checkpoint.every=4"),
        ({"steps": 3}, "config.steps: is 3, .* set --config.steps=4"),
        ({"precision": "fp8"}, "config.precision: is 'fp8'"),
        ({"epochs": 1.0}, "config.epochs: is 1.0"),
        ({"grpo__exact": True, "mesh__model": 2}, "config.mesh.model: is 2"),
        ({"grpo__exact": True, **PIPE}, "config.mesh.pipe: is 2"),
        ({"grpo__exact": True, "lora__r": 2, "lora__dropout": 0.1}, "config.lora.dropout: is 0.1"),
        ({"grpo__replay": True}, "config.grpo.replay: is True, and there are no experts"),
        ({"grpo__replay": True, "grpo__exact": True}, "config.grpo.exact: is True, and with config.grpo.replay"),
        (
            {"grpo__replay": True, "grpo__environment": "calculator"},
            "config.grpo.environment: is 'calculator', and with",
        ),
        ({"grpo__environment": "none"}, "config.grpo.environment: must be one of calculator, or module:function"),
        (
            {"grpo__environment": "calculator", "model__preset": "t5_test"},
            "config.grpo.environment: is calculator, and an",
        ),
    ],
)
def test_what_does_not_go_with_rollouts_is_refused(prompts_file, changes, words):
    with pytest.raises(UserError, match=words) as caught, program.setting_names.of_config():
        asking.opened(prompts_file, **changes)
    assert "\n" not in str(caught.value)
    assert len(jax.devices()) == 8


def test_a_group_is_refused_before_a_program_is_built(prompts_file, tmp_path):
    unbuilt = mock.patch.object(program, "build", side_effect=AssertionError("it builds one"))
    with pytest.raises(UserError, match=r"config\.grpo\.group: 3 answers"), unbuilt:
        runs.run(tmp_path, **{**asking.TASK, "data__train_file": prompts_file, "grpo__group": 3})
