"""Checks a student's steps against all logits of both models. This module tests zerojax.trainer.distilled, teacher and tuning.lessons."""

import json

import divergences_by_numpy
import jax
import numpy as np
import pytest
import runs

from zerojax.data import tokenizer
from zerojax.errors import UserError
from zerojax.trainer import examples, program, results, teacher
from zerojax.trainer import model as model_lib
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import lessons
from zerojax.zero.update import padding

BYTES = tokenizer.load_tokenizer("bytes")
ROUNDING = 2e-5  # the same float32 sums in another order
TASK = {"data__task": "seq2seq", "data__answer": "{label}", "data__answer_len": 4, "seq_len": 16, "global_batch_size": 8}


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [{"text": "ab"[: i % 2 + 1] + str(i), "label": str(i)} for i in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """Returns the export of a model with two layers, whose head is its embedding's size but not its weights."""
    built = program.build(runs.config(model__num_layers=2, seed=5), tokenizer_vocab=320, devices=jax.devices()[:1])
    folder = tmp_path_factory.mktemp("teacher")
    results.export(built, state_lib.first(built), folder, BYTES)
    return folder


def opened(texts_file, teacher_folder, devices=4, **changes):
    with runs.on_devices(devices):
        task = {**TASK, "data__train_file": texts_file, "distill__teacher": str(teacher_folder)}
        config = runs.config(**{**task, **changes})
        found = examples.load(config, *model_lib.family_of(config), BYTES, "")
        built = program.build(config, tokenizer_vocab=BYTES.vocab_size)
        teacher.check_tokenizer(built.weights.teacher, BYTES)
        streams = program.open_feed(built, BYTES, "", found)
        return built, lessons.Lessons(built, BYTES, found, streams)


def logits_of(family, model, params, tokens):
    return np.asarray(jax.jit(lambda params, tokens: family.logits(model, params, {}, tokens))(params, tokens))


def teachers_logits(built, tokens):
    """Returns those of the teacher, on one device."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    own, made = built.weights.teacher, built.weights.teacher.abstract(np.float32)
    made = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), made)
    return logits_of(own.family, own.model, own.read(made), tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "grad_accum": 2, "mesh__replica": 2, "distill__own": 1.0},
        {"zero__stage": 0, "distill__loss": "reverse_kl", "distill__temperature": 2.0, "data__pack": False},
        {"zero__stage": 3, "lora__r": 4, "distill__loss": "jsd", "distill__share": 0.2},
    ],
    ids=["stage 3, own answers", "stage 0, reverse", "LoRA, mixture"],
)
def test_the_loss_is_the_mean_divergence_of_all_logits(texts_file, teacher_folder, cache_dir, changes):
    built, made = opened(texts_file, teacher_folder, **changes)
    state = state_lib.first(built)
    batch = made.next(1, state.params)
    assert made.told == ({"own": 1.0} if "distill__own" in changes else {})
    read = {name: np.asarray(array).reshape(8, -1) for name, array in batch.items() if name != teacher.KEY}
    counts = read["labeled"][:, 1:] > 0
    params = jax.tree.map(np.asarray, padding.unpad({"params": state.params}, built.partition)["params"])
    with runs.on_devices(1):
        logits = []
        for row, tokens in enumerate(read["tokens"][:, :-1]):  # texts of a packed row see themselves alone
            segments = read["segments"][row, :-1] if "segments" in read else np.ones(len(tokens), int)
            own = [np.zeros((len(tokens), built.model.vocab_size))] * 2
            for number in set(segments.tolist()) - {0}:
                at = np.flatnonzero(segments == number)
                found = (
                    logits_of(built.weights.family, built.model, params, tokens[None, at]),
                    teachers_logits(built, tokens[None, at]),
                )
                for place, (whole, part) in enumerate(zip(own, found)):
                    own[place] = whole.copy()
                    own[place][at] = part[0]
            logits.append(own)
    student, other = (np.stack([own[number] for own in logits]) for number in range(2))
    chosen = built.config.distill
    terms = divergences_by_numpy.divergence(chosen.loss, student, other, chosen.share, chosen.temperature)
    _, metrics = built.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], terms[counts].mean(), rtol=ROUNDING)
    for name, scores in (("student_loss", student), ("teacher_loss", other)):
        logs = np.asarray(jax.nn.log_softmax(scores))
        wanted = -np.take_along_axis(logs, read["tokens"][:, 1:, None], axis=-1)[..., 0][counts].mean()
        np.testing.assert_allclose(metrics[name], wanted, rtol=ROUNDING)


def two_steps(texts_file, teacher_folder, devices, **changes):
    """Returns the loss and the gradients' norm of two steps, the second of which has updated weights."""
    built, made = opened(texts_file, teacher_folder, devices, **changes)
    state, found = state_lib.first(built), []
    for step in (1, 2):
        state, metrics = built.train_step(state, made.next(step, state.params))
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.array(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "zero__min_size": 0, "mesh__model": 2},
        {"zero__stage": 3, "offload__optimizer": "host", "offload__params": "host"},
        pytest.param({"zero__stage": 2, "grad_accum": 2, "offload__optimizer": "host"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__programs": "kinds"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "wire__weights": "int8"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__tile_tokens": 8, "zero__indivisible": "pad"}, marks=runs.LONG),
        pytest.param({"zero__stage": 1, "lora__r": 4, "lora__quantize": "nf4"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__preset": "moe_test", "mesh__expert": 2}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__preset": "lfm2_test", "distill__own": 1.0}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__preset": "mamba2_test", "distill__own": 1.0}, marks=runs.LONG),
    ],
    ids=lambda changes: ", ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_steps_are_those_of_one_device_at_stage_0(texts_file, teacher_folder, cache_dir, changes):
    of_mesh = ("zero", "mesh", "offload", "grad", "wire")
    plain = {name: value for name, value in changes.items() if not name.startswith(of_mesh)}
    plain.pop("model__programs", None)
    wanted = two_steps(texts_file, teacher_folder, 1, zero__stage=0, **plain)
    found = two_steps(texts_file, teacher_folder, 4, **changes)
    rounds = "wire__weights" in changes  # weights in 8 bits
    np.testing.assert_allclose(found, wanted, rtol=0.05 if rounds else 1e-4)
    assert wanted[1, 0] < wanted[0, 0] or "distill__own" in changes
