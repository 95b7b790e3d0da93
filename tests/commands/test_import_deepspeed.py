"""Checks that a run goes on where DeepSpeed stopped. This module tests zerojax.commands.import_deepspeed."""

import dataclasses
import functools
import json
import math
import pathlib
import re
import shutil
import sys

import file_systems
import jax
import numpy as np
import pytest
import runs
import torch_writer

from zerojax import tree
from zerojax.checkpoint import checkpointer, checksums, logical
from zerojax.commands import import_deepspeed
from zerojax.interop import layout, tensor_files
from zerojax.migration import torch_files, zero_checkpoint
from zerojax.trainer import program, resume

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "deepspeed"
LORA = GOLDEN.parent / "huggingface" / "llama" / "lora"
FIRST_RATES = {
    4: np.log(4) / np.log(10) * 1e-3,
    5: np.log(5) / np.log(10) * 1e-3,
}  # WarmupLR over 10 steps, one step late
SUM_ORDER = 2e-5  # relative: the same float32 arithmetic in another order

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.fixture
def call(run_main):
    return functools.partial(run_main, import_deepspeed)


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
    config = import_deepspeed._config((out / "config.py").read_text())
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
    recorded = checksums.read(out / "huggingface" / tensor_files.CHECKSUMS).files
    assert {"config.json", tensor_files.ONE_FILE} <= set(recorded)


def test_a_model_of_no_family_becomes_weights_alone(call, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mamba"}))
    status, text, _ = call(GOLDEN / "zero2-bf16-world2", "--out", tmp_path / "a", "--model_config", config)
    assert status == 0 and "'mamba' is not an architecture that zerojax computes" in text
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["huggingface"]
    shutil.copytree(GOLDEN / "zero2-bf16-world2", tmp_path / "alone")
    config.unlink()
    status, text, _ = call(tmp_path / "alone", "--out", tmp_path / "b")
    assert status == 0 and "no config.json of its model; name it by --model_config" in text


def test_an_import_that_did_not_end_is_begun_anew_and_its_config_is_written_last(call, tmp_path, monkeypatch):
    out, config = tmp_path / "out", tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mamba"}))
    words = (GOLDEN / "zero2-bf16-world2", "--out", out)
    with monkeypatch.context() as patch:
        patch.setattr(import_deepspeed.program_lib, "build", file_systems.full)
        status, _, errors = call(*words)
    assert (status, errors) == (2, "zerojax: a file: no space left on the device; make room; run again\n")
    assert sorted(path.name for path in out.iterdir()) == [".unfinished", "huggingface"]
    (out / ".exp_avg.partial").mkdir()
    (out / "huggingface" / tensor_files.ONE_FILE).write_bytes(b"half")
    assert call(*words, "--model_config", config)[0] == 0
    assert [path.name for path in out.iterdir()] == ["huggingface"] and tensor_files.read_folder(out / "huggingface")
    status, _, errors = call(*words)
    assert status == 2 and "holds huggingface; choose a new folder" in errors


@runs.LONG
def test_a_disk_that_fills_while_the_checkpoint_is_saved_is_one_line(tmp_path, cache_dir):
    command = [sys.executable, "-m", "zerojax", "import-deepspeed", str(GOLDEN / "zero3-bf16-world2")]
    command += ["--model_config", str(GOLDEN / "config.json"), "--out", str(tmp_path / "out")]
    script = f'mount -t tmpfs -o size=1000k tmpfs {tmp_path} && exec "$@"'
    result = file_systems.in_a_namespace(script, command, runs.environment(cache_dir))
    assert result.returncode == 2
    assert re.fullmatch(r"zerojax: \S+: saving step 4 failed: no space left on the disk; .*\n", result.stderr)


@pytest.mark.parametrize(
    "rename, ds_config, words",
    [
        (lambda name: name, {"train_batch_size": math.nan}, "its ds_config cannot be read (train_batch_size: must be"),
        (lambda name: f"base.{name}", {}, "describes another model ("),
        (
            lambda name: f"base_model.model.{name[:-7]}.lora_A.default.weight",
            {},
            "is a weight of an adapter, and no adapter_config.json lies beside the checkpoint; name the one that PEFT wrote by --adapter",
        ),
    ],
)
def test_weights_that_no_run_can_go_on_from_are_written_with_the_reason(call, tmp_path, rename, ds_config, words):
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
    status, text, _ = call(tmp_path / "in", "--out", tmp_path / "out")
    assert status == 0 and "no checkpoint to resume was written: " in text and words in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["huggingface"]


def peft_checkpoint(folder, stage, *, has_frozen):
    """Writes a checkpoint of DeepSpeed + PEFT on one rank, of the golden adapter. Returns {kind: {name in PEFT's folder: array}}."""
    rng = np.random.default_rng(0)
    held = {name: tensor(entry) for name, entry in tensor_files.read_header(LORA / "adapter_model.safetensors").items()}
    arrays = {"params": held} | {
        kind: {name: rng.random(a.shape, np.float32) for name, a in held.items()} for kind in ("exp_avg", "exp_avg_sq")
    }
    flat = {kind: np.concatenate([a.ravel() for a in named.values()]) for kind, named in arrays.items()}
    group = {"params": [0], "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3}
    inner = {"state": {0: {"step": np.array(7), **flat}}, "param_groups": [group]}
    inner["state"][0].pop("params")
    frozen = {}
    for name, entry in tensor_files.read_folder(LORA.parent).items() if has_frozen else ():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        frozen[f"{module}{'.base_layer' * (f'{module}.lora_A.weight' in held)}.weight"] = tensor(entry)
    adapters = {f"{name.removesuffix('.weight')}.default.weight": a for name, a in held.items()}
    content = {
        "module": {**frozen, **adapters} if stage < 3 else {},
        "param_shapes": [{name: torch_writer.Call("torch.Size", a.shape) for name, a in adapters.items()}],
        "global_steps": 9,
        "skipped_steps": 2,
        "ds_config": {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}},
    }
    if stage > 1 and has_frozen:
        content["frozen_param_shapes"] = {n: torch_writer.Call("torch.Size", a.shape) for n, a in frozen.items()}
        content["frozen_param_fragments"] = {name: a.ravel() for name, a in frozen.items()}
    state = {"partition_count": 1, "single_partition_of_fp32_groups": [flat["params"]], "base_optimizer_state": inner}
    if stage == 3:
        state = {"partition_count": 1, "fp32_flat_groups": [flat["params"]], "optimizer_state_dict": inner}
    tag = folder / "global_step9"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step9")
    rank = "zero_pp_rank_0_" if stage == 3 else ""
    torch_writer.save(tag / f"{rank}mp_rank_00_model_states.pt", content)
    torch_writer.save(tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})
    (folder / "adapter_config.json").write_text((LORA / "adapter_config.json").read_text())
    return arrays


def tensor(entry):
    dims = range(len(entry.shape))
    return tensor_files.read(entry, entry.shape, [slice(0, n) for n in entry.shape], dims, np.float32)


@pytest.mark.parametrize(
    "stage, has_frozen",
    [
        (1, True),
        pytest.param(2, False, marks=pytest.mark.long),
        pytest.param(3, True, marks=pytest.mark.long),
        (3, False),
    ],
)
def test_a_run_of_peft_goes_on_with_its_adapter(call, tmp_path, stage, has_frozen):
    """Weights, moments and counts are the checkpoint's; the model is made of the frozen weights, or named by --model."""
    arrays = peft_checkpoint(tmp_path / "in", stage, has_frozen=has_frozen)
    words = ("--model_config", LORA.parent / "config.json") if has_frozen else ("--model", LORA.parent)
    out = tmp_path / "out"
    status, text, errors = call(tmp_path / "in", "--out", out, *words)
    assert (status, errors) == (0, "") and f"{out / 'run'}: a checkpoint at step 9" in text
    assert (out / "huggingface").exists() == has_frozen
    config = import_deepspeed._config((out / "config.py").read_text())
    own = config.optimizer  # the ds_config has none
    assert (own.learning_rate, own.schedule, own.b1, own.eps) == (0.01, "constant", 0.8, 1e-7)
    assert (own.weight_decay, own.weight_decay_on) == (0.3, "all") and "the rate stays at 0.01" in text
    built = program.build(config, tokenizer_vocab=1)
    saver = checkpointer.Checkpointer(out / "run" / "checkpoints", keep_last=1, keep_best=0)
    state = resume.state(built, saver, 9, saver.meta(9))
    saver.close()
    adam = state.opt_state[0]
    assert int(state.step) == int(adam.count) == 7
    for kind, own in (("params", state.params), ("exp_avg", adam.mu), ("exp_avg_sq", adam.nu)):
        found = dict(tree.flatten(own))
        for tensor_ in built.weights.adapted.opened.tensors.values():
            np.testing.assert_array_equal(
                tensor_.to_theirs(np.asarray(found[tensor_.path])), arrays[kind][tensor_.name]
            )
    kernel = dict(tree.flatten(state.params))["layer_0/attention/q/kernel"]
    name = "model.layers.0.self_attn.q_proj.weight"
    frozen = tensor(tensor_files.read_folder(LORA.parent)[name])
    np.testing.assert_array_equal(np.asarray(kernel).reshape(frozen.T.shape), frozen.T)


def test_what_an_adapters_run_lacks_is_named(call, tmp_path):
    peft_checkpoint(tmp_path / "in", 3, has_frozen=False)
    status, text, _ = call(tmp_path / "in", "--out", tmp_path / "out")
    assert status == 0 and "holds the adapter alone, and its model" in text and "name the model's by --model" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter"]
    other = GOLDEN / "zero2-bf16-world2"
    for words, message in (
        ((tmp_path / "in", "--model", tmp_path), "holds no config.json; name the folder of the adapter's model"),
        ((other, "--adapter", LORA), "the checkpoint holds no adapter of PEFT; leave it out"),
    ):
        status, _, errors = call(*words, "--out", tmp_path / "new")
        assert status == 2 and errors.count("\n") == 1 and message in errors


def test_a_hostile_checkpoint_builds_nothing_and_is_named(call, tmp_path):
    folder = tmp_path / "bad" / "global_step4"
    folder.mkdir(parents=True)
    content = {"module": torch_writer.Call("posix.system", f"touch {tmp_path / 'trace'}")}
    torch_writer.save(folder / "mp_rank_00_model_states.pt", content)
    status, text, errors = call(tmp_path / "bad", "--out", tmp_path / "out")
    assert (status, text, errors.count("\n")) == (
        2,
        "",
        1,
    ) and "mp_rank_00_model_states.pt: names posix.system" in errors
    assert not (tmp_path / "trace").exists() and not (tmp_path / "out").exists()


def test_wrong_arguments_are_one_line(call, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for words, message in (
        ((GOLDEN / "zero2-bf16-world2",), "arguments are required: --out"),
        ((GOLDEN / "zero2-bf16-world2", "--out", tmp_path / "out"), "holds mine; choose a new folder"),
        ((GOLDEN / "zero2-bf16-world2", "--out", tmp_path / "out" / "mine"), "is a file; choose a new folder"),
        (
            (GOLDEN / "zero2-bf16-world2", "--out", tmp_path / "new", "--model_config", tmp_path / "none"),
            "there is no such file",
        ),
    ):
        status, _, errors = call(*words)
        assert status == 2 and errors.count("\n") == 1 and message in errors
