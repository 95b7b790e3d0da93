"""Checks the presets against published sizes, and a run of the family. This module tests zerojax.models.bart.family."""

import numpy as np
import pytest
import runs

from zerojax.interop import folder
from zerojax.models import family
from zerojax.models.bart import family as bart
from zerojax.models.bart import model

# The models facebook/bart-* at Hugging Face, and the fixed bias of the logits, which is not one of their parameters.
PUBLISHED = {"bart_base": 139_420_416 + 50_265, "bart_large": 406_291_456 + 50_265}

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.mark.parametrize("name", PUBLISHED)
def test_big_presets_have_their_published_number_of_weights(name):
    assert family.count_params(model.parts, bart.PRESETS[name]) == PUBLISHED[name]


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
