"""Checks what is refused of texts to classify. This module tests zerojax.inference.classify."""

import golden_models
import numpy as np
import pytest

from zerojax.errors import UserError


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
