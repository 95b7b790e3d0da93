"""Checks rotations that depend on a text's length against transformers. This module tests zerojax.models.llama.text_lengths, and what reads
texts by it: the loss, logits, the generator and the engine.
"""

import dataclasses
import functools
import warnings

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import mesh as mesh_lib
from zerojax.data import parts
from zerojax.inference import generate, sampling
from zerojax.inference.engine import engine as engine_lib
from zerojax.models import family
from zerojax.models.llama import text_lengths
from zerojax.ops import context_attention, token_order

NAMES = ("phi3long", "llamadynamic")
LOGITS, LOSS = 2e-5, 2e-5  # float32 sums in another order
AFTER, NEW = 16, 24  # tokens of a text after which positions are stretched; new tokens


@functools.cache
def loaded(name):
    with warnings.catch_warnings(action="ignore"):
        return zerojax.load_huggingface(golden_models.FOLDER / name, stage=0)


@functools.cache
def prompts(name):
    known = golden_models.expected(name)
    return [text[:length].tolist() for text, length in zip(known["texts"], known["prompts"])]


@functools.cache
def applied(name):
    return jax.jit(loaded(name).apply)


def read(name, text):
    """Returns the logits of a text, float32[length, vocab]; its row is padded, so that one program reads texts of all lengths."""
    ids, mask = np.zeros((1, 64), np.int32), np.zeros((1, 64), np.int32)
    ids[0, : len(text)], mask[0, : len(text)] = text, 1
    return np.asarray(applied(name)(loaded(name).params, {"input_ids": ids, "attention_mask": mask})[0, : len(text)])


def alone(name, text):
    """Returns the loss of each label of a text that is in a row of its own."""
    scores = jax.nn.log_softmax(read(name, text[:-1]))
    return -np.asarray(scores)[np.arange(len(text) - 1), text[1:]]


def test_lengths_are_counted_to_the_last_label_of_each_text():
    learned = np.array([[0, 1, 1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]], bool)
    np.testing.assert_array_equal(text_lengths.of_rows(learned), [[6], [8]])
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 2, 3, 3, 3, 3, 3, 3]])
    found = text_lengths.of_rows(learned, segments)
    np.testing.assert_array_equal(found, [[3, 3, 3, 3, 2, 2, 2, 0], [0, 0, 6, 6, 6, 6, 6, 6]])


@pytest.mark.parametrize("packed", [False, True])
def test_devices_that_hold_parts_of_rows_count_alike(packed):
    draw = np.random.default_rng(0)
    learned = draw.random((2, 16)) < 0.3
    segments = np.sort(draw.integers(0, 4, (2, 16)))[:, ::-1].copy() if packed else None
    order = np.array([0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9])  # each of four devices has two parts
    mesh = mesh_lib.make_mesh(context=4, data=1, devices=jax.devices()[:4])
    way = context_attention.Way("ring", "zigzag", "")
    given = [
        jnp.asarray(array)[:, order]
        for array in (learned, np.broadcast_to(np.arange(16), (2, 16)), segments)
        if array is not None
    ]

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"), check_vma=False
    )
    def counted(learned, positions, *segments):
        found = text_lengths.of_rows(learned, segments[0] if segments else None, positions, way)
        return jnp.broadcast_to(found, learned.shape)

    expected = np.broadcast_to(text_lengths.of_rows(learned, segments), (2, 16))
    np.testing.assert_array_equal(counted(*given), expected[:, order])


@pytest.mark.parametrize("name", NAMES)
def test_logits_in_a_padded_batch_are_those_of_each_text_alone_in_transformers(name):
    known, model = golden_models.expected(name), loaded(name)
    is_text = np.arange(known["texts"].shape[1]) < known["lengths"][:, None]
    for side in ("right", "left"):
        texts, mask = known["texts"], is_text
        if side == "left":
            texts = np.stack([np.roll(text, len(text) - length) for text, length in zip(texts, known["lengths"])])
            mask = is_text[:, ::-1]
        batch = {"input_ids": texts, "attention_mask": mask.astype(np.int32)}
        found = np.asarray(jax.jit(model.apply)(model.params, batch))
        np.testing.assert_allclose(found[mask], known["logits"][is_text], atol=LOGITS, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_padded_and_packed_texts_is_that_of_each_alone(name):
    known, model = golden_models.expected(name), loaded(name)
    texts = [text[:length] for text, length in zip(known["texts"], known["lengths"])]
    losses = [alone(name, text) for text in texts]
    if name == "phi3long":  # which has the same rotation for a token more
        scores = jax.nn.log_softmax(known["logits"][0])
        np.testing.assert_allclose(losses[0], -np.asarray(scores)[np.arange(29), texts[0][1:]], rtol=LOSS, atol=LOSS)
    by_token = jax.jit(functools.partial(model.family.loss, model.config, model.params, by_token=True))
    rows = {array: np.zeros((3, 41), np.int32) for array in ("tokens", "labeled")}
    for row, text in enumerate(texts):
        rows["tokens"][row, : len(text)], rows["labeled"][row, 1 : len(text)] = text, 1
    found = np.asarray(by_token(rows))
    for row, own in enumerate(losses):
        np.testing.assert_allclose(found[row, : len(own)], own, rtol=LOSS, atol=LOSS)
    packed = {array: np.zeros((1, 70), np.int32) for array in ("tokens", "labeled", "segments")}
    at = 0
    for number, text in enumerate(texts, 1):
        part = slice(at, at + len(text))
        packed["tokens"][0, part], packed["segments"][0, part] = text, number
        packed["labeled"][0, at + 1 : part.stop] = 1
        at = part.stop
    found, at = np.asarray(by_token(packed))[0], 0
    for own in losses:
        np.testing.assert_allclose(found[at : at + len(own)], own, rtol=LOSS, atol=LOSS)
        at += len(own) + 1


@pytest.mark.filterwarnings("ignore:max_new_tokens. the longest text")
@pytest.mark.parametrize("name", NAMES)
def test_answers_that_grow_beyond_are_those_of_transformers_with_its_cache(name):
    known, model = golden_models.expected(name), loaded(name)
    lengths, longest = known["prompts"], max(known["prompts"])
    mask = np.arange(longest) < lengths[:, None]
    ids = np.where(mask, known["texts"][:, :longest], 0)
    made = generate.make_generator(
        model.family, model.config, model.partition, new_tokens=NEW, special=family.SpecialTokens()
    )
    np.testing.assert_array_equal(made(model.params, ids, mask)[:, longest:], known["generated"])
    long = known["texts"][:1, : AFTER + 8]
    found = made(model.params, long)[0, AFTER + 8 :]
    text = long[0].tolist()
    if name == "phi3long":
        for token in found[:4]:
            assert token == np.argmax(read(name, text)[-1])
            text.append(int(token))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", [{"slots": 2, "chunk": 4}, {"slots": 1}])
def test_an_engine_answers_as_transformers_where_prompts_are_read_in_parts_and_texts_grow_beyond(name, how):
    engine = zerojax.Engine(loaded(name), max_len=64, **how)
    found = engine.generate(prompts(name), max_tokens=NEW, ignores_end=True)
    assert [request.tokens for request in found] == golden_models.expected(name)["generated"].tolist()


def test_draws_and_penalties_go_on_where_a_text_is_read_anew():
    model = loaded("phi3long")
    prompt = prompts("phi3long")[0]
    engine = zerojax.Engine(model, max_len=64, slots=3, chunk=8)
    drawn = engine.generate([prompt] * 3, max_tokens=NEW, ignores_end=True, temperature=1.0, seed=5)
    again = zerojax.Engine(model, max_len=64, slots=1).generate(
        [prompt], max_tokens=NEW, ignores_end=True, temperature=1.0, seed=5, stream=1
    )
    assert drawn[1].tokens == again[0].tokens and len({tuple(request.tokens) for request in drawn}) == 3
    penalised = engine.generate([prompt], max_tokens=12, ignores_end=True, repetition_penalty=1.5, logprobs=1)[0]
    text = [*prompt]
    for token, told in zip(penalised.tokens, penalised.logprobs):
        scores = read("phi3long", text)[-1]
        np.testing.assert_allclose(told.own, jax.nn.log_softmax(scores)[token], atol=1e-4)
        seen = np.isin(np.arange(len(scores)), text)
        assert token == np.argmax(np.where(seen, np.where(scores > 0, scores / 1.5, scores * 1.5), scores))
        text.append(token)


def test_a_prompt_goes_on_from_keys_of_short_texts_alone(monkeypatch):
    monkeypatch.setattr(engine_lib, "LEAST_REUSED", 4)
    long = golden_models.expected("phi3long")["texts"][0].tolist()
    engine, asked = zerojax.Engine(loaded("phi3long"), max_len=64, slots=2), []
    for text in (long, long[:14], long[:15], long):
        asked += engine.generate([text], max_tokens=2)
        assert asked[-1].tokens[0] == np.argmax(read("phi3long", text)[-1])
    assert [request.reused for request in asked] == [0, 0, 14, 0]


@runs.LONG
def test_a_sampler_with_weights_on_the_host_reads_texts_anew_too():
    known = golden_models.expected("phi3long")
    model = zerojax.load_huggingface(
        golden_models.FOLDER / "phi3long", stage=3, min_size=64, offload=zerojax.Offload(params="host")
    )
    made = generate.make_generator(
        model.family,
        model.config,
        model.partition,
        new_tokens=NEW,
        special=family.SpecialTokens(),
        sampling=sampling.Sampling(),
    )
    np.testing.assert_array_equal(made(model.params, known["texts"][:1, :12])[0, 12:], known["generated"][0])


def test_short_rows_have_no_lengths_to_count():
    config = dataclasses.replace(loaded("phi3long").config)
    assert [one.original_length for one in config.by_length] == [AFTER] * config.num_layers
    assert loaded("phi3long").family.stretch(config) == family.Stretch(AFTER, True)
    assert loaded("llamadynamic").family.stretch(loaded("llamadynamic").config) == family.Stretch(AFTER, False)
    assert golden_models.load("llama", 0).family.stretch(golden_models.load("llama", 0).config) is None
    batch = {"tokens": jnp.zeros((1, AFTER + 1), jnp.int32), "labeled": jnp.ones((1, AFTER + 1), jnp.int32)}
    model = loaded("phi3long")
    text = str(jax.make_jaxpr(lambda params: model.family.loss(config, params, batch))(model.params))
    assert "cummax" not in text and "reduce_max" in text


@pytest.mark.parametrize("packed", [pytest.param(False, marks=runs.LONG), True])
def test_devices_that_hold_parts_of_rows_have_the_loss_of_one(packed):
    model, (rows, seq_len) = loaded("phi3long"), (2, 64)
    draw = np.random.default_rng(0)
    arrays = {"tokens": draw.integers(3, 96, (rows, seq_len + 1)), "labeled": np.zeros((rows, seq_len + 1), int)}
    ends = [(12, 40, 50), (30, 40, 60)] if packed else [(14,), (40,)]  # of texts
    if packed:
        arrays["segments"] = np.array([np.searchsorted(own, np.arange(seq_len + 1), "right") + 1 for own in ends])
    for row, own in enumerate(ends):
        arrays["labeled"][row, 1 : own[-1]] = 1
    arrays = {name: array.astype(np.int32) for name, array in arrays.items()}
    expected = model.family.loss(model.config, model.params, arrays, by_token=True)
    config = model.config
    way = context_attention.choose(
        heads=2, kv_heads=1, ways=4, length=seq_len, is_causal=True, packed=packed, head_dim=16, batch=rows
    )
    order = token_order.permutation(seq_len, 4, way.order)
    split = parts.of_rows(arrays, lambda length: order)
    mesh = mesh_lib.make_mesh(context=4, data=1, devices=jax.devices()[:4])
    by_token = functools.partial(model.family.loss, dataclasses.replace(config, way=way), by_token=True)
    specs = P(), dict.fromkeys(split, P(None, "context"))
    sharded = jax.shard_map(by_token, mesh=mesh, in_specs=specs, out_specs=P(None, "context"), check_vma=False)
    params = jax.tree.map(np.asarray, model.params)
    np.testing.assert_allclose(jax.jit(sharded)(params, split), expected[:, order], rtol=LOSS, atol=LOSS)
    without = config.changed(rotation={"scaling": None})
    others = model.family.loss(without, model.params, arrays, by_token=True)
    assert np.abs(others - expected).max() > 0.1
