"""Checks the presets against published sizes, and a run of the family. This module tests zerojax.models.bart.family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax.interop import folder
from zerojax.models import family
from zerojax.models.bart import family as bart
from zerojax.models.bart import model

# The models facebook/bart-* at Hugging Face, and the fixed bias of the logits, which is not one of their parameters.
PUBLISHED = {
    "bart_base": 139_420_416 + 50_265,
    "bart_large": 406_291_456 + 50_265,
    "mbart_large_50": 610_879_488 + 250_054,
    "pegasus_large": 570_797_056 + 96_103,
    "opus_mt": 74_410_496 + 58_101 - 2 * 512 * 512,  # sines and cosines are no weights of ours
}

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.mark.parametrize("name", PUBLISHED)
def test_big_presets_have_their_published_number_of_weights(name):
    assert family.count_params(model.parts, (bart.PRESETS | bart.MARIAN_PRESETS)[name]) == PUBLISHED[name]


@runs.LONG  # tests/mission trains one too, and reads its export
def test_a_run_learns_and_its_export_is_read_back(tmp_path, stdlib_dir):
    settings = {"model__preset": "bart_test", "data__name": "python_stdlib", "data__dir": str(stdlib_dir)}
    losses = runs.losses(runs.run(tmp_path, **settings, export__format="huggingface", steps=4))
    assert losses[4] < losses[1]
    exported = folder.open_folder(tmp_path / "export")
    assert exported.dtype.name == "bfloat16" and exported.model.embed_dim == 64
    bias = next(entry for name, entry in exported.entries.items() if name == "final_logits_bias")
    with open(bias.file, "rb") as file:
        file.seek(bias.start)
        assert not np.frombuffer(file.read(2 * 320), np.uint16).any()  # it is not trained


@pytest.mark.parametrize("kind", bart.KINDS)
def test_the_written_config_of_every_kind_is_read_back(kind):
    sizes = {
        "decoder_layers": 3,
        "decoder_heads": 2,
        "decoder_mlp_dim": 48,
        "max_seq_len": 96,
        "activation": "relu",
        "stddev": 0.1,
    }
    config = model.BartConfig(61, 2, 32, 4, 64, **sizes, scale_embeddings=True, **bart.KINDS[kind].fields)
    written = bart.FAMILY.huggingface.write(config)
    assert written["architectures"] == [bart.KINDS[kind].architecture]
    assert bart.FAMILY.huggingface.read(written, ()) == config


def test_a_fixed_table_of_positions_begins_as_sines_and_cosines():
    table = model.sinusoids(jnp.arange(7), 9)
    angles = np.arange(7)[:, None] / 10000 ** (2 * (np.arange(9) // 2) / 9)
    np.testing.assert_allclose(table[:, :5], np.sin(angles[:, ::2]), atol=1e-6)
    np.testing.assert_allclose(table[:, 5:], np.cos(angles[:, 1::2]), atol=1e-6)
    config = model.BartConfig(61, 1, 8, 2, 8, max_seq_len=7, **bart.KINDS["pegasus"].fields)
    module, inputs = model.parts(config)["encoder_positions"]
    made = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]["embedding"]
    np.testing.assert_allclose(module.embedding_init(None, made.shape, made.dtype), model.sinusoids(jnp.arange(7), 8))
