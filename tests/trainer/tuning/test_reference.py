"""Checks what pairs are compared with after a restart. This module tests zerojax.trainer.tuning.reference."""

import dataclasses
import re

import numpy as np
import pytest
import runs

from zerojax.data.pairs import rows, splits, tasks
from zerojax.errors import UserError
from zerojax.trainer.tuning import reference

ROUNDING = 2e-5  # the same float32 sums in another order


def test_a_run_that_resumes_compares_with_the_weights_that_it_began_with(cache_dir, tmp_path):
    words = [{"text": "x" * (i % 5 + 1), "chosen": f"y{i}", "rejected": "no" * (i % 3 + 1)} for i in range(13)]
    settings = {
        "data__task": "dpo",
        "data__answer": "{chosen}",
        "data__answer_len": 8,
        "seq_len": 24,
        "data__train_file": runs.write_lines(tmp_path / "pairs.jsonl", words),
        "checkpoint__every": 2,
        "lora__r": 4,
    }
    whole = runs.run(tmp_path / "whole", devices=2, steps=4, **settings)
    runs.run(tmp_path / "parts", devices=2, steps=2, **settings)
    parts = runs.run(tmp_path / "parts", devices=2, steps=4, **settings)
    names = ("loss", "reward_margin", "reward_chosen")
    assert runs.numbers(parts, names=names) == runs.numbers(whole, names=names)
    assert runs.losses(whole)[1] == pytest.approx(np.log(2), rel=ROUNDING)
    (parts / reference.FILE).unlink()
    with pytest.raises(UserError, match=rf"{re.escape(str(parts / reference.FILE))}: .*choose another --workdir"):
        runs.run(parts, devices=2, steps=6, **settings)


def test_log_probabilities_of_other_held_out_pairs_and_damaged_ones_are_refused(tmp_path):
    form = tasks.RowForm(False, 8, 4, 0, 1, None, (1,))
    examples = [tasks.Example(np.zeros(2, np.int32), np.zeros(0, np.int32), np.ones(2, bool), 1, "a")] * 2
    pairs = rows.Pairs(examples, examples, form)
    settings = tasks.TaskSettings("dpo", "{a}", "{b}", (), "", "", "{c}")
    found = splits.Splits(pairs, pairs, settings, form, (), [], "one", "other")
    np.savez(tmp_path / reference.FILE, pairs="oneother", train=np.ones((2, 2)), held_out=np.ones((2, 2)))
    reference.restore(found, tmp_path)
    assert (pairs.reference == 1).all()
    with pytest.raises(UserError, match="it is of other pairs"):
        reference.restore(dataclasses.replace(found, of_held_out="third"), tmp_path)
    written = (tmp_path / reference.FILE).read_bytes()
    for damage in (b"", b"PK", written[:-30], written[:200] + b"?" + written[201:]):
        (tmp_path / reference.FILE).write_bytes(damage)
        with pytest.raises(UserError, match=r"cannot be read .*choose another --workdir"):
            reference.restore(found, tmp_path)
