"""Checks the output of a run and its order. This module tests zerojax.trainer.loop."""

import collections
import dataclasses
import gc
import json
import pathlib
import re
import statistics

import ml_dtypes
import numpy as np
import pytest
import runs
import safetensors

from zerojax import display, roles
from zerojax.checkpoint import checkpointer
from zerojax.checkpoint import files as step_files
from zerojax.data import tokenizer
from zerojax.trainer import loop, metrics, program, recorder, timing
from zerojax.trainer import state as state_lib
from zerojax.zero import state_bytes

SUM_ORDER = 1e-5  # relative: the same float32 sums, taken in another order
MEAN_ORDER = 1e-6  # relative: the same per-token losses, averaged in another order

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.fixture(scope="module")
def finished(cache_dir, stdlib_dir, tmp_path_factory):
    """Returns the folder and the settings of a run over text that evaluates, saves, samples and exports."""
    changes = {
        "data__name": "python_stdlib",
        "data__dir": str(stdlib_dir),
        "steps": 32,
        "evaluate__every": 8,
        **runs.EVALUATED,
        "checkpoint__every": 8,
        "checkpoint__keep_best": 0,
        "sample__length": 8,
        "export__format": "huggingface",
    }
    return runs.run(tmp_path_factory.mktemp("finished"), draws=True, **changes), changes


def opened(folder: pathlib.Path, **changes):
    """Returns the program and the streams, as train.train makes them."""
    bytes_of_text = tokenizer.load_tokenizer("bytes")
    built = program.build(runs.config(**changes), tokenizer_vocab=bytes_of_text.vocab_size)
    return built, program.open_feed(built, bytes_of_text, folder)


def test_a_byte_model_learns_from_the_standard_library_within_30_steps(finished):
    losses = list(runs.losses(finished[0]).values())
    assert losses[0] == pytest.approx(np.log(320), abs=0.1)  # the first loss is that of a uniform guess
    assert np.mean(losses[-4:]) < losses[0] - 2
    assert runs.evaluations(finished[0])[-1][1] < losses[0] - 2  # held-out text too


def test_every_step_has_a_line_with_the_promised_fields(finished):
    lines = [line for line in metrics.read(finished[0]) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 33))
    lately = collections.deque(maxlen=recorder.LATELY)
    for line in lines:
        lately.append(line["step_seconds"])
        fields = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds", "host_seconds"}
        assert fields <= line.keys()
        assert line["host_seconds"] > 0
        assert line["tokens_per_second"] == pytest.approx(8 * 32 / statistics.median(lately))
    assert [step for step, _ in runs.evaluations(finished[0])] == [8, 16, 24, 32]


def test_the_folder_holds_config_curves_events_and_the_last_checkpoints(finished):
    folder, changes = finished
    saved = json.loads((folder / "config.json").read_text())
    assert saved["data"]["dir"] == changes["data__dir"] and saved["steps"] == 32
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert (events := list((folder / "tensorboard").iterdir())) and events[0].stat().st_size > 1000
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) == [24, 32]


def test_the_export_holds_the_last_checkpoints_weights_in_bfloat16(finished):
    folder, changes = finished
    built = program.build(runs.config(**changes), tokenizer_vocab=320)
    saver = checkpointer.Checkpointer(folder / "checkpoints", keep_last=2, keep_best=0)
    state, _ = saver.restore(32, built.logical_abstract_state)
    saver.close()
    assert json.loads((folder / "export" / "config.json").read_text())["model_type"] == "llama"
    with safetensors.safe_open(folder / "export" / "model.safetensors", framework="numpy") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
    weights = np.asarray(state.params["embed"]["embedding"]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(embedding, weights)


def test_a_finished_run_started_again_does_no_harm(finished, capsys):
    folder, changes = finished
    before = (folder / "metrics.jsonl").read_bytes()
    saved = {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoints").iterdir()}
    runs.run(folder, **changes)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoints").iterdir()} == saved
    out = capsys.readouterr().out
    assert "starts at step 32 of 32" in out and "a sample, from 'def ':\n<s>def " not in out and "done: " in out


def test_the_table_equals_the_bytes_counted_from_the_arrays(tmp_path, capsys):
    runs.run(tmp_path, steps=2, checkpoint__at_end=False)
    out = capsys.readouterr().out
    built = program.build(runs.config(), tokenizer_vocab=320)
    counted = state_bytes.bytes_per_device(built.partition)
    state = sum(size for role, size in counted.items() if role != "gradients")
    assert counted.pop(roles.FROZEN) == 0  # the table leaves the row out where nothing is frozen
    for size in (*counted.values(), sum(counted.values())):
        assert display.human(size) in out
    assert f"{display.human(state)} of state on each device, counted from its arrays" in out
    assert not list((tmp_path / "checkpoints").iterdir())  # at_end is off


def test_the_collector_walks_no_trace_while_steps_run(tmp_path, monkeypatch):
    spared, push = [], recorder.Recorder.push

    def counted(self, step, numbers):
        spared.append(gc.get_freeze_count() / len(gc.get_objects()))  # the second are those that are not spared
        push(self, step, numbers)

    monkeypatch.setattr(recorder.Recorder, "push", counted)
    runs.run(tmp_path, steps=2, checkpoint__at_end=False)
    assert len(spared) == 2 and min(spared) > 10


WAITS = {
    "compiling the step": "compiled the step in",
    "making the state": "starts at step 0",
    "compiling the evaluation": "step 1: evaluation loss",
    "compiling the program of the sample": "a sample, from",
}


def test_each_wait_is_told_once_before_it_begins(tmp_path, cache_dir, capsys):
    settings = {**runs.EVALUATED, "evaluate__every": 1, "evaluate__batches": 1, "sample__length": 2}
    runs.run(tmp_path, steps=2, **settings, checkpoint__at_end=False)
    out = capsys.readouterr().out
    for wait, end in WAITS.items():
        assert out.count(wait) == 1 and -1 < out.find(wait) < out.find(end), wait


@runs.LONG  # test_results.py samples the same weights twice
def test_the_sample_begins_with_the_prompt_and_depends_on_nothing_but_weights_and_seed(tmp_path, capsys):
    settings = {"steps": 2, "sample__length": 8, "sample__prompt": "import "}
    texts = []
    for folder in ("a", "b"):
        runs.run(tmp_path / folder, **settings)
        texts.append(re.search(r"a sample, from 'import ':\n(import .*?)\ndone: ", capsys.readouterr().out, re.S)[1])
    assert texts[0] == texts[1] and len(texts[0]) > len("import ")


def test_checkpoints_are_the_newest_and_the_best(tmp_path):
    # A rate this high makes random tokens only less likely, so an early step stays the best.
    changes = {**runs.EVALUATED, "evaluate__every": 1, "checkpoint__every": 1, "optimizer__learning_rate": 0.1}
    runs.run(tmp_path, **changes, checkpoint__keep_last=2, checkpoint__keep_best=1)
    best = min(runs.evaluations(tmp_path), key=lambda pair: pair[1])[0]
    assert best < 5
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [best, 5, 6]


@runs.LONG  # as in test_resume.py
def test_two_accumulated_passes_give_the_losses_of_one(tmp_path):
    for accum in (1, 2):
        runs.run(tmp_path / str(accum), global_batch_size=16, grad_accum=accum, **runs.EVALUATED)
    one, two = ([values[1:] for values in runs.numbers(tmp_path / name)] for name in "12")
    np.testing.assert_allclose(two, one, rtol=SUM_ORDER)
    np.testing.assert_allclose(*(runs.evaluations(tmp_path / name)[-1] for name in "12"), rtol=SUM_ORDER)


def test_the_evaluation_loss_of_the_same_weights_is_the_same_number_whenever_asked(tmp_path):
    built, streams = opened(tmp_path, **runs.EVALUATED)
    params = state_lib.first(built).params
    first = program.held_out_loss(built, streams, params)
    before = streams.position()
    for _ in range(3):
        streams.next()
    assert program.held_out_loss(built, streams, params) == first == program.held_out_loss(built, streams, params)
    assert before != streams.position()  # evaluating does not move the position
    streams.close()


def test_accumulated_evaluation_reads_the_same_text(tmp_path):
    found = []
    for accum in (1, 2):
        built, streams = opened(tmp_path, global_batch_size=16, grad_accum=accum, **runs.EVALUATED)
        found.append(program.held_out_loss(built, streams, state_lib.first(built).params))
        streams.close()
    np.testing.assert_allclose(*found, rtol=MEAN_ORDER)


def test_batches_are_sharded_over_the_devices_in_the_order_of_rows(tmp_path):
    built, streams = opened(tmp_path, global_batch_size=16)
    rows = np.asarray(streams.next()["tokens"])
    streams.move_to({str(row): {**position, "index": 0} for row, position in streams.position().items()})
    again = streams.next()["tokens"]
    assert again.shape == (16, 33) and again.sharding == built.batch_sharding
    np.testing.assert_array_equal(again, rows)
    assert [shard.data.shape for shard in again.addressable_shards] == [(2, 33)] * 8
    for row in (0, 5, 15):
        np.testing.assert_array_equal(rows[row], np.random.default_rng([0, row, 0]).integers(320, size=33))
    streams.close()


def test_a_steps_numbers_are_read_after_the_next_step_is_dispatched_and_log_every_thins_them(tmp_path, monkeypatch):
    events = []

    def spied(cls, method, word):
        original = getattr(cls, method)

        def spy(self, step, values):
            events.append(f"{word} {step}")
            return original(self, step, values)

        monkeypatch.setattr(cls, method, spy)

    spied(timing.LateReader, "push", "dispatched")
    spied(metrics.MetricsLog, "write", "wrote")
    runs.run(tmp_path / "all", checkpoint__at_end=False)
    late = [f"{word} {step + (word == 'dispatched')}" for step in range(1, 6) for word in ("dispatched", "wrote")]
    assert events == ["dispatched 1", *late, "wrote 6"]
    runs.run(tmp_path / "some", log_every=4, **runs.EVALUATED, checkpoint__at_end=False)
    every = runs.losses(tmp_path / "all")
    assert runs.losses(tmp_path / "some") == {4: every[4], 6: every[6]}
    assert [step for step, _ in runs.evaluations(tmp_path / "some")] == [6]


WHEN = loop.When(steps=10, log_every=4, evaluate_every=3, save_every=0, saves_at_end=True)


@pytest.mark.parametrize(
    ("claim", "steps"), [(WHEN.logs, [4, 8, 10]), (WHEN.evaluates, [3, 6, 9, 10]), (WHEN.saves, [10])]
)
def test_things_are_due_every_so_many_steps_and_at_the_last(claim, steps):
    assert [step for step in range(1, 11) if claim(step)] == steps


def test_the_last_step_is_saved_only_if_asked():
    when = dataclasses.replace(WHEN, save_every=5, saves_at_end=False)
    assert [step for step in range(1, 11) if when.saves(step)] == [5]


# So few documents are all read to tell the text apart from others
READS_FEW = "from zerojax.data import batches, fingerprints\nbatches.LOOKED, fingerprints.SAMPLED = 1, 2"


def test_a_document_that_cannot_be_read_stops_the_run_with_all_its_steps_saved_and_the_run_goes_on_without_it(
    tmp_path, commands
):
    lines = [json.dumps({"text": f"{number:03d} " * 20}) for number in range(200)]
    path, folder = tmp_path / "text.jsonl", tmp_path / "run"
    path.write_text("\n".join([*lines[:150], '{"text": ', *lines[150:]]) + "\n")
    flags = runs.flags(data__name="python_stdlib", data__train_file=str(path), steps=60, checkpoint__every=0)
    told = r"text\.jsonl:151: is not JSON .*; or set --config\.data\.on_bad=skip to go on without what cannot be read"
    stopped = commands(*flags, f"--workdir={folder}", before=READS_FEW)
    step = max(runs.losses(folder))
    assert re.search(rf"{told}: stopped at step {step}, saved; the same command resumes$", stopped.error_line)
    assert 0 < step < 60 and step_files.steps(folder / "checkpoints") == [step]
    done = commands(*flags, "--config.data.on_bad=skip", f"--workdir={folder}", before=READS_FEW)
    assert done.status == 0 and "skipped since the start: 1; the first of process 0: " in done.out, done.err
    assert list(runs.losses(folder)) == list(range(1, 61))
