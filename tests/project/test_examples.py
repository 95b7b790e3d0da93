"""Tests that the examples train as plain JAX on one device at every stage, in the memory that the table shows."""

import functools
import importlib.util
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import rough
import runs
import tokenizers
from flax import nnx
from flax.training import train_state

import zerojax
from zerojax.models import family as family_lib
from zerojax.zero import state_bytes

pytestmark = pytest.mark.usefixtures("cache_dir")

FOLDER = pathlib.Path(__file__).parents[2] / "examples"
STAGES, STEPS = (0, 1, 2, 3), 6
# Every stage of one example; of the others the one that shards most.
IN_CI = {("nnx_model", 3), ("own_train_step", 3)}
# float32 sums in another order
LOSS_TOLERANCE = 1e-5
# 8 bits of mantissa, and gradients summed over 8 devices before they are widened
BF16_TOLERANCE = 2e-2
# 10 bits of mantissa
HALF_TOLERANCE = 2**-10
# means over 64 x 16 x 16 float32 values, after STEPS steps of weights that differ in the last bits
STATISTICS_TOLERANCE = 1e-4

# Settings that make each example small. Every weight matrix still divides by 8 devices.
SMALL = {
    "linen_language_model": {"VOCAB": 256, "EMBED": 32, "HEADS": 2, "LAYERS": 1, "LENGTH": 16, "MICRO_BATCH": 8},
    "linen_vision_batch_norm": {"WIDTHS": (16, 32), "SIZE": 8, "BATCH": 32},
    "nnx_model": {"HIDDEN": 64, "LAYERS": 2, "BATCH": 32},
    "own_train_step": {"HIDDEN": 64, "FEATURES": 64, "BATCH": 16},
}


def test_the_notebook_runs_from_its_first_cell_to_its_last_and_each_cell_twice(commands, tmp_path):
    cells = [
        cell for cell in json.loads((FOLDER / "first_steps.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    done = commands.python("\n".join("".join([*cell["source"], "\n"]) * 2 for cell in cells), tmp_path)
    assert (done.status, done.err) == (0, "")
    (first, last), (_, later) = re.findall(r"^loss ([\d.]+) -> ([\d.]+)$", done.out, re.MULTILINE)
    pairs = re.findall(r"^{'next_batch': (\d+)} (\S+) (\S+)$", done.out, re.MULTILINE)
    assert (
        float(last) < 0.1 * float(first) and float(later) < float(last) and [step for step, *_ in pairs] == ["40", "41"]
    )
    for _, here, there in pairs:
        assert float(here) < float(last) and float(there) == pytest.approx(float(here), rel=1e-4)


@functools.cache
def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for constant, value in SMALL.get(name, {}).items():
        assert hasattr(module, constant)
        setattr(module, constant, value)
    return module


@functools.cache
def run(name, stage, steps=STEPS):
    """Returns (losses, state, partition) of a float32 run on 8 devices."""
    return load(name).train(stage, steps, compute_dtype=None)


def cases(names):
    """Returns (example, stage) of the examples at every stage; most of them are long."""
    return [
        pytest.param(name, stage, marks=[] if (name, stage) in IN_CI else runs.LONG)
        for name in names
        for stage in STAGES
    ]


@functools.cache
def run_plain(name):
    """Returns (losses, state) of the same training in plain JAX and optax on one device."""
    return PLAIN[name](load(name))


def plain_linen(example):
    """Steps a TrainState. loss_fn(params, batch, state) returns new values of the state's fields."""
    passes = getattr(example, "GRAD_ACCUM", 1)
    clip = optax.clip_by_global_norm(1.0) if passes > 1 else optax.identity()

    @jax.jit
    def one_pass(state, batch):
        (loss, aux), grads = jax.value_and_grad(example.loss_fn, has_aux=True)(state.params, batch, state)
        return loss, state.replace(**aux["state"]), grads

    state, losses = jax.jit(example.create_state)(jax.random.key(0)), []
    for _, batch in zip(range(STEPS), example.batches()):
        total, all_grads = 0.0, []
        for micro_batch in [batch] if passes == 1 else [jax.tree.map(lambda x: x[i], batch) for i in range(passes)]:  # noqa: B023
            loss, state, grads = one_pass(state, micro_batch)
            total, all_grads = total + float(loss) / passes, [*all_grads, grads]
        grads = jax.tree.map(lambda *g: sum(g) / passes, *all_grads)
        state = state.apply_gradients(grads=clip.update(grads, clip.init(None))[0])
        losses.append(total)
    return losses, state


def plain_nnx(example):
    model, optimizer = nnx.merge(*example.create(jax.random.key(0)))

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(example.loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [float(train_step(model, optimizer, batch)) for _, batch in zip(range(STEPS), example.batches())]
    return losses, nnx.state((model, optimizer))


def plain_own(example):
    state, losses = jax.jit(example.create_state)(jax.random.key(0)), []

    @jax.jit
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(
            lambda params: jnp.mean((state.apply_fn({"params": params}, batch) - batch) ** 2)
        )(state.params)
        return state.apply_gradients(grads=grads), loss

    for step, batch in zip(range(STEPS), example.batches()):
        if step == STEPS // 2:
            state.opt_state[-1].hyperparams["learning_rate"] = jnp.float32(1e-3)
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    return losses, state


PLAIN = {
    "linen_language_model": plain_linen,
    "linen_vision_batch_norm": plain_linen,
    "nnx_model": plain_nnx,
    "own_train_step": plain_own,
}


@pytest.mark.parametrize(("name", "stage"), cases(SMALL))
def test_losses_at_every_stage_are_those_of_plain_jax_on_one_device(name, stage):
    expected, _ = run_plain(name)
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(run(name, stage)[0], expected, rtol=LOSS_TOLERANCE)


@runs.LONG
@pytest.mark.parametrize("model, has_activations", [(2, True), pytest.param(4, False, marks=runs.LONG)])
def test_a_foreign_model_under_a_table_of_overrides_has_the_losses_of_one_device(model, has_activations, monkeypatch):
    example = load("linen_tensor_parallel")
    for name, value in {"EMBED": 32, "MLP": 64, "LENGTH": 16, "LAYERS": 1}.items():
        monkeypatch.setattr(example, name, value)
    if not has_activations:
        monkeypatch.setattr(example, "ACTIVATIONS", ())
    expected = example.train(1, 3, stage=0, devices=jax.devices()[:1])
    found = example.train(model, 3, devices=jax.devices()[: 2 * model])
    np.testing.assert_allclose(found, expected, rtol=LOSS_TOLERANCE)


@runs.LONG
def test_a_foreign_model_on_parts_of_sequences_has_the_losses_of_one_device(monkeypatch, capsys):
    example = load("linen_context_parallel")
    for name, value in {"EMBED": 32, "MLP": 64, "LENGTH": 16, "LAYERS": 1}.items():
        monkeypatch.setattr(example, name, value)
    expected = example.train(1, 3, stage=0, devices=jax.devices()[:1])
    np.testing.assert_allclose(example.train(4, 3), expected, rtol=LOSS_TOLERANCE)
    assert not capsys.readouterr().out


@runs.LONG
def test_a_foreign_models_experts_on_four_devices_have_the_losses_of_one_device(monkeypatch):
    example = load("linen_experts")
    for name, value in {"EMBED": 32, "WIDTH": 32, "LENGTH": 8, "LAYERS": 1}.items():
        monkeypatch.setattr(example, name, value)
    expected = example.train(1, 3, stage=0, devices=jax.devices()[:1])
    np.testing.assert_allclose(example.train(4, 3), expected, rtol=LOSS_TOLERANCE)


@pytest.mark.parametrize("name", ["gemma", "bonsai", "haiku"])
def test_decoders_of_others_train_in_two_lines_with_the_losses_of_one_device(name, monkeypatch):
    pytest.importorskip("haiku" if name == "haiku" else "flax")
    example = load("foreign_decoders")
    for constant, value in {"EMBED": 32, "HIDDEN": 32, "LENGTH": 8, "LAYERS": 1, "VOCAB": 64}.items():
        monkeypatch.setattr(example, constant, value)
    expected, _ = example.train(name, 3, stage=0, devices=jax.devices()[:1])
    np.testing.assert_allclose(example.train(name, 3)[0], expected, rtol=LOSS_TOLERANCE)


def test_a_checkpoint_of_another_package_is_read_into_its_shards(tmp_path):
    example, mesh = load("foreign_decoders"), zerojax.make_mesh()
    create_state, _, _ = example.own_code("gemma")
    params = create_state(jax.random.key(1)).params
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "gemma", params)
    state, partition = example.load(str(tmp_path / "gemma"), "gemma", mesh)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert (
        state_bytes.measured_bytes(state, jax.devices()[0])
        == sum(count for role, count in state_bytes.bytes_per_device(partition).items() if role != "gradients")
        < 3 * whole / 4
    )


def test_a_vision_transformer_on_tensorflow_datasets_has_the_losses_of_one_device(tmp_path, monkeypatch):
    example = load("vit_tensorflow_datasets")
    for name, value in {"WIDTH": 32, "LAYERS": 2, "BATCH": 16, "IMAGES": 64}.items():
        monkeypatch.setattr(example, name, value)
    expected, _ = example.train(3, str(tmp_path), stage=0, devices=jax.devices()[:1])
    found, _ = example.train(3, str(tmp_path))
    np.testing.assert_allclose(found, expected, rtol=LOSS_TOLERANCE)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_a_robot_policy_of_two_experts_has_the_losses_of_one_device(lora, monkeypatch):
    example = load("robot_policy")
    for name, value in {"WIDTHS": (16, 8), "HIDDEN": (64, 32), "HEADS": 2, "HEAD": 8, "LAYERS": 2, "BATCH": 16}.items():
        monkeypatch.setattr(example, name, value)
    expected, _ = example.train(3, lora, stage=0, devices=jax.devices()[:1])
    found, _ = example.train(3, lora)
    np.testing.assert_allclose(found, expected, rtol=LOSS_TOLERANCE)
    assert found[-1] < found[0]
    if lora:
        assert re.fullmatch(
            r"stage 3: peak \S+ KiB on each device; .* unknown", example.plan(zerojax.make_mesh(), lora)
        )


def test_a_diffusion_transformer_of_equinox_has_the_losses_of_one_device(monkeypatch):
    pytest.importorskip("equinox")
    example = load("equinox_diffusion")
    for name, value in {"WIDTH": 32, "LAYERS": 2, "PATCHES": 4, "BATCH": 16}.items():
        monkeypatch.setattr(example, name, value)
    expected, _ = example.train(3, stage=0, devices=jax.devices()[:1])
    found, _ = example.train(3)
    np.testing.assert_allclose(found, expected, rtol=LOSS_TOLERANCE)


@runs.LONG
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_foreign_model_over_a_pipeline_has_the_losses_of_one_device(monkeypatch, schedule):
    example = load("linen_pipeline")
    for name, value in {"EMBED": 32, "MLP": 64, "LENGTH": 8}.items():
        monkeypatch.setattr(example, name, value)
    expected = example.train(1, 3, stage=0, devices=jax.devices()[:1])
    found = example.train(2, 3, schedule, devices=jax.devices()[:4])
    np.testing.assert_allclose(found, expected, rtol=LOSS_TOLERANCE)


@pytest.mark.parametrize(
    "name", runs.cases(SMALL, long=["linen_language_model", "linen_vision_batch_norm", "own_train_step"])
)
def test_persistent_bytes_fall_with_the_stage_as_in_the_table(name):
    measured = {}
    for stage in STAGES:  # a state that was never stepped is placed as one that was
        _, state, partition = run(name, stage) if (name, stage) in IN_CI else run(name, stage, 0)
        said = state_bytes.bytes_per_device(partition)
        measured[stage] = state_bytes.measured_bytes(state, jax.devices()[0])
        assert measured[stage] == sum(said.values()) - said["gradients"]
        assert said["params"] < said["gradients"] * 8 if stage < 2 else said["params"] >= said["gradients"]
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert stage > 0 or measured[0] == whole
    assert measured[0] > measured[1] == measured[2] > measured[3]
    assert measured[3] < measured[0] / 4  # an eighth, and the small replicated leaves


@pytest.mark.parametrize(("name", "stage"), cases(["linen_vision_batch_norm"]))
def test_linen_batch_statistics_are_those_of_one_device(name, stage):
    _, plain = run_plain(name)
    assert_close(run(name, stage)[1].batch_stats, plain.batch_stats)


@pytest.mark.parametrize("stage", runs.cases(STAGES, long=STAGES[:-1]))
def test_nnx_batch_statistics_and_dropout_counts_are_those_of_one_device(stage):
    _, plain = run_plain("nnx_model")
    state = run("nnx_model", stage)[1]
    assert_close(nnx.filter_state(state, nnx.BatchStat), nnx.filter_state(plain, nnx.BatchStat))
    counts = jax.tree.leaves(nnx.filter_state(state, nnx.RngCount))
    assert counts and all(int(count) == STEPS * SMALL["nnx_model"]["LAYERS"] for count in counts)


def assert_close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=STATISTICS_TOLERANCE, atol=STATISTICS_TOLERANCE)


@pytest.mark.parametrize(
    "name",
    runs.cases(
        ["linen_language_model", "linen_vision_batch_norm", "nnx_model"],
        long=["linen_language_model", "linen_vision_batch_norm"],
    ),
)
def test_bf16_compute_keeps_float32_state_and_about_the_losses(name):
    losses, state, _ = load(name).train(3, 4, compute_dtype="bfloat16")
    np.testing.assert_allclose(losses, run(name, 3)[0][:4], rtol=BF16_TOLERANCE)
    floating = [leaf.dtype for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert set(floating) == {jnp.dtype("float32")}


def label_by_rank(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


# Those of which test_any_optimizer has none.
TRANSFORMATIONS = {
    "mask": optax.adamw(1e-2, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-2, momentum=0.9)}, label_by_rank
    ),
    "frozen": optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.set_to_zero()}, label_by_rank),
    "finite": optax.apply_if_finite(optax.lamb(1e-2), 3),
    "averaging": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}


def autoencoder_state(key, tx):
    example = load("own_train_step")
    model = example.Autoencoder()
    params = model.init(key, jnp.zeros((1, example.FEATURES)))["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def reconstruction_loss(params, batch, state):
    return jnp.mean((state.apply_fn({"params": params}, batch) - batch) ** 2)


@runs.LONG
@pytest.mark.parametrize("name", runs.cases(TRANSFORMATIONS, long=["averaging", "finite", "mask", "multi_transform"]))
def test_any_optax_transformation_trains_at_stage_3_as_on_one_device(name):
    example, tx = load("own_train_step"), TRANSFORMATIONS[name]
    plain = autoencoder_state(jax.random.key(0), tx)
    state, partition = zerojax.shard_train_state(plain, mesh=zerojax.make_mesh(), stage=3, min_size=32)
    train_step = zerojax.make_train_step(reconstruction_loss, partition)

    @jax.jit
    def one_device(plain, batch):
        loss, grads = jax.value_and_grad(reconstruction_loss)(plain.params, batch, plain)
        return plain.apply_gradients(grads=grads), loss

    for _, batch in zip(range(4), example.batches()):
        plain, expected = one_device(plain, batch)
        state, metrics = train_step(state, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=LOSS_TOLERANCE)
    split = [leaf for leaf in partition.leaves.values() if leaf.role == "opt_state" and "data" in leaf.spec]
    assert len(split) >= 6  # as many as there are kernels


class AveragedState(train_state.TrainState):
    average: dict


@runs.LONG
def test_a_concrete_state_with_aliased_leaves_trains_and_the_callers_copy_stays_valid():
    plain = autoencoder_state(jax.random.key(0), optax.adam(1e-3)).replace(step=jnp.int32(0))
    aliased = AveragedState(**vars(plain), average=plain.params)
    for stage in (0, 3):
        state, partition = zerojax.shard_train_state(aliased, mesh=zerojax.make_mesh(), stage=stage)
        buffers = [
            leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in jax.tree.leaves((aliased, state))
        ]
        assert len(set(buffers)) == len(buffers) - len(
            jax.tree.leaves(plain.params)
        )  # else the step aborts the process
        batch = next(load("own_train_step").batches())
        state, _ = zerojax.make_train_step(reconstruction_loss, partition)(state, batch)
        assert not np.array_equal(state.params["code"]["kernel"], state.average["code"]["kernel"])
    assert np.array_equal(state.average["code"]["kernel"], plain.params["code"]["kernel"])


def test_init_functions_take_settings_beside_arrays_and_may_make_their_own_optimizer():
    def init(key, width, names):
        model = nn.Dense(width, name=names["module"])
        params = model.init(key, jnp.zeros((1, 64)))["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    settings = (jax.random.key(0), 128, {"module": "dense"})
    state, _ = zerojax.shard_train_state(init, *settings, mesh=zerojax.make_mesh(), stage=3)
    np.testing.assert_array_equal(state.params["kernel"], init(*settings).params["kernel"])


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.encoder = nnx.Linear(64, 64, rngs=rngs)
        self.decoder = self.encoder


def test_nnx_modules_that_share_a_variable_need_nnx_split_which_keeps_them_tied():
    def create(key):
        return Tied(nnx.Rngs(key))

    mesh = zerojax.make_mesh()
    with pytest.raises(zerojax.UserError, match=r"decoder/bias and encoder/bias are one nnx.Variable"):
        zerojax.shard_train_state(create, jax.random.key(0), mesh=mesh)
    (graph, state), partition = zerojax.shard_train_state(lambda k: nnx.split(create(k)), jax.random.key(0), mesh=mesh)
    model = nnx.merge(graph, state)
    assert model.encoder is model.decoder and len(partition.leaves) == 2


def test_weights_of_another_model_are_refused_where_used():
    _, _, partition = run("own_train_step", 3)
    loss_fn = zerojax.where_used(lambda params: jnp.sum(params["code"]["kernel"]), partition.placements)
    with pytest.raises(
        zerojax.UserError, match=r"code/kernel: has shape \(8, 8\), and the weight stored as params/code"
    ):
        loss_fn({"code": {"kernel": jnp.zeros((8, 8))}})


@runs.LONG  # tests/mission fine-tunes a folder, exports it and generates from it
def test_the_example_of_fine_tuning_learns_to_count_and_saves_what_it_learnt(tmp_path):
    example = runpy.run_path(str(FOLDER / "fine_tune_huggingface.py"))
    example["write_tiny_model"](tmp_path / "model")
    losses, rows = example["train"](tmp_path / "model", tmp_path / "out", 3, 60)
    assert losses[-1] < 0.1 * losses[0]
    assert rows.shape == (2, example["LENGTH"]) and (np.diff(rows) % 64 == 3).all()
    saved = zerojax.load_huggingface(tmp_path / "out", stage=0)
    batch = next(example["batches"](64))
    assert jax.jit(saved.loss)(saved.params, batch) < 0.2 * losses[0]


def test_the_example_of_a_deepspeed_config_trains_as_the_config_says(capsys):
    example = load("deepspeed_config")
    losses = example.train(example.CONFIG, 12)
    assert losses[-1] < 0.8 * losses[0]
    assert "zero_optimization.stage: taken; config.zero.stage = 3" in capsys.readouterr().out


def test_deepspeeds_introduction_says_what_a_config_lacks_and_which_keys_nothing_reads(capsys):
    example = load("deepspeed_intro")
    with pytest.raises(zerojax.UserError, match="no optimizer or no batch size"):
        example.train({"train_batch_size": 8, "zero_optimisation": {"stage": 2}})
    assert "did you mean zero_optimization.stage?" in capsys.readouterr().out


@runs.LONG  # tests/mission trains it in float16 with offload, and tests/zero/offload/test_step_by_block.py has such steps
def test_deepspeeds_introduction_takes_offloaded_params_and_accumulation():
    example = load("deepspeed_intro")
    cpu = {"device": "cpu"}
    expected, *_ = example.train(example.CONFIG, steps=2)
    zero = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    found, _, partition = example.train({**example.CONFIG, "zero_optimization": zero}, steps=2)
    passes, *_ = example.train({**example.CONFIG, "train_micro_batch_size_per_gpu": 4}, steps=2)
    np.testing.assert_allclose([found, passes], [expected] * 2, rtol=HALF_TOLERANCE)
    assert "params/Dense_0/kernel" in partition.on_host


@runs.LONG
def test_a_restored_example_goes_on_as_if_it_had_not_stopped(tmp_path):
    """At stage 1 on 6 devices after stage 3 on 8, with other padding."""
    example = load("save_and_restore")
    whole = example.begin(tmp_path / "whole", 4)
    losses = example.begin(tmp_path / "parts", 2)
    losses += example.go_on(tmp_path / "parts", 4, devices=jax.devices()[:6])
    np.testing.assert_allclose(losses, whole, rtol=LOSS_TOLERANCE)


MAIN = """
import importlib.util
spec = importlib.util.spec_from_file_location("example", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
vars(module).update({sizes})
sys.argv[1:] = ["--steps", "2"]
module.main()
"""


@pytest.mark.slow
# Tests above train the others in this process.
@pytest.mark.parametrize(
    "name", runs.cases([*SMALL, "save_and_restore"], long={*SMALL, "save_and_restore"} - {"linen_vision_batch_norm"})
)
def test_the_main_function_of_a_small_example_prints_its_memory_and_its_losses(commands, name):
    done = commands.python(MAIN.format(path=str(FOLDER / f"{name}.py"), sizes=SMALL.get(name, {})))
    assert done.status == 0, done.err
    assert "stage 3 on 8 devices:" in done.out and re.search("loss:? ", done.out)
    assert name in SMALL or "stage 1 on 6 devices: loss" in done.out


@pytest.mark.slow
@runs.LONG  # the test above runs its main function, and tests/project/test_readme.py runs commands and programs
@pytest.mark.parametrize("name", [*SMALL, "save_and_restore"])
def test_an_example_runs_as_a_command(name):
    environ = {**os.environ, "XLA_FLAGS": rough.XLA_FLAGS, "PYTHONPATH": str(FOLDER.parent)}
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr
    assert "stage 3 on 8 devices:" in done.stdout and re.search("loss:? ", done.stdout)


def test_labels_of_the_peft_example_are_the_answer_and_its_end_and_all_rows_have_one_form():
    example = load("lora_seq2seq")
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER.parent / "configs" / "short_reviews" / "tokenizer.json"))
    loaded = types.SimpleNamespace(special=family_lib.SpecialTokens(stops=(1,), start=0))
    data = example.preprocess(
        [("The soup is awful.", "negative"), ("This book was good.", "positive")], tokenizer, loaded, 8
    )
    assert {name: array.shape[1] for name, array in data.items()} == {
        "inputs": 8,
        "mask": 8,
        "targets": 5,
        "labeled": 5,
    }
    for row, text in enumerate(("The soup is awful.", "This book was good.")):
        assert tokenizer.decode(data["inputs"][row][data["mask"][row] > 0]) == text
        assert tokenizer.decode(data["targets"][row][data["labeled"][row] > 0]) == (" waste", " pleasure")[row]
        assert data["targets"][row][data["labeled"][row] > 0][-1] == 1 and not data["labeled"][row, 0]
    assert [len(batch["inputs"]) for batch in example.batches(data, 1, np.array([1, 0]))] == [1, 1]
