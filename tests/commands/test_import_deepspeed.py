"""Checks that a run goes on where DeepSpeed stopped. This module tests zerojax.commands.import_deepspeed."""

import dataclasses
import functools
import json
import math
import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest
import torch_writer

from zerojax import tree
from zerojax.checkpoint import checkpointer, logical
from zerojax.commands import import_deepspeed
from zerojax.interop import layout, tensor_files
from zerojax.interop.deepspeed import torch_files, zero_checkpoint
from zerojax.trainer import program, resume

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "deepspeed"
FIRST_RATES = {
    4: np.log(4) / np.log(10) * 1e-3,
    5: np.log(5) / np.log(10) * 1e-3,
}  # WarmupLR over 10 steps, one step late
SUM_ORDER = 2e-5  # relative: the same float32 arithmetic in another order

pytestmark = pytest.mark.usefixtures("cache_dir")


def call(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["import-deepspeed", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        import_deepspeed.main()
    return end.value.code, *capsys.readouterr()


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns f(name): the folder of a golden checkpoint, imported once."""

    @functools.cache
    def run(name):
        out = tmp_path_factory.mktemp("imported") / name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sys, "argv", ["x", str(GOLDEN / name), "--out", str(out), "--model_config", str(GOLDEN / "config.json")]
            )
            with pytest.raises(SystemExit) as end:
                import_deepspeed.main()
        assert end.value.code == 0
        return out

    return run


def restored(out, **changes):
    """Returns the program of an imported run, in float32, and the state that it resumes with."""
    config = import_deepspeed._config(out / "config.py")
    config = dataclasses.replace(config, **changes)
    built = program.build(config, tokenizer_vocab=1)
    saver = checkpointer.Checkpointer(out / "run" / "checkpoints", keep_last=1, keep_best=0)
    saved = saver.meta(4)
    state = resume.state(built, saver, 4, saved)
    saver.close()
    return built, state


def by_name(built, params):
    """Returns {Hugging Face's name: array in its layout}."""
    found = dict(tree.flatten(params))

    def theirs(tensor):
        ours, inputs = np.asarray(found[tensor.path]), tensor.entry.inputs
        return ours.reshape(math.prod(ours.shape[:inputs]), -1).T if inputs else ours.reshape(tensor.shape)

    return {tensor.name: theirs(tensor) for tensor in layout.tensors(built.family, built.model)}


@pytest.mark.parametrize("name", ["zero1-fp16-world2", "zero3-bf16-world2"])
def test_params_moments_counts_and_loss_scale_are_those_of_the_checkpoint(imported, name):
    found, (built, state) = zero_checkpoint.read(GOLDEN / name), restored(imported(name))
    plain = logical.to_logical(state)
    adam = plain.opt_state[0]
    for own, theirs in (
        (plain.params, found.params),
        (adam.mu, found.moments["exp_avg"]),
        (adam.nu, found.moments["exp_avg_sq"]),
    ):
        arrays = by_name(built, own)
        assert arrays.keys() == theirs.keys()
        for weight, array in theirs.items():
            np.testing.assert_array_equal(arrays[weight], array, err_msg=weight)
    assert int(state.step) == int(adam.count) == 4
    if "fp16" in name:
        scale = state.loss_scale
        assert (float(scale.scale), int(scale.hysteresis), int(scale.good_steps), int(scale.skipped_steps)) == (
            512.0,
            2,
            4,
            0,
        )


def test_the_next_steps_are_those_of_adamw_by_deepspeeds_formula(imported):
    """Against numpy: p -= lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay * p), with the rates of DeepSpeed's WarmupLR."""
    built, state = restored(imported("zero3-bf16-world2"), precision="fp32")
    params = jax.tree.map(np.asarray, logical.to_logical(state).params)
    m, v = (jax.tree.map(np.asarray, getattr(logical.to_logical(state).opt_state[0], name)) for name in ("mu", "nu"))
    loss_of = jax.jit(jax.value_and_grad(lambda params, batch: built.family.loss(built.model, params, batch)))
    rng = np.random.default_rng(0)
    for step, rate in FIRST_RATES.items():
        batch = {name: rng.integers(0, 259, like.shape).astype(np.int32) for name, like in built.abstract_batch.items()}
        loss, grads = loss_of(params, batch)
        norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: np.asarray(g) * min(1.0, 1.0 / norm), grads)  # noqa: B023
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, v, grads)
        t = step + 1

        def update(p, m, v, t=t, rate=rate):
            return p - rate * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + 0.1 * p)

        params = jax.tree.map(update, params, m, v)
        state, metrics = built.train_step(state, jax.device_put(batch, built.batch_sharding))
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=SUM_ORDER)
        assert float(metrics["learning_rate"]) == pytest.approx(rate, rel=SUM_ORDER)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6), state.params, params)


def test_the_weights_are_a_folder_for_any_model(imported):
    out = imported("zero1-fp16-world2")
    found = zero_checkpoint.read(GOLDEN / "zero1-fp16-world2")
    entries = tensor_files.read_folder(out / "huggingface")
    assert {name: entry.shape for name, entry in entries.items()} == {
        name: array.shape for name, array in found.params.items()
    }
    assert {entry.dtype for entry in entries.values()} == {"F32"}


def test_a_model_of_no_family_becomes_weights_alone(tmp_path, monkeypatch, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mamba"}))
    status, text, _ = call(
        monkeypatch, capsys, GOLDEN / "zero2-bf16-world2", "--out", tmp_path / "a", "--model_config", config
    )
    assert status == 0 and "'mamba' is not an architecture that zerojax computes" in text
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["huggingface"]
    shutil.copytree(GOLDEN / "zero2-bf16-world2", tmp_path / "alone")
    config.unlink()
    status, text, _ = call(monkeypatch, capsys, tmp_path / "alone", "--out", tmp_path / "b")
    assert status == 0 and "no config.json of its model; name it by --model_config" in text


@pytest.mark.parametrize(
    "rename, ds_config, words",
    [
        (lambda name: name, {"train_batch_size": math.nan}, "its ds_config cannot be read (train_batch_size: must be"),
        (lambda name: f"base.{name}", {}, "describes another model ("),
        (lambda name: f"{name[:-7]}.lora_A.default.weight", {}, "is a weight of an adapter; name PEFT's folder"),
    ],
)
def test_weights_that_no_run_can_go_on_from_are_written_with_the_reason(
    tmp_path, monkeypatch, capsys, rename, ds_config, words
):
    golden = GOLDEN / "zero0-bf16-world2"
    module = torch_files.read(next(golden.glob("global_step4/*.pt")))["module"]
    moments = [
        {"exp_avg": np.zeros(w.shape, np.float32), "exp_avg_sq": np.ones(w.shape, np.float32)} for w in module.values()
    ]
    optimizer = {"state": dict(enumerate(moments)), "param_groups": [{"params": list(range(len(module)))}]}
    content = {
        "module": {rename(name): w for name, w in module.items()},
        "optimizer": optimizer,
        "ds_config": ds_config,
    }
    folder = tmp_path / "in" / "global_step4"
    folder.mkdir(parents=True)
    torch_writer.save(folder / "mp_rank_00_model_states.pt", content)
    shutil.copyfile(GOLDEN / "config.json", tmp_path / "in" / "config.json")
    status, text, _ = call(monkeypatch, capsys, tmp_path / "in", "--out", tmp_path / "out")
    assert status == 0 and "no checkpoint to resume was written: " in text and words in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["huggingface"]


def test_a_hostile_checkpoint_builds_nothing_and_is_named(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "bad" / "global_step4"
    folder.mkdir(parents=True)
    content = {"module": torch_writer.Call("posix.system", f"touch {tmp_path / 'trace'}")}
    torch_writer.save(folder / "mp_rank_00_model_states.pt", content)
    status, text, errors = call(monkeypatch, capsys, tmp_path / "bad", "--out", tmp_path / "out")
    assert (status, text, errors.count("\n")) == (
        2,
        "",
        1,
    ) and "mp_rank_00_model_states.pt: names posix.system" in errors
    assert not (tmp_path / "trace").exists() and not (tmp_path / "out").exists()


def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for words, message in (
        ((GOLDEN / "zero2-bf16-world2",), "arguments are required: --out"),
        ((GOLDEN / "zero2-bf16-world2", "--out", tmp_path / "out"), "holds files; choose a new folder"),
        (
            (GOLDEN / "zero2-bf16-world2", "--out", tmp_path / "new", "--model_config", tmp_path / "none"),
            "there is no such file",
        ),
    ):
        status, _, errors = call(monkeypatch, capsys, *words)
        assert status == 2 and errors.count("\n") == 1 and message in errors
