"""Checks what is refused of texts to read; their vectors are compared in tests of training. This module tests zerojax.inference.texts."""

import golden_models
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.interop import pretrained


@pytest.mark.parametrize(
    "line, kinds", [("from 0 to 1", [[2, 0]]), ("integers", [[0.5, 0]]), (r"integers \[1, 2\]", [[0]])]
)
def test_kinds_of_texts_that_the_model_does_not_have_are_refused(line, kinds):
    loaded = golden_models.load("bert", 3)
    with pytest.raises(UserError, match=f"^token_type_ids: must be .*{line}"):
        loaded.classifier()(loaded.params, np.ones((1, 2), int), token_type_ids=np.array(kinds))


def test_a_model_that_writes_text_has_no_classes():
    with pytest.raises(UserError, match="has no classes; use `generator`"):
        golden_models.load("llama", 3).classifier()


def test_a_model_with_a_head_gives_vectors_of_its_last_states_too_and_others_are_refused():
    loaded = pretrained.load_huggingface(golden_models.FOLDER / "llama")
    ids = np.array([[5, 6, 7], [8, 9, 0]])
    found = loaded.embedder(pooling="mean")(loaded.params, ids, np.array([[1, 1, 1], [1, 1, 0]]))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    alone = loaded.embedder(pooling="mean")(loaded.params, ids[1:, :2])
    np.testing.assert_allclose(found[1:], alone, rtol=1e-4, atol=1e-6)
    with pytest.raises(UserError, match="pooling: must be one of last, mean, and is 'cls'"):
        loaded.embedder(pooling="cls")
    bert = pretrained.load_huggingface(golden_models.FOLDER / "bert")
    with pytest.raises(UserError, match="embedder: the model is no decoder"):
        bert.embedder()
    gpt2 = pretrained.load_huggingface(golden_models.FOLDER / "gpt2")
    most = gpt2.config.max_seq_len
    with pytest.raises(UserError, match=rf"input_ids: have {most + 1} tokens, and the model has {most} positions"):
        gpt2.embedder()(gpt2.params, np.full((1, most + 1), 5))
