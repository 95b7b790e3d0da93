"""Checks the sources of a run, from its config to the metrics of its steps. This module tests zerojax.trainer.tuning.mixed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax.data import parts, tokenizer
from zerojax.errors import UserError
from zerojax.trainer import metrics, program, workdir
from zerojax.trainer import settings as settings_lib
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import mixed
from zerojax.zero.update import padding

BYTES = tokenizer.load_tokenizer("bytes")
ROUNDING = 2e-5  # the same float32 sums in another order
PLAIN = {"data__name": "python_stdlib"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name in "ab":
        lines = [{"text": f"{name}{number:02d} " + name * (number % 17)} for number in range(60)]
        runs.write_lines(folder / f"{name}.jsonl", lines)
    pairs = [{"text": f"q{number}", "label": "z" * (1 + number % 5)} for number in range(40)]
    runs.write_lines(folder / "c.jsonl", pairs)
    return folder


def sources(folder, *, task=True):
    texts = tuple({"train_file": str(folder / f"{name}.jsonl"), "weight": 1.0} for name in "ab")
    answers = {
        "train_file": str(folder / "c.jsonl"),
        "task": "seq2seq",
        "title": "answers",
        "eval_file": str(folder / "c.jsonl"),
    }
    return (*texts, answers) if task else texts


def opened(folder, found, **changes):
    config = runs.config(**{**PLAIN, "data__eval_split": "validation", "data__sources": found, **changes})
    built = program.build(config, tokenizer_vocab=BYTES.vocab_size)
    made = mixed.open_mixture(built, BYTES, folder, None)
    return built, program.open_feed(built, BYTES, folder, made)


CASES = {
    "text": ({"zero__stage": 3}, False),
    "columns": ({"zero__stage": 3, "model__by_columns": "embed|head", "model__preset": "moe_test"}, False),
    "answers": ({"zero__stage": 2, "grad_accum": 2, "global_batch_size": 16}, True),
    "context": ({"zero__stage": 3, "mesh__context": 2}, True),
    "model": ({"zero__stage": 3, "mesh__model": 2}, True),
    "pipe": ({"mesh__pipe": 2, "grad_accum": 2, "global_batch_size": 16, "model__num_layers": 2}, True),
}


@pytest.mark.parametrize("case", runs.cases(CASES, long=("text", "context", "model", "pipe", "columns")))
def test_a_step_has_the_loss_of_each_source_and_its_share_of_the_tokens(folder, cache_dir, case):
    changes, has_task = CASES[case]
    built, streams = opened(folder, sources(folder, task=has_task), **changes)
    batch = streams.next()
    streams.close()
    state = state_lib.first(built)
    params = (
        jax.tree.map(jnp.asarray, jax.device_get(padding.unpad(state, built.partition).params))
        if case != "pipe"
        else None
    )
    rows = {name: np.asarray(array).reshape(-1, array.shape[-1]) for name, array in batch.items()}
    numbers = {name: float(value) for name, value in built.train_step(state, batch)[1].items()}
    read, weights = rows["sources"], []
    terms = counts = None
    if params is not None:
        terms = np.asarray(jax.jit(lambda rows: built.family.loss(built.model, params, rows, by_token=True))(rows))
    counts = np.asarray(parts.labeled(rows)) > 0 if has_task else np.ones((len(read), built.config.seq_len), bool)
    for number, title in enumerate(("a", "b", "answers")[: 2 + has_task], 1):
        is_own = read.max(1) == number
        weights.append(counts[is_own].sum())
        np.testing.assert_allclose(numbers[f"share/{title}"], np.sum(read == number) / np.sum(read > 0), rtol=ROUNDING)
        if terms is not None and weights[-1]:
            np.testing.assert_allclose(numbers[f"loss/{title}"], terms[is_own].sum() / weights[-1], rtol=ROUNDING)
    each = [numbers[f"loss/{title}"] for title in ("a", "b", "answers")[: 2 + has_task]]
    np.testing.assert_allclose(np.average(each, weights=weights), numbers["loss"], rtol=ROUNDING)


def test_an_evaluation_of_sources_is_the_mean_over_their_held_out_labels(folder, cache_dir):
    built, streams = opened(folder, sources(folder), evaluate__batches=2)
    state = state_lib.first(built)
    held, again = (program.held_out_loss(built, streams, state.params) for _ in range(2))
    assert held == again and 4 < held < 7, "about the logarithm of the vocabulary"
    streams.close()


def test_the_losses_of_absent_sources_are_left_out():
    numbers = {"loss": 1.0, "loss/a": 2.0, "loss/b": 0.0, "share/a": 1.0, "share/b": 0.0}
    assert metrics.without_absent(numbers) == {"loss": 1.0, "loss/a": 2.0, "share/a": 1.0, "share/b": 0.0}


def test_an_encoder_decoder_reads_one_task_of_all_sources(folder):
    with pytest.raises(
        UserError, match=r"^config\.data\.sources: have the tasks seq2seq and text, whose rows have other arrays"
    ):
        opened(folder, sources(folder), model__preset="t5_test")
    both = ({**sources(folder)[2], "title": "one"}, sources(folder)[2])
    for found in (sources(folder, task=False), both):
        built, streams = opened(folder, found, model__preset="t5_test")
        batch = streams.next()
        assert set(np.unique(batch["sources"])) <= {0, 1, 2} and batch["sources"].shape == batch["inputs"].shape
        assert {name: array.shape for name, array in batch.items()} == {
            name: array.shape for name, array in built.abstract_batch.items()
        }
        streams.close()


def test_what_is_elsewhere_large_or_to_be_skipped_is_read_as_it_is_needed(folder, tmp_path, monkeypatch):
    def streamed(**changes):
        return mixed.is_streamed(runs.config(data__eval_split="", **changes), tmp_path)

    text = {"data__name": "python_stdlib", "data__train_file": str(folder / "a.jsonl")}
    assert not streamed(**text) and not streamed(**text, data__on_bad="skip") and not streamed()
    assert streamed(**text | {"data__train_file": "memory://x/a.jsonl"})
    assert streamed(**text, data__task="seq2seq", data__on_bad="skip")
    assert streamed(**PLAIN, data__sources=sources(folder))
    monkeypatch.setattr(mixed, "STREAMED", 100)
    assert streamed(**text) and not streamed(**text, data__task="seq2seq", epochs=1.0)
    assert not streamed(**text, data__task="dpo", data__answer="{label}")
    before = settings_lib.defaults()
    del before["data"]["sources"]
    workdir.save(tmp_path, before)
    assert not streamed(**text), "an older run goes on with the order of all its documents"


def test_a_single_source_has_the_batches_of_a_run_without_sources(folder, monkeypatch):
    monkeypatch.setattr(mixed, "STREAMED", 100)
    built, streams = opened(
        folder, (), data__train_file=str(folder / "a.jsonl"), data__eval_file="", data__eval_split=""
    )
    batch = streams.next()
    assert set(batch) == {"tokens"} == set(built.abstract_batch)
    streams.close()


GOOD = {"train_file": "a.jsonl"}


@pytest.mark.parametrize("found, line", [
    (({**GOOD, "wieght": 2.0},), r"sources\[0\]\.wieght: unknown key of a source; did you mean 'weight'\?"),
    ((GOOD, {**GOOD, "title": "b", "weight": "2"}), r"sources\[1\]\.weight: must be a number, and is '2'"),
    (({**GOOD, "weight": -1.0},), r"sources\[0\]\.weight: must be a number, or .* weights from 0 to 1e9, and has \(0, -1\.0\)"),
    (({**GOOD, "weight": ((5, 1.0), (5, 2.0))},), r"sources\[0\]\.weight: .* rising steps"),
    (({**GOOD, "weight": ()},), r"sources\[0\]\.weight: .* is empty"),
    (({**GOOD, "weight": ((0, 1.0), (9, 0.0))},), r"sources: no weight is above 0 at step 9"),
    (({**GOOD, "task": "chatt"},), r"sources\[0\]\.task: must be one of .*did you mean 'chat'"),
    (({**GOOD, "task": "dpo"},), r"sources\[0\]\.task: 'dpo' compares answers"),
    (({**GOOD, "text_key": 3},), r"sources\[0\]\.text_key: must be text, and is 3"),
    ((GOOD, GOOD), r"sources\[0\]\.title: 'a' names another source too"),
    (({**GOOD, "title": "a b"},), r"sources\[0\]\.title: 'a b' names metrics"),
    (({"weight": 1.0},), r"sources\[0\]: must name what is read, by \"train_file\" or by \"name\""),
    (({**GOOD, "name": "lm1b"},), r"sources\[0\]: must name what is read"),
    (({**GOOD, "eval_split": "test"},), r"sources\[0\]\.eval_split: held-out examples of a dataset are a split, and of files a file"),
    (({"name": "random"},), r"sources\[0\]\.name: \"random\" is no text"),
    (("a.jsonl",), r"sources\[0\]: must be a table such as"),
])  # fmt: skip
def test_a_wrong_source_is_one_line(found, line):
    with pytest.raises(UserError, match=rf"^config\.data\.{line}"):
        runs.config(**PLAIN, data__sources=found)


@pytest.mark.parametrize("changes, line", [
    ({"data__train_file": "b.jsonl"}, r"^config\.data\.train_file: is 'b\.jsonl', and config\.data\.sources name what is read"),
    ({"data__name": "lm1b"}, r"^config\.data\.name: is 'lm1b'"),
    ({"epochs": 2.0}, r"^config\.epochs: is 2\.0, and sources have no epochs"),
    ({"evaluate__batches": 0}, r"^config\.evaluate\.batches: must be above 0, since sources"),
])  # fmt: skip
def test_what_contradicts_sources_is_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        runs.config(**{**PLAIN, "data__sources": (GOOD,), **changes})


def test_a_source_has_what_the_config_says_of_data_but_for_its_own_keys():
    from zerojax.trainer import config as config_lib

    config = runs.config(
        **PLAIN, data__task="chat", data__messages="turns", data__sources=(GOOD, {"name": "lm1b", "task": "text"})
    )
    first, second = config_lib.sources(config.data)
    assert (first.data.task, first.data.messages, first.title) == ("chat", "turns", "a")
    assert (second.data.task, second.data.name, second.data.train_file, second.title) == ("text", "lm1b", "", "lm1b")
    assert config.data.task == "chat" and config_lib.sources(config.data) == (first, second)
    again = config_lib.from_dict(json.loads(json.dumps(config_lib.to_dict(config))))
    assert again == config, "what a workdir holds reads as the same settings"
    assert mixed.names(config) == ["lm1b"]


def test_a_mixture_that_goes_on_with_other_devices_has_the_losses_of_one_that_never_stopped(
    folder, cache_dir, tmp_path
):
    text = {**PLAIN, "data__sources": sources(folder, task=False), "data__eval_split": ""}
    whole = runs.losses(runs.run(tmp_path / "whole", **text))
    for steps, devices in ((2, 8), (4, 2), (6, 4)):
        runs.run(tmp_path / "parts", devices=devices, **{**text, "steps": steps})
    found = runs.losses(tmp_path / "parts")
    assert list(found) == list(whole) == list(range(1, 7))
    np.testing.assert_allclose(list(found.values()), list(whole.values()), rtol=ROUNDING)
    lines = [line for line in metrics.read(tmp_path / "parts") if "loss" in line]
    assert all({"loss/a", "loss/b", "share/a", "share/b"} <= line.keys() for line in lines)
