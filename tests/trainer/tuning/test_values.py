"""Checks rewards by a model's folder. This module tests zerojax.trainer.tuning.values and beside."""

import json
import shutil

import asking
import jax
import numpy as np
import pytest
import runs

from zerojax.data.pairs import rewards
from zerojax.errors import UserError
from zerojax.interop import pretrained
from zerojax.trainer import beside, program, results, rewarded
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import answers


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return asking.write_prompts(tmp_path_factory.mktemp("prompts"), rejected="x")


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory, prompts_file):
    """Returns the export of a reward model with two layers."""
    config = runs.config(data__task="reward", data__train_file=prompts_file, model__num_layers=2, seed=3, seq_len=40)
    built = program.build(config, tokenizer_vocab=320, devices=jax.devices()[:1])
    folder = tmp_path_factory.mktemp("reward")
    results.export(built, state_lib.first(built), folder, runs.BYTES)
    return folder


def opened(prompts_file, reward, **changes):
    return asking.opened(prompts_file, 4, asking.ANSWERS, grpo__reward=str(reward), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "zero__min_size": 0, "grad_accum": 2},
        {"zero__stage": 0},
        {"zero__stage": 3, "zero__min_size": 0, "grpo__rollout_devices": 3},  # which hold the folder's weights
    ],
    ids=str,
)
def test_rewards_are_the_values_of_whole_texts_by_that_model(prompts_file, reward_folder, cache_dir, changes):
    built, asked = opened(prompts_file, reward_folder, **changes)
    state = state_lib.first(built)
    batch = {name: np.asarray(array).reshape(8, -1) for name, array in asked.next(1, state.params).items()}
    loaded = pretrained.load_huggingface(reward_folder, dtype=np.float32)
    ends = [np.flatnonzero(row)[-1] + 1 for row in batch["labeled"]]
    ids, mask = answers.padded([row[:end] for row, end in zip(batch["tokens"], ends)], 8, 17)
    wanted = loaded.classifier()(loaded.params, ids, mask)[:, 0]
    found = batch[rewarded.REWARD].view(np.float32)[:, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert len(set(found.tolist())) > 3
    assert bool(beside.nbytes(built)) != ("grpo__rollout_devices" in changes)  # of the devices that train
    _, metrics = built.train_step(state, asked.next(1, state.params))
    np.testing.assert_allclose(metrics["reward"], wanted.mean(), rtol=1e-3)


def test_a_folder_that_values_no_texts_and_a_student_that_is_no_decoder_are_refused(
    prompts_file, reward_folder, tmp_path
):
    built = program.build(runs.config(), tokenizer_vocab=320, devices=jax.devices()[:1])
    results.export(built, state_lib.first(built), tmp_path / "plain", runs.BYTES)
    for reward, changes in ((tmp_path / "plain", {}), (reward_folder, {"model__preset": "t5_test"})):
        with pytest.raises(UserError, match=r"config.grpo.reward: .* gives texts no values, or this run's"):
            opened(prompts_file, reward, **changes)
    with pytest.raises(UserError, match=r"config.grpo.reward: "):
        opened(prompts_file, tmp_path)
    short = shutil.copytree(reward_folder, tmp_path / "short")
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 15}))
    with pytest.raises(UserError, match=r"reads texts of up to 15 tokens, and config.seq_len is 16; lower it"):
        opened(prompts_file, short)


def test_a_run_refuses_to_resume_with_another_model_in_the_folder(prompts_file, reward_folder, cache_dir, tmp_path):
    rewards = shutil.copytree(reward_folder, tmp_path / "rewards")
    task = {**asking.ANSWERS, "data__train_file": prompts_file, "grpo__reward": str(rewards), "checkpoint__every": 1}
    run = runs.run(tmp_path / "run", devices=2, steps=1, **task)
    (weights,) = rewards.glob("*.safetensors")
    found = bytearray(weights.read_bytes())
    found[8 + int.from_bytes(found[:8], "little")] ^= 1  # the first byte after the header
    weights.write_bytes(found)
    with pytest.raises(UserError, match=r"was saved with another model in config.grpo.reward \(fingerprint"):
        runs.run(run, devices=2, steps=2, **task)


def test_a_folder_that_is_named_like_a_reward_is_meant_by_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("exact", "mine"):
        (tmp_path / name).mkdir()
    assert [rewards.is_folder(name) for name in ("", "exact", "./exact", "mine", "letters")] == [
        False,
        False,
        True,
        True,
        False,
    ]
