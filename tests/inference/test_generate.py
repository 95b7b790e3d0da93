"""Checks generation against a loop that reads the whole text again for each token. This module tests zerojax.inference.generate.

tests/interop/test_pretrained.py compares it with transformers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.inference import generate, sampling
from zerojax.models import families, family
from zerojax.models.llama.config import Heads, LlamaConfig
from zerojax.zero import stages

DECODER = families.PRESETS["test"]
# Biases, norms of queries and keys, a window shorter than the texts, an odd vocabulary and an odd number of layers.
WINDOWED = LlamaConfig(
    61,
    1,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    heads=Heads(qkv_bias=True, norm="each", windows=(5,)),
)
PROMPTS = np.array([[3, 9, 4, 1, 5, 9, 2, 6], [7, 7, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 8, 2, 8, 1]])
MASK = np.array([[1] * 8, [1] * 3 + [0] * 5, [0] * 4 + [1] * 4])
NEW = 7


def make_params(config=WINDOWED):
    random = np.random.default_rng(0)
    shapes = family.abstract_params(DECODER.parts, config)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.4, leaf.shape), leaf.dtype), shapes)


@functools.cache
def make(new_tokens=NEW, stage=3, replica=1, special=family.SpecialTokens(), picked=sampling.Sampling()):
    """Returns a function of prompts that generates with sharded weights."""
    mesh = mesh_lib.make_mesh(replica=replica)
    params = make_params()
    partition = stages.partition_state({"params": params}, mesh=mesh, stage=stage, min_size=64)
    sharded = jax.device_put(params, partition.shardings["params"])
    function = generate.make_generator(
        DECODER, WINDOWED, partition, new_tokens=new_tokens, special=special, sampling=picked
    )
    return functools.partial(function, sharded)


@functools.cache
def compiled_logits():
    return jax.jit(lambda params, tokens: DECODER.logits(WINDOWED, params, {}, tokens))


def expected(prompt, count=NEW):
    """Returns the greedy tokens after one prompt. The text is padded, so that it has one shape; what follows a token does not change it."""
    text = [int(token) for token in prompt]
    for _ in range(count):
        padded = np.pad(np.array([text]), ((0, 0), (0, PROMPTS.shape[1] + NEW - len(text))))
        text.append(int(np.argmax(compiled_logits()(make_params(), padded)[0, len(text) - 1])))
    return text[len(prompt) :]


@pytest.mark.parametrize("stage, replica", [(3, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_every_row_gets_the_tokens_of_a_loop_without_a_cache(stage, replica):
    found = make(stage=stage, replica=replica)(PROMPTS, MASK)
    assert found.shape == (3, 8 + NEW) and found.dtype == np.int32
    np.testing.assert_array_equal(found[:, :8], PROMPTS)
    for row, prompt, mask in zip(found, PROMPTS, MASK):
        assert row[8:].tolist() == expected(prompt[mask > 0])


def test_a_row_ends_at_a_stop_token_and_the_result_at_the_longest_row():
    plain = make()(PROMPTS, MASK)[:, 8:]
    stops = int(plain[0, 2]), int(plain[1, 4])
    lengths = [next((i for i, token in enumerate(row, 1) if token in stops), NEW) for row in plain]
    found = make(special=family.SpecialTokens(stops=stops, pad=59))(PROMPTS, MASK)[:, 8:]
    assert found.shape[1] == max(lengths) < NEW and min(lengths) < max(lengths)
    for row, before, length in zip(found, plain, lengths):
        assert row.tolist() == [*before[:length].tolist(), *[59] * (max(lengths) - length)]


@pytest.mark.long
def test_forced_tokens_are_taken():
    found = make(special=family.SpecialTokens(forced_first=11, forced_last=12))(PROMPTS, MASK)[:, 8:]
    alone = make()(PROMPTS, MASK)[:, 8:]
    np.testing.assert_array_equal(found[:, :-1], alone[:, :-1])  # their texts have more than one token
    assert (found[:, -1] == 12).all()
    found = make(special=family.SpecialTokens(forced_first=11))(PROMPTS, (np.cumsum(MASK, axis=1) == 1) & (MASK > 0))[
        :, 8:
    ]
    assert found[:, 0].tolist() == [11] * 3


def test_draws_depend_on_the_seed_and_the_row_alone():
    draw = make(picked=sampling.Sampling(1.0, top_k=20, top_p=0.9))
    found = draw(PROMPTS, MASK, seed=0)
    np.testing.assert_array_equal(draw(PROMPTS, MASK, seed=0), found)
    assert (draw(PROMPTS, MASK, seed=1) != found).any()
    np.testing.assert_array_equal(draw(np.concatenate([PROMPTS, PROMPTS]), np.concatenate([MASK, MASK]))[:3], found)


def test_invalid_prompts_are_refused_in_one_line():
    cases = {
        r"input_ids: must be integers \[rows, length\], and are int": (PROMPTS[0], None),
        "are a batch of input_ids, labels; give batch": ({"input_ids": PROMPTS, "labels": PROMPTS}, None),
        "rows differ in length; pad them": ([[1, 2], [3]], None),
        "input_ids: hold 61, and the model knows ids from 0 to 60": (np.where(PROMPTS == 9, 61, PROMPTS), MASK),
        r"attention_mask: has shape \(3, 7\)": (PROMPTS, MASK[:, 1:]),
        "attention_mask: row 1 is 0 everywhere": (PROMPTS, MASK * [[1], [0], [1]]),
    }
    for message, (prompts, mask) in cases.items():
        with pytest.raises(UserError, match=message):
            make()(prompts, mask)
    with pytest.raises(UserError, match="max_new_tokens: must be 1 or more"):
        make(new_tokens=0)


def test_a_text_longer_than_the_table_of_positions_is_refused():
    chosen = families.PRESETS["bart_test"]
    config = dataclasses.replace(chosen.presets["bart_test"], vocab_size=61, num_layers=1, max_seq_len=10)
    params = {"params": family.abstract_params(chosen.parts, config)}
    partition = stages.partition_state(params, mesh=mesh_lib.make_mesh(), stage=0)
    for new_tokens, length in ((10, 4), (2, 11)):
        function = generate.make_generator(
            chosen, config, partition, new_tokens=new_tokens, special=family.SpecialTokens()
        )
        with pytest.raises(UserError, match="would have 11 tokens, and the model has 10 positions"):
            function(None, np.ones((1, length), int))


def test_a_text_longer_than_those_of_training_is_warned_of():
    config = dataclasses.replace(WINDOWED, max_seq_len=10)
    params = {"params": family.abstract_params(DECODER.parts, config)}
    partition = stages.partition_state(params, mesh=mesh_lib.make_mesh(), stage=0)
    function = generate.make_generator(DECODER, config, partition, new_tokens=3, special=family.SpecialTokens())
    with pytest.raises(UserWarning, match="may have 11 tokens, and the model was trained on 10 at most"):
        function(None, PROMPTS)  # warnings are errors here, so nothing is compiled


def test_prompts_whose_attention_exceeds_the_host_are_refused_before_anything_is_compiled():
    partition = stages.partition_state(
        {"params": family.abstract_params(DECODER.parts, WINDOWED)}, mesh=mesh_lib.make_mesh(), stage=0
    )
    function = generate.make_generator(DECODER, WINDOWED, partition, new_tokens=1, special=family.SpecialTokens())
    with pytest.raises(
        UserError, match=r"^input_ids: 2 prompts of up to 1000000 tokens need more memory than there is"
    ):
        function(None, np.ones((2, 1_000_000), int))


def test_an_allocation_that_fails_is_one_line_and_other_errors_are_not():
    line = r"^input_ids: 3 prompts of up to 7 tokens .*RESOURCE_EXHAUSTED: x"
    for message, error, match in (
        ("RESOURCE_EXHAUSTED: x", UserError, line),
        ("INTERNAL: x", jax.errors.JaxRuntimeError, "INTERNAL"),
    ):
        with pytest.raises(error, match=match), generate._out_of_memory((3, 7)):
            raise jax.errors.JaxRuntimeError(message)
