"""Compares merged folders with merged params. This module tests zerojax.interop.merged."""

import golden_models
import jax
import numpy as np

import zerojax
from zerojax.interop import folder as folder_lib
from zerojax.interop import merged, peft


def test_a_merged_folder_holds_what_merging_the_params_gives(tmp_path):
    source = golden_models.FOLDER / "bart"
    folder = folder_lib.open_folder(source)
    merged.export(folder, peft.open_adapter(source / "rslora", folder.family, folder.model), tmp_path / "one")
    loaded = zerojax.load_huggingface(source, stage=3, min_size=64, adapter=source / "rslora")
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "two")
    one, two = (zerojax.load_huggingface(tmp_path / name, stage=0).params for name in ("one", "two"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, two)
    assert (tmp_path / "one" / "config.json").read_text() == (tmp_path / "two" / "config.json").read_text()
