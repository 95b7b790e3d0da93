"""Checks DPO against its equation on one device. This module tests zerojax.trainer.preferences."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import preferences_by_numpy
import pytest
import runs

from zerojax import tree
from zerojax.errors import UserError
from zerojax.inference.engine import engine
from zerojax.interop import folder as folder_lib
from zerojax.interop import peft, pretrained
from zerojax.lora import settings
from zerojax.models.llama import model as llama_model
from zerojax.ops import preferences
from zerojax.trainer import program, results
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import answers as answers_lib
from zerojax.trainer.tuning import reference
from zerojax.zero import state_bytes
from zerojax.zero.update import padding

ROUNDING = 2e-5  # the same float32 sums in another order
BETA = 0.3
TASK = {
    "data__task": "dpo",
    "data__answer": "{chosen}",
    "data__answer_len": 8,
    "seq_len": 48,
    "dpo__beta": BETA,
    "evaluate__batches": 0,
    "global_batch_size": 8,
}


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory):
    """Returns a file of 13 pairs of several lengths, so that the last batch is not full. Each third one is a conversation."""
    words = [{"text": "x" * (i % 5 + 1), "chosen": f"y{i}", "rejected": "no" * (i % 3 + 1)} for i in range(13)]
    for word in words[::3]:
        word["text"] = [{"role": "user", "content": word["text"]}]
        word["chosen"] = [{"role": "assistant", "content": word["chosen"]}]
    return runs.write_lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", words)


def opened(pairs_file, **changes):
    return runs.opened(**{**TASK, "data__train_file": pairs_file, "data__eval_file": pairs_file, **changes})


def plain_log_probs(built, params, pairs):
    """Returns float32[pairs, answers] by all logits of one answer after the other."""

    is_pair = built.family.is_encoder_decoder

    @jax.jit
    def summed(params, inputs, tokens, labeled):
        logits = built.family.logits(built.model, params, inputs, tokens[:, :-1])
        terms = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[0, :, 0]
        return jnp.sum(terms * labeled[1:])

    def of_answer(example):
        tokens = example.targets if is_pair else example.inputs
        after = (0, TASK["seq_len"] - len(tokens))  # what follows changes nothing: one program serves all
        inputs = {"inputs": example.inputs[None]} if is_pair else {}
        return float(summed(params, inputs, np.pad(tokens, after)[None], np.pad(example.labeled, after)))

    return np.array(
        [[of_answer(answers.examples[number]) for answers in pairs.answers] for number in range(len(pairs))]
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "grad_accum": 2, "mesh__replica": 2, "global_batch_size": 16, "lora__r": 4},
        {"zero__stage": 2, "dpo__loss": "kto", "dpo__undesirable": 1.5},
        pytest.param({"zero__stage": 0}, marks=runs.LONG),
        pytest.param({"zero__stage": 1, "model__preset": "bart_test", "dpo__loss": "kto"}, marks=runs.LONG),
        pytest.param(
            {"zero__stage": 3, "grad_accum": 2, "global_batch_size": 16, "dpo__loss": "orpo"}, marks=runs.LONG
        ),
        pytest.param({"zero__stage": 3, "dpo__loss": "simpo"}, marks=runs.LONG),
        pytest.param({"zero__stage": 2, "model__preset": "bart_test"}, marks=runs.LONG),
        pytest.param({"zero__stage": 1, "mesh__model": 2, "model__preset": "t5_test"}, marks=runs.LONG),
        pytest.param({"mesh__pipe": 2, "model__num_layers": 2, "grad_accum": 2}, marks=runs.LONG),
        pytest.param({"offload__optimizer": "host", "offload__params": "host"}, marks=runs.LONG),
    ],
    ids=[
        "stage 3, LoRA, two passes",
        "KTO",
        "stage 0",
        "KTO, BART",
        "ORPO, two passes",
        "SimPO",
        "stage 2, BART",
        "T5, tensor parallel",
        "pipeline",
        "offload",
    ],
)
def test_the_loss_is_the_equations_mean_over_all_pairs(pairs_file, cache_dir, tmp_path, changes):
    built, streams, found = opened(pairs_file, **changes)
    state = state_lib.first(built)
    held = built.forward.params(state.params)
    one = jax.tree.map(jnp.asarray, jax.device_get(padding.unpad({"params": held}, built.forward.partition)["params"]))
    own = plain_log_probs(built, one, found.train)
    reference.make(built, found, state.params, tmp_path)
    np.testing.assert_allclose(found.train.reference, own, rtol=ROUNDING)

    drawn = np.random.default_rng(0).normal(size=own.shape).astype(np.float32)
    for split in (found.train, found.held_out):
        split.reference[:] += drawn
    chosen, size = built.config.dpo, built.sizes.global_batch_size
    fields = {name: getattr(chosen, name) for name in preferences.READS[chosen.loss]}
    labels = [[one.labeled.sum() for one in answers.examples] for answers in found.train.answers]
    arrays = own, found.train.reference, np.stack(labels, axis=1)

    def terms(numbers):
        return preferences_by_numpy.losses(chosen.loss, *(array[numbers] for array in arrays), **fields)

    wanted = np.concatenate([terms(slice(at, at + size)) for at in range(0, len(own), size)]).mean()
    np.testing.assert_allclose(program.held_out_loss(built, streams, state.params), wanted, rtol=ROUNDING)

    batch = streams.next()
    bits = np.asarray(batch["reference"]).reshape(size, -1).view(np.float32)
    read = [int(np.abs(found.train.reference - row).sum(axis=1).argmin()) for row in bits]
    _, metrics = built.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], terms(read).mean(), rtol=ROUNDING)
    if preferences.LOSSES[chosen.loss].has_reference:
        margins = BETA * (-drawn @ ([1, -1, 0][: drawn.shape[1]]))
        np.testing.assert_allclose(metrics["reward_margin"], margins[read].mean(), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(metrics["reward_accuracy"], (margins[read] > 0).mean(), rtol=ROUNDING)
    streams.close()


VALUES = {"data__task": "reward", "model__num_layers": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "zero__stage": 3,
            "zero__min_size": 0,
            "grad_accum": 2,
            "mesh__replica": 2,
            "global_batch_size": 16,
            "lora__r": 4,
        },
        {"zero__stage": 0},
        pytest.param({"zero__stage": 3, "offload__optimizer": "host", "offload__params": "host"}, marks=runs.LONG),
        pytest.param({"zero__stage": 2, "mesh__model": 2}, marks=runs.LONG),
        pytest.param({"mesh__pipe": 2, "grad_accum": 2}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__programs": "kinds"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__preset": "moe_test", "mesh__expert": 2}, marks=runs.LONG),
    ],
    ids=lambda changes: ", ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_a_reward_is_the_head_of_the_last_tokens_state_and_the_loss_that_of_pairs(pairs_file, cache_dir, changes):
    """The value is the state before the head, of each text alone, times the head; in it no padding is."""
    built, streams, found = opened(pairs_file, **{**VALUES, **changes})
    state = state_lib.first(built)
    held = built.forward.params(state.params)
    one = jax.tree.map(jnp.asarray, jax.device_get(padding.unpad({"params": held}, built.forward.partition)["params"]))
    assert one["score"]["kernel"].shape == (built.model.embed_dim, 1) and "head" not in one
    plain = dataclasses.replace(built.model, output="tokens", tie_embeddings=True)

    @jax.jit
    def state_at(params, tokens, length):
        own = lambda net, tokens: net.hidden(tokens)  # noqa: E731
        return llama_model.Llama(plain).apply({"params": params}, tokens, method=own)[0, length - 1]

    def value(example):
        tokens = np.pad(example.inputs, (0, TASK["seq_len"] + 1 - len(example.inputs)))[None]
        return float(state_at(one, tokens, len(example.inputs)) @ one["score"]["kernel"][:, 0])

    values = np.array([[value(one) for one in answers.examples] for answers in found.train.answers]).T
    wanted = np.log1p(np.exp(values[:, 1] - values[:, 0]))
    np.testing.assert_allclose(program.held_out_loss(built, streams, state.params), wanted.mean(), rtol=ROUNDING)
    batch = streams.next()
    size = built.sizes.global_batch_size
    texts = np.asarray(batch["tokens"]).reshape(size, 2, -1)[:, 0]
    known = [
        np.pad(one.inputs, (0, texts.shape[1] - len(one.inputs))).tolist() for one in found.train.answers[0].examples
    ]
    read = [known.index(text) for text in texts.tolist()]
    state, metrics = built.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], wanted[read].mean(), rtol=ROUNDING)
    margins = values[:, 0] - values[:, 1]
    np.testing.assert_allclose(metrics["reward_margin"], margins[read].mean(), rtol=1e-3, atol=1e-5)
    losses = [float(metrics["loss"])]
    for _ in range(3):
        state, metrics = built.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    streams.close()


def test_a_reward_model_is_written_and_read_as_a_class_of_transformers(pairs_file, cache_dir, tmp_path):
    built, streams, _ = opened(pairs_file, **VALUES, model__preset="test")
    streams.close()
    state = state_lib.first(built)
    results.export(built, state, tmp_path / "export", runs.BYTES)
    raw = json.loads((tmp_path / "export" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForSequenceClassification"] and raw["id2label"] == {"0": "LABEL_0"}
    imported = {"init_from": str(tmp_path / "export"), "model__num_layers": 0}
    folder = folder_lib.open_folder(tmp_path / "export")
    assert folder.model.output == "value" and {"score.weight"} == {
        name for name in folder.entries if "model." not in name
    }
    chosen = peft.choose(settings.Lora(target_modules="all-linear"), folder.family, folder.model)
    assert chosen.saved == ("score/kernel",) and "score" not in chosen.adapted
    again, streams, found = opened(pairs_file, **imported, data__task="reward")
    streams.close()
    first = dict(tree.flatten(state_lib.first(again).params))
    for path, leaf in tree.flatten(state.params):
        np.testing.assert_array_equal(first[path], np.asarray(leaf).astype(jnp.bfloat16), path)
    loaded = pretrained.load_huggingface(tmp_path / "export", dtype=jnp.float32)
    texts = [one.inputs for one in found.train.answers[0].examples[:3]]
    ids, mask = answers_lib.padded(texts, 3, max(map(len, texts)))
    scores = loaded.classifier()(loaded.params, ids, mask)
    assert scores.shape == (3, 1)
    for text, score in zip(texts, scores):  # alone, and with padding before it
        np.testing.assert_allclose(loaded.apply(loaded.params, {"input_ids": text[None]}), score[None], rtol=1e-4)
        left = np.pad(text, (3, 0))[None], np.pad(np.ones(len(text), int), (3, 0))[None]
        own = loaded.apply(loaded.params, dict(zip(("input_ids", "attention_mask"), left)))
        np.testing.assert_allclose(own, score[None], rtol=1e-4)
    for what in (lambda: loaded.generator(max_new_tokens=2), lambda: engine.Engine(loaded, loaded.params)):
        with pytest.raises(UserError, match="is a classifier"):
            what()
    with pytest.raises(UserError, match=r"config.data.task: is dpo, and .* gives texts values"):
        opened(pairs_file, **imported)
    (tmp_path / "export" / "config.json").write_text(json.dumps(raw | {"id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(UserError, match="id2label: must be one label"):
        folder_lib.open_folder(tmp_path / "export")


@pytest.mark.parametrize("changes", [{"lora__r": 4}, {}], ids=["LoRA", "all weights"])
def test_the_reference_costs_no_copy_of_the_weights(pairs_file, changes):
    built = [opened(pairs_file, data__task=task, **changes)[0] for task in ("dpo", "seq2seq")]
    dpo, alone = (state_bytes.bytes_per_device(one.partition) for one in built)
    assert dpo == alone


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mesh__context": 2}, "config.mesh.context: is 2"),
        ({"precision": "fp8"}, "config.precision: is 'fp8'"),
        ({"model__by_columns": "head"}, "config.model.by_columns: is 'head'"),
        ({"data__rejected": "{chosen}"}, "config.data.rejected: is '{chosen}', as config.data.answer"),
        ({"data__rejected": "none"}, "config.data.rejected: 'none' names no field"),
        ({"data__rejected": "{other}"}, "config.data.rejected|has no field 'other'"),
        (
            {**{"data__task": "reward"}, "model__preset": "t5_test"},
            "config.data.task: is reward, and .*t5_test is no decoder",
        ),
        ({**{"data__task": "reward"}, "mesh__context": 2}, "config.mesh.context: is 2"),
        ({"model__preset": "bert_test"}, "config.data.task: is dpo, and config.model.preset=bert_test is a classifier"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(pairs_file, changes, words):
    with pytest.raises(UserError, match=words) as caught, program.setting_names.of_config():
        opened(pairs_file, **changes)
    assert "\n" not in str(caught.value)
