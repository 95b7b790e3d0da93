"""Refuses models that do not suit the rest of a config. This module tests zerojax.trainer.model."""

import golden_models
import pytest
import runs

from zerojax.errors import UserError
from zerojax.trainer import program

LLAMA = golden_models.FOLDER / "llama"


def build(**changes):
    return program.build(runs.config(**changes), tokenizer_vocab=320)


def test_settings_of_a_model_that_cannot_take_effect_with_a_folder_are_refused():
    for changes, message in (
        ({"model__num_layers": 1}, "config.model.num_layers: is 1, and config.init_from=.*llama has its own model"),
        ({"model__num_layers": 0, "seq_len": 300}, "config.seq_len: 300 is longer than the 256 positions of .*llama"),
    ):
        with pytest.raises(UserError, match=message):
            build(init_from=str(LLAMA), **changes)


def test_dropout_of_a_model_without_any_is_refused():
    with pytest.raises(
        UserError, match=r"config.model.dropout: is 0.1, and the model of config.model.preset=test has no dropout"
    ):
        build(model__dropout=0.1)


def test_a_folder_that_a_run_of_one_of_our_configs_writes_names_that_run(tmp_path):
    way_out = f"is not there yet; write it first: zerojax train --config bart_tiny --workdir {tmp_path}/bart_tiny$"
    with pytest.raises(UserError, match=f"^config.init_from: {tmp_path}/bart_tiny/export: {way_out}"):
        build(init_from=str(tmp_path / "bart_tiny" / "export"))
    for name in ("zero3/export", "bart_tiny/other", "mine/export"):  # zero3 writes none
        with pytest.raises(UserError, match="is not a folder; name one that save_pretrained of transformers wrote"):
            build(init_from=str(tmp_path / name))


@pytest.mark.parametrize(
    "preset, order", [("hybrid_test", "contiguous"), ("mamba2_test", "contiguous"), ("test", "zigzag")]
)
def test_rows_of_recurrent_layers_are_in_parts_that_follow_each_other(preset, order):
    """The test presets have four heads, which eight devices do not divide."""
    config = runs.config(model__preset=preset, model__num_layers=2, mesh__context=8)
    way = program.build(config, tokenizer_vocab=320).way
    assert way.order == order
    assert ("states" in way.text, "keys" in way.text) == (order == "contiguous", preset != "mamba2_test")
