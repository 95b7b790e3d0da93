"""Checks the properties of every family. This module tests zerojax.models.family."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax import tree
from zerojax.data import objectives
from zerojax.data.pairs import rows, tasks
from zerojax.models import families
from zerojax.models import family as family_lib

pytestmark = pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: next(iter(family.presets)))
SEQ_LEN = 16


def small(family):
    """Returns the family's first preset with two layers and a vocabulary."""
    return dataclasses.replace(next(iter(family.presets.values())), vocab_size=320, num_layers=2)


def lengths(family):
    """Returns the lengths of a row's arrays: of its objective, or of a classifier's examples."""
    if not family.is_classifier:
        return objectives.lengths(objectives.OBJECTIVES[family.objective].row(SEQ_LEN))
    form = tasks.RowForm(False, SEQ_LEN, 0, start=0, end=0, bos=None, stops=(), classes=small(family).classes)
    return rows.lengths(form, packs=False)


def abstract_batch(family):
    return {name: jax.ShapeDtypeStruct((2, length), jnp.int32) for name, length in lengths(family).items()}


def test_the_loss_of_its_objectives_batch_is_one_float32(family):
    config = small(family)
    params = family_lib.abstract_params(family.parts, config)
    loss = jax.eval_shape(lambda params, batch: family.loss(config, params, batch), params, abstract_batch(family))
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


def test_logits_score_every_token_that_is_continued_or_each_texts_classes(family):
    config, tokens = small(family), jax.ShapeDtypeStruct((2, 5), jnp.int32)
    params = family_lib.abstract_params(family.parts, config)
    inputs = {} if family.is_classifier else abstract_batch(family)
    if inputs:
        inputs.popitem()  # the last array is the one to continue
    logits = jax.eval_shape(lambda *arrays: family.logits(config, *arrays), params, inputs, tokens)
    shape = (2, len(config.classes)) if family.is_classifier else (2, 5, 320)
    assert (logits.shape, logits.dtype) == (shape, jnp.float32)


def test_a_start_makes_the_caches_that_its_family_declares(family):
    """A prompt of 5 tokens, or of 5 inputs and 2 targets, in caches of 7 slots, over bfloat16 weights."""
    if family.is_classifier:
        return
    config, two = small(family), family.is_encoder_decoder
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), family_lib.abstract_params(family.parts, config)
    )
    inputs = {"inputs": np.zeros((3, 5), np.int32), "mask": np.ones((3, 5), bool)} if two else {}
    given = inputs, np.zeros((3, 2 if two else 5), np.int32), np.ones(3, np.int32)
    _, made = jax.eval_shape(lambda *given: family.start(config, *given, 7), params, *given)
    sizes = {"tokens": (7,), "inputs": (5,), None: ()}
    declared = jax.tree.map(
        lambda held: jax.ShapeDtypeStruct((3, *sizes[held.positions], *held.shape), held.dtype or jnp.bfloat16),
        family.caches(config),
    )
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), declared
    )


def test_every_layer_is_a_block_and_the_head_is_a_head(family):
    names = list(family.parts(small(family)))
    blocks = [name for name in names if re.fullmatch(family.blocks, name)]
    assert len(blocks) % 2 == 0 and blocks
    untied, tied = (dataclasses.replace(small(family), tie_embeddings=tied) for tied in (False, True))
    assert [name for name in family.parts(untied) if re.fullmatch(family_lib.heads(family, untied), name)] == ["head"]
    if family.is_classifier:  # whose head is no table of embeddings
        assert "head" in family.parts(tied) and family_lib.heads(family, tied) == family.heads
    else:
        assert "head" not in family.parts(tied) and family_lib.heads(family, tied) == ""


def test_every_weight_has_a_name_at_hugging_face_and_none_has_two(family):
    table, names = family.huggingface.tensors(small(family)), {}
    for path, _ in tree.flatten(family_lib.abstract_params(family.parts, small(family))):
        name = table[re.sub(r"_\d+/", "_{}/", path)].name
        names[path] = name.format(*re.findall(r"_(\d+)/", path), expert="{expert}")
    assert len(set(names.values())) == len(names)


def test_weights_are_counted_from_their_shapes(family):
    parts = family.parts(small(family))
    made = [jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"] for module, inputs in parts.values()]
    assert family_lib.count_params(family.parts, small(family)) == sum(leaf.size for leaf in jax.tree.leaves(made))


def test_parts_of_a_config_are_equal_each_time(family):
    """So their shapes are traced once, and the programs that draw them are compiled once."""
    first, again = (family.parts(small(family)) for _ in range(2))
    assert first == again and {*first.values()} == {*again.values()}


def test_shapes_and_operations_are_counted_on_any_device_whatever_the_attention_kernel(family):
    """A GPU's kernel cannot be traced with float32 weights, nor elsewhere; the numbers do not depend on it."""
    configs = [dataclasses.replace(small(family), attention=kernel) for kernel in family.attention]
    assert len({family_lib.count_params(family.parts, config) for config in configs}) == 1
    assert len({family.flops_per_token(config, lengths(family)) for config in configs}) == 1
    assert len({str(family_lib.abstract_params(family.parts, config)) for config in configs}) == 1


def test_the_written_config_is_read_back(family):
    first = small(family)
    other = dataclasses.replace(first, tie_embeddings=not first.tie_embeddings)
    for config in (first,) if "nemotron_test" in family.presets else (first, other):  # whose class ties none
        table = family.huggingface
        weights = {
            re.sub(r"_\d+/", "_{}/", p) for p, _ in tree.flatten(family_lib.abstract_params(family.parts, config))
        }
        names = {tensor.name for path, tensor in table.tensors(config).items() if path in weights}
        found = table.read(table.write(config), names)
        assert family_lib.abstract_params(family.parts, found) == family_lib.abstract_params(family.parts, config)
        assert table.write(found) == table.write(config)
        assert config.max_seq_len in (None, found.max_seq_len)
