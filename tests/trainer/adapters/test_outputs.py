"""Compares exports of a run with the run's weights. This module tests zerojax.trainer.adapters.outputs."""

import golden_models
import jax
import numpy as np
import runs

import zerojax
from zerojax.lora import adapters
from zerojax.trainer import program
from zerojax.trainer.adapters import outputs

FOLDER = golden_models.FOLDER / "t5"


def test_an_export_is_a_folder_of_peft_or_a_merged_model(tmp_path):
    settings = {"init_from": str(FOLDER), "model__num_layers": 0, "data__tokenizer": "auto", "sample__length": 0}
    lora = {"lora__init_from": str(FOLDER / "rslora"), "zero__stage": 0, "seq_len": 64}
    built = program.build(runs.config(**settings, **lora))
    state = program.init_state(built)
    outputs.export(built.weights, state.params, tmp_path / "peft", "peft", None)
    again = zerojax.load_huggingface(FOLDER, stage=0, adapter=tmp_path / "peft")
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
    outputs.export(built.weights, state.params, tmp_path / "merged", "huggingface", None)
    merged = zerojax.load_huggingface(tmp_path / "merged", stage=0)
    expected = adapters.merge(state.params, built.weights.adapted.chosen)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged.params, expected)
