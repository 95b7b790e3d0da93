"""Checks that the loss is one mean over all labels. This module tests zerojax.trainer.examples."""

import json
import shutil

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

import zerojax
from zerojax.data import source, tokenizer
from zerojax.data.pairs import tasks
from zerojax.errors import UserError
from zerojax.trainer import examples, program
from zerojax.trainer import model as model_lib
from zerojax.trainer import state as state_lib
from zerojax.zero.update import padding

BYTES = tokenizer.load_tokenizer("bytes")
ROUNDING = 2e-5  # the same float32 sums in another order
TASK = {"data__name": "short_reviews", "data__task": "classification", "data__answer_len": 12, "seq_len": 96}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reviews")
    source.prepare("short_reviews", folder)
    return folder


def opened(data_dir, **changes):
    return runs.opened(data_dir=data_dir, **{**TASK, "data__eval_split": "validation", **changes})


@pytest.mark.parametrize("pack", [False, True])
def test_rows_have_the_arrays_that_a_program_is_built_for(data_dir, pack):
    config = runs.config(**TASK, data__pack=pack)
    built = program.build(config, tokenizer_vocab=BYTES.vocab_size)
    arrays = examples.load(config, *model_lib.family_of(config), BYTES, data_dir).train.arrays(0)
    declared = {name: (like.shape, like.dtype) for name, like in built.row.items()}
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == declared
    assert ("segments" in arrays) == pack


def plain_loss(loss, params, batches):
    """Returns the mean over all labels of all batches, on one device."""
    rows = [{name: array[i : i + 1] for name, array in batch.items()} for batch in batches for i in range(8)]
    return np.average([loss(params, row) for row in rows], weights=[row["labeled"][:, 1:].sum() for row in rows])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"zero__stage": 0, "data__pack": False}, marks=runs.LONG),
        {"zero__stage": 3, "grad_accum": 2, "mesh__replica": 2, "global_batch_size": 16, "reduce_dtype": "bf16"},
        pytest.param({"zero__stage": 2, "model__preset": "bart_test"}, marks=runs.LONG),
    ],
    ids=["stage 0", "stage 3, packed, two passes", "stage 2, encoder-decoder"],
)
def test_the_loss_and_the_held_out_loss_are_means_over_all_labels(data_dir, cache_dir, changes):
    built, streams, found = opened(data_dir, **changes)
    state = state_lib.first(built)
    params = jax.tree.map(jnp.asarray, jax.device_get(padding.unpad(state, built.partition).params))
    held = program.held_out_loss(built, streams, state.params)
    batch = streams.next()
    arrays = {name: np.asarray(array).reshape(-1, 8, array.shape[-1]) for name, array in batch.items()}
    passes = [{name: array[i] for name, array in arrays.items()} for i in range(built.sizes.grad_accum)]
    counts = [int(one["labeled"][:, 1:].sum()) for one in passes]
    _, metrics = built.train_step(state, batch)
    streams.close()
    assert int(metrics["labels"]) == sum(counts)
    loss = jax.jit(lambda params, batch: built.family.loss(built.model, params, batch))
    np.testing.assert_allclose(metrics["loss"], plain_loss(loss, params, passes), rtol=ROUNDING)
    rows = [found.held_out.arrays(i) for i in range(min(len(found.held_out), built.sizes.global_batch_size))]
    first = [
        {name: np.stack([row[name] for row in rows[at : at + 8]]) for name in rows[0]} for at in range(0, len(rows), 8)
    ]
    np.testing.assert_allclose(held, plain_loss(loss, params, first), rtol=ROUNDING)


def test_epochs_count_the_steps_that_read_all_rows(data_dir):
    changes = {**TASK, "data__pack": False, "global_batch_size": 8}
    config = runs.config(**changes, epochs=2.0, data__eval_split="validation")
    found = examples.load(config, *model_lib.family_of(config), BYTES, data_dir)
    steps = -(-2 * len(found.train) // 8)
    assert examples.with_steps(config, found).length == f"config.epochs=2 ({steps} steps)"
    assert examples.with_steps(runs.config(**changes), found).length == f"config.steps={runs.SMALL['steps']}"


def test_the_form_of_an_imported_model_has_the_folders_tokens():
    folder = runs.ROOT / "tests/golden/huggingface/bart"
    config = runs.config(**TASK, init_from=str(folder), data__tokenizer="bytes", model__num_layers=0)
    form = examples.form(config, *model_lib.family_of(config), BYTES)
    settings = json.loads((folder / "config.json").read_text())
    assert (form.start, form.end) == (settings["decoder_start_token_id"], settings["eos_token_id"])


@pytest.mark.parametrize("name", ["mbart", "bart"])
def test_the_loss_of_a_task_is_that_of_its_labels_in_transformers_form(name, tmp_path):
    """mBART's decoder begins with the last label: its answers end with the token that begins them, as its tokenizer writes a language."""
    folder = tmp_path / name
    shutil.copytree(golden_models.FOLDER / name, folder)
    raw = json.loads((folder / "config.json").read_text()) | {"decoder_start_token_id": 7}
    (folder / "config.json").write_text(json.dumps(raw))
    loaded = zerojax.load_huggingface(folder, stage=0)
    form = examples.form(runs.config(seq_len=16, data__answer_len=8), loaded.family, loaded.folder, BYTES)
    settings = tasks.TaskSettings(tasks.SEQ2SEQ, "{a}", "{b}", (), "", "plain")
    pairs = [{"a": "one two", "b": "3"}, {"a": "four", "b": "5 and more than fits"}]
    found = tasks.encode(pairs, BYTES, settings, form, name="train_file").examples
    targets = [example.targets.tolist() for example in found]
    last = [7] if name == "mbart" else []
    assert targets == [[7, ord("3"), form.end, *last], [7, *b"5 and more"[: 8 - len(last)], *last]]
    for example in found:
        batch = {"inputs": example.inputs, "mask": np.ones_like(example.inputs), "targets": example.targets}
        batch = {
            key: jnp.asarray(array)[None]
            for key, array in {**batch, "labeled": example.labeled.astype(np.int32)}.items()
        }
        given = {"input_ids": example.inputs[None], "labels": example.targets[None, 1:]}
        own = loaded.family.loss(loaded.config, loaded.params, batch)
        np.testing.assert_allclose(own, loaded.loss(loaded.params, given), rtol=ROUNDING)


def test_an_answer_that_a_row_cannot_hold_is_refused():
    with pytest.raises(UserError, match=r"config.data.answer_len: is 40, and a row of a decoder has config.seq_len=32"):
        program.build(runs.config(**{**TASK, "seq_len": 32, "data__answer_len": 40}), tokenizer_vocab=320)
    whole = {"data__task": "embed", "data__name": "short_reviews", "seq_len": 16}  # a text that is read alone
    program.build(runs.config(**whole), tokenizer_vocab=320)
