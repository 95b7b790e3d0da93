"""Compares the kernels of recurrences with the same token by token, and compiles them for a GPU that is not there. This module tests
pallas_kernels.chunk_scan, and where zerojax.ops.recurrence takes it."""

import functools

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrences
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from recurrences import DELTA, ROUNDING, SCAN, drawn, with_gradients

import zerojax
from pallas_kernels import chunk_scan
from zerojax.ops import recurrence
from zerojax.ops.recurrence import Terms

IN_BFLOAT16 = 0.02  # operands of matmuls have 8 bits, of the norm
BATCH, GROUPS, HEADS, KEYS, VALUES = 2, 1, 2, 16, 32
SIZES = GROUPS, HEADS, KEYS, VALUES


def token_by_token(tokens, state, mask, segments):
    """The equations by `recurrence.step`; a text's first token has a state of 0."""
    is_first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))

    def add(state, at):
        token, seen, begins = at
        one = jax.tree.map(lambda array: array[:, None], token)
        y, state = recurrence.step(one, jnp.where(begins[:, None, None, None], 0, state), mask_BT=seen[:, None])
        return state, y[:, 0]

    turned = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), (tokens, mask, is_first))
    state, y = jax.lax.scan(add, state, turned)
    return jnp.where(mask[..., None, None], jnp.moveaxis(y, 0, 1), 0), state


@pytest.fixture
def interpreted(monkeypatch):
    """Makes `recurrence.scan` interpret the kernels, and returns the list of forms that it did so with."""
    forms = []

    def form(terms, dtype=jnp.float32):
        has_beta = terms.beta is not None
        forms.append(chunk_scan.form_of(terms.q.shape, terms.v.shape, dtype=dtype, is_delta=has_beta, interpret=True))
        return forms[-1]

    monkeypatch.setattr(recurrence, "_form", form)
    return forms


def compare(kind, length, mask=None, segments=None):
    recurrences.compare(token_by_token, kind, BATCH, length, SIZES, mask, segments)


@pytest.mark.parametrize("kind", [DELTA, SCAN])
@pytest.mark.parametrize("length", [1, 65, 4097])
def test_results_states_and_gradients_are_those_of_the_recurrence(kind, length, interpreted):
    compare(kind, length)
    assert all(interpreted)


@pytest.mark.parametrize("kind", [DELTA, SCAN])
def test_texts_of_a_row_begin_with_state_0_and_padding_leaves_no_trace(kind, interpreted):
    """Texts of one token, of several chunks, and that end where a chunk does."""
    sizes = [[1, 63, 130, 6], [100, 28, 2, 70]]
    segments = np.stack([np.repeat([1, 2, 3, 0], size) for size in sizes]).astype(np.int32)
    compare(kind, 200, np.arange(200) < np.array([[197], [150]]), segments)
    assert all(interpreted)


def test_keys_that_are_all_alike_lose_no_digits(interpreted):
    """The powers of their system have entries of 10^17."""
    tokens, state, _ = drawn(DELTA, BATCH, 64, *SIZES)
    k = jnp.broadcast_to(tokens.k[:, :1], tokens.k.shape)
    tokens = tokens._replace(k=k, log_decay=jnp.zeros_like(tokens.log_decay), beta=jnp.ones_like(tokens.beta))
    seen = np.ones((BATCH, 64), bool)
    found, wanted = recurrence.scan(tokens, state), token_by_token(tokens, state, seen, seen)
    for own, true in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, true, rtol=0, atol=ROUNDING * np.abs(true).max())


@pytest.mark.parametrize("kind", [DELTA, SCAN])
def test_operands_of_16_bits_change_results_by_their_rounding(kind, monkeypatch, interpreted):
    tokens, state, grads = drawn(kind, BATCH, 130, *SIZES)
    wanted = with_gradients(lambda *given: recurrence.scan(*given), tokens, state, grads)
    monkeypatch.setattr(recurrence, "_form", functools.partial(recurrence._form, dtype=jnp.bfloat16))
    found = with_gradients(lambda *given: recurrence.scan(*given), tokens, state, grads)
    errors = [
        np.linalg.norm(own - true) / np.linalg.norm(true)
        for own, true in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    ]
    assert 1e-4 < max(errors) < IN_BFLOAT16


@pytest.mark.parametrize("precision", [None, "bfloat16", "highest"])
@pytest.mark.parametrize("kind", [DELTA, SCAN])
def test_hopper_gpus_run_the_kernels_on_their_shards(kind, precision):
    """Compiled by Triton and NVIDIA's assembler, at the widths of Qwen3-Next and of Mamba-2; matmuls in float32 are left to XLA."""
    mesh = zerojax.make_mesh(devices=compile_only.devices())
    value_width = 128 if kind == DELTA else 64

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("data")))

    scalars = array(8, 256, 2)
    q, v = array(8, 256, 1, 128, dtype=jnp.bfloat16), array(8, 256, 2, value_width, dtype=jnp.bfloat16)
    tokens = Terms(q, q, v, scalars, scalars if kind == DELTA else None)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    def gradients(tokens):
        return jax.grad(lambda tokens: jnp.sum(recurrence.scan(tokens)[0]))(tokens)

    with jax.default_matmul_precision(precision):
        lowered = jax.jit(gradients).lower(tokens)
    if precision == "highest":
        assert "chunk_scan" not in lowered.as_text()
        return
    text = compile_only.compile_gpu(lowered, compile_only.ASSEMBLED)
    names = ["on", "recall", "back", "pairs", "queries", "keys"] + (["prepare"] if kind == DELTA else [])
    assert all(f"chunk_scan_{name}" in text for name in names)
