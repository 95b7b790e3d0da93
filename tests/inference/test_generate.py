"""Checks sampling against plain loops. This module tests zerojax.inference.generate."""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import mesh as mesh_lib
from zerojax.inference import generate

VOCAB = 11


def logits_fn(table, inputs, tokens):
    """A causal toy: the next token's scores depend on the last two tokens."""
    before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    return table[tokens] + jnp.roll(table[before], 3, axis=-1)


def make_table():
    return jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))


def test_temperature_0_takes_the_likeliest_token_each_time():
    table, prompt = make_table(), np.array([3, 1, 4], np.int32)
    found = generate.make_sampler(logits_fn, 12, 0.0, rows=1)(table, {}, prompt, jax.random.key(0))
    expected = np.zeros(15, np.int32)
    expected[:3] = prompt
    for position in range(3, 15):
        expected[position] = np.argmax(logits_fn(table, {}, jnp.asarray(expected[None]))[0, position - 1])
    assert found.tolist() == expected.tolist()


def test_the_prompt_is_kept_and_the_length_is_as_asked():
    prompt = np.array([2, 7], np.int32)
    for length in (0, 5):
        found = generate.make_sampler(logits_fn, length, 1.0, rows=2)(make_table(), {}, prompt, jax.random.key(0))
        assert found.shape == (2 + length,) and found.dtype == jnp.int32
        assert found[:2].tolist() == [2, 7] and (found >= 0).all() and (found < VOCAB).all()


def test_draws_depend_only_on_the_key():
    sample = generate.make_sampler(logits_fn, 20, 1.0, rows=1)
    first, again, other = (sample(make_table(), {}, np.array([1], np.int32), jax.random.key(k)) for k in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()


def test_a_low_temperature_draws_what_is_likeliest():
    prompt = np.array([5], np.int32)
    drawn, likeliest = (generate.make_sampler(logits_fn, 10, t, rows=1) for t in (1e-3, 0.0))
    key = jax.random.key(0)
    assert drawn(make_table(), {}, prompt, key).tolist() == likeliest(make_table(), {}, prompt, key).tolist()


def test_tokens_are_drawn_as_often_as_their_probability():
    log_p = jnp.log(jnp.array([0.7, 0.2, 0.1]))
    sample = generate.make_sampler(lambda p, inputs, tokens: jnp.broadcast_to(p, (*tokens.shape, 3)), 2000, 1.0, rows=1)
    counts = np.bincount(sample(log_p, {}, np.array([0], np.int32), jax.random.key(0))[1:], minlength=3)
    four_deviations = 4 * np.sqrt(np.exp(log_p) * (1 - np.exp(log_p)) / 2000)
    assert (abs(counts / 2000 - np.exp(log_p)) < four_deviations).all()


def test_rows_sharded_over_devices_draw_the_tokens_of_one_device():
    mesh, prompt, key = mesh_lib.make_mesh(), np.array([1, 2], np.int32), jax.random.key(3)

    def split(table, inputs, tokens):
        return logits_fn(table, inputs, jax.lax.with_sharding_constraint(tokens, mesh_lib.batch_sharding(mesh)))

    table = jax.device_put(make_table(), jax.NamedSharding(mesh, jax.P()))
    found = generate.make_sampler(split, 8, 1.0, rows=8)(table, {}, prompt, key)
    assert found.tolist() == generate.make_sampler(logits_fn, 8, 1.0, rows=1)(make_table(), {}, prompt, key).tolist()


def test_further_inputs_reach_every_row_of_the_model():
    def scores(table, inputs, tokens):
        assert inputs["hint"].shape == (3, 4)
        return jnp.broadcast_to(jax.nn.one_hot(inputs["hint"][:, -1], VOCAB)[:, None], (*tokens.shape, VOCAB))

    sample = generate.make_sampler(scores, 3, 0.0, rows=3)
    found = sample(None, {"hint": np.array([1, 2, 3, 9], np.int32)}, np.array([4], np.int32), jax.random.key(0))
    assert found.tolist() == [4, 9, 9, 9]
