"""Checks runs that learn vectors of texts. This module tests zerojax.trainer.embedded and zerojax.inference.texts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax import tree
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import pretrained
from zerojax.trainer import program, results
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import answers as answers_lib
from zerojax.zero.update import padding

ROUNDING = 2e-5  # the same float32 sums in another order
TASK = {
    "data__task": "embed",
    "data__prompt": "{query}",
    "data__answer": "{text}",
    "embedding__negative": "{wrong}",
    "embedding__temperature": 0.2,
    "seq_len": 12,
    "data__answer_len": 12,
    "global_batch_size": 8,
    "evaluate__batches": 0,
    "model__num_layers": 2,
}


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory):
    """Returns a file of 13 queries, so that the last held-out batch is not full."""
    lines = ({"query": f"q{i}", "text": "x" * (i % 3) + str(i), "wrong": f"no{i}"} for i in range(13))
    return runs.write_lines(tmp_path_factory.mktemp("texts") / "texts.jsonl", lines)


def opened(texts_file, devices=4, **changes):
    return runs.opened(devices, **{**TASK, "data__train_file": texts_file, "data__eval_file": texts_file, **changes})


def steps(texts_file, devices, **changes):
    """Returns the loss, the gradients' norm and the held-out loss of two steps."""
    built, streams, _ = opened(texts_file, devices, **changes)
    state, found = state_lib.first(built), []
    for _ in range(2):
        state, metrics = built.train_step(state, streams.next())
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    found.append(program.held_out_loss(built, streams, state.params))
    streams.close()
    return np.array(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "zero__min_size": 0, "mesh__replica": 2, "embedding__pooling": "mean", "lora__r": 4},
        pytest.param({"zero__stage": 1, "embedding__negative": ""}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "mesh__model": 2, "embedding__pooling": "mean"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "offload__optimizer": "host", "offload__params": "host"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__programs": "kinds"}, marks=runs.LONG),
        pytest.param({"zero__stage": 3, "model__preset": "moe_test", "mesh__expert": 2}, marks=runs.LONG),
    ],
    ids=lambda changes: ", ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_negatives_of_all_devices_give_the_steps_of_one_device(texts_file, cache_dir, changes):
    of_mesh = ("zero", "mesh", "offload")
    plain = {name: value for name, value in changes.items() if not name.startswith(of_mesh)}
    plain.pop("model__programs", None)
    wanted = steps(texts_file, 1, zero__stage=0, **plain)
    np.testing.assert_allclose(steps(texts_file, 4, **changes), wanted, rtol=2e-4)


@pytest.mark.parametrize("changes", [{}, pytest.param({"mesh__pipe": 2, "grad_accum": 2}, marks=runs.LONG)], ids=str)
def test_the_loss_is_the_equations_over_texts_read_alone(texts_file, cache_dir, changes):
    built, streams, found = opened(texts_file, 4, **changes)
    state = state_lib.first(built)
    held = built.forward.params(state.params)
    one = jax.tree.map(jnp.asarray, jax.device_get(padding.unpad({"params": held}, built.forward.partition)["params"]))
    assert "head" not in one and built.model.output == "states"
    states = jax.jit(lambda params, tokens: built.family.logits(built.model, params, {}, tokens))

    def vector(example):
        tokens = np.pad(example.inputs, (0, TASK["seq_len"] + 1 - len(example.inputs)))[None]
        last = np.asarray(states(one, tokens))[0, len(example.inputs) - 1]
        return last / np.linalg.norm(last)

    vectors = np.array([[vector(one) for one in texts.examples] for texts in found.train.answers])
    queries, texts = vectors[0], vectors[1:]
    batch = streams.next()
    rows = np.asarray(batch["tokens"]).reshape(8, 3, -1)[:, 0]
    known = [np.pad(e.inputs, (0, rows.shape[1] - len(e.inputs))).tolist() for e in found.train.answers[0].examples]
    read = np.array([known.index(row) for row in rows.tolist()]).reshape(built.sizes.grad_accum, -1)
    terms = []
    for numbers in read:  # a pass has negatives of its own
        scores = queries[numbers] @ texts[:, numbers].reshape(-1, texts.shape[-1]).T / TASK["embedding__temperature"]
        terms += (np.log(np.exp(scores).sum(axis=1)) - np.diag(scores)).tolist()
    _, metrics = built.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], np.mean(terms), rtol=ROUNDING)
    streams.close()


def test_a_run_ends_with_texts_that_are_near_and_its_export_gives_their_vectors(texts_file, cache_dir, tmp_path):
    built, streams, found = opened(texts_file, 2, optimizer__learning_rate=3e-3)
    state = state_lib.first(built)
    for _ in range(40):
        state, metrics = built.train_step(state, streams.next())
    streams.close()
    assert metrics["nearest"] == 1
    results.export(built, state, tmp_path / "export", runs.BYTES)
    raw = json.loads((tmp_path / "export" / "config.json").read_text())
    folder = folder_lib.open_folder(tmp_path / "export")
    assert raw["architectures"] == ["LlamaModel"] and folder.model.output == "states"
    loaded = pretrained.load_huggingface(tmp_path / "export", dtype=jnp.float32)
    embed = loaded.embedder()
    vectors = []
    for texts in found.train.answers:
        ids, mask = answers_lib.padded([one.inputs for one in texts.examples], 13, TASK["seq_len"])
        vectors.append(embed(loaded.params, ids, mask))
        left = [np.stack([np.roll(row, TASK["seq_len"] - own.sum()) for row, own in zip(a, mask)]) for a in (ids, mask)]
        np.testing.assert_allclose(embed(loaded.params, *left), vectors[-1], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), 1, rtol=1e-5)
    queries, texts, _ = vectors
    assert ((queries @ texts.T).argmax(axis=1) == np.arange(13)).mean() > 0.9
    with pytest.raises(UserError, match="generator: the model"):
        loaded.generator(max_new_tokens=1)
    with pytest.raises(UserError, match=r"has no head of next tokens; set --config.data.task=embed"):
        opened(texts_file, data__task="seq2seq", init_from=str(tmp_path / "export"), model__num_layers=0)
    again, streams, _ = opened(texts_file, init_from=str(tmp_path / "export"), model__num_layers=0)
    streams.close()
    first = dict(tree.flatten(state_lib.first(again).params))
    for path, leaf in tree.flatten(state.params):
        np.testing.assert_array_equal(first[path], np.asarray(leaf).astype(jnp.bfloat16), path)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mesh__context": 2}, "config.mesh.context: is 2, and with the task embed"),
        ({"model__preset": "t5_test"}, "config.data.task: is embed, and .*t5_test is no decoder"),
        ({"embedding__pooling": "cls"}, "config.embedding.pooling: must be one of"),
        ({"embedding__negative": "{none}"}, "has no field 'none'"),
        ({"data__prompt": "query"}, "config.data.prompt: 'query' names no field"),
    ],
)
def test_what_does_not_go_with_embeddings_is_refused_in_one_line(texts_file, changes, words):
    with pytest.raises(UserError, match=words) as caught, program.setting_names.of_config():
        opened(texts_file, **changes)
    assert "\n" not in str(caught.value)
