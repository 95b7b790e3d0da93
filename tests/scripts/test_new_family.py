"""Compares folders that are there, right ones and changed ones. This module tests scripts/new_family.py."""

import pathlib
import shutil
import sys

import golden_models
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import new_family

FOLDER = golden_models.FOLDER / "ministral"


def table(folder, known=""):
    return {row.what: row for row in new_family.compare(folder, known)}


def test_a_family_that_is_right_differs_nowhere():
    rows = table(FOLDER)
    assert all(row.is_right for row in rows.values()), rows
    assert rows["gradients"].found.endswith("; 21 of 21 tensors compared")
    assert rows["tokens"].found == "36 of 36"


@pytest.mark.long
def test_what_differs_is_told(tmp_path):
    copy = shutil.copytree(FOLDER, tmp_path / "copy")
    expected = dict(np.load(copy / "expected.npz"))
    expected["gradients"][3] *= 1.01
    expected["generated"][0, -1] += 1
    np.savez(copy / "expected.npz", **expected | {"logits": expected["logits"] + 0.1, "loss": 1.01 * expected["loss"]})
    text = (copy / "config.json").read_text().replace('"use_cache"', '"attn_temperature": 2.0, "use_cache"')
    (copy / "config.json").write_text(text)
    wrong = {what for what, row in table(copy).items() if not row.is_right}
    assert wrong == {
        "logits, stage 0",
        "logits, stage 3",
        "loss",
        "gradients",
        "tokens",
        "fields of config.json unread",
    }
