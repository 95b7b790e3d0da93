"""Checks what models call whose tokens may be sharded. This module tests zerojax.ops.tokens."""

import contextlib

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.ops import attention, context_attention, tokens

WAYS, LENGTH, HEADS, WIDTH = 4, 16, 4, 8


def drawn():
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, LENGTH, HEADS, WIDTH)), jnp.float32)


@pytest.mark.parametrize("packed", [False, True])
def test_parts_attend_as_all_tokens_of_one_device_do(packed):
    x, mesh = drawn(), mesh_lib.make_mesh(data=2, context=WAYS)
    segments = jnp.asarray(np.arange(LENGTH) // 5)[None].repeat(2, axis=0) if packed else None
    way = context_attention.choose(heads=HEADS, kv_heads=HEADS, ways=WAYS, length=LENGTH, is_causal=True)

    def run(x, segments, way):
        assert way is None or tokens.of_all(x.shape[2]) == LENGTH
        return tokens.attend(*x, "xla", way=way, is_causal=True, segments_BT=segments, window=6)

    cut = jax.shard_map(
        lambda x, segments: run(x, segments, way),
        mesh=mesh,
        in_specs=(P(None, None, "context"), P(None, "context")),
        out_specs=P(None, "context"),
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(cut)(x, segments), run(x, segments, None), rtol=1e-5, atol=1e-6)


def test_segments_are_a_mask_where_a_device_has_all_tokens():
    x, segments = drawn(), jnp.zeros((2, LENGTH), jnp.int32).at[:, 7:].set(1)
    mask = segments[:, :, None] == segments[:, None]
    found = tokens.attend(*x, "xla", way=None, is_causal=True, segments_BT=segments)
    np.testing.assert_array_equal(found, attention.attend(*x, "xla", is_causal=True, mask=mask))


PADDED = jnp.arange(LENGTH)[None].repeat(2, axis=0) < jnp.asarray([[11], [16]])
BIAS = arrays.normal(3, (1, HEADS, LENGTH, LENGTH))
CALLS = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (3, 0)},
    "padding": {"mask": PADDED[:, None, None]},
    "bias": {"bias": BIAS},
}


def in_parts(x, **call):
    """Returns attention of arrays whose tokens are sharded, and of its mask's keys and its bias's queries."""
    arrays = {name: call.pop(name) for name in ("mask", "bias") if name in call}
    specs = {"mask": P(None, None, None, "context"), "bias": P(None, None, "context")}
    run = jax.shard_map(
        lambda x, arrays: tokens.attention(*x, **arrays, **call),
        mesh=mesh_lib.make_mesh(data=2, context=WAYS),
        in_specs=(P(None, None, "context"), {name: specs[name] for name in arrays}),
        out_specs=P(None, "context"),
        check_vma=False,
    )
    return jax.jit(run)(x, arrays)


@pytest.mark.parametrize("name", CALLS)
def test_the_drop_in_attends_to_all_tokens_as_the_function_that_it_replaces(name):
    expected = jax.nn.dot_product_attention(*drawn(), **CALLS[name])
    np.testing.assert_allclose(in_parts(drawn(), **CALLS[name]), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(tokens.attention(*drawn(), **CALLS[name]), expected)


@pytest.mark.parametrize(
    "call, words",
    [
        ({"mask": jnp.ones((1, 1, LENGTH, LENGTH), bool)}, "a mask of shape .* pass is_causal=True"),
        ({"bias": BIAS[..., :4]}, "a bias of shape .* must count the 16 keys of all devices"),
        ({"local_window_size": 3}, r"a window of 3 cannot run .* causal: \(left, 0\)"),
        ({"is_causal": True, "query_seq_lengths": 3}, "query_seq_lengths cannot run"),
        ({"dropout_rate": 0.1}, "takes no dropout"),
    ],
)
def test_what_cannot_run_on_parts_is_refused_in_one_line(call, words):
    with pytest.raises(UserError, match=f"^attention: {words}") as caught:
        in_parts(drawn(), **call)
    assert "\n" not in str(caught.value)


def test_a_model_that_knows_no_parts_is_refused_on_them_and_runs_on_whole_rows():
    x, mesh = drawn(), mesh_lib.make_mesh(context=8)

    def run(is_whole):
        def of_device(x):
            with tokens.whole_rows() if is_whole else contextlib.nullcontext():
                return tokens.attend(*x, "xla", way=None, is_causal=True), tokens.attention(*x, is_causal=True)

        return jax.shard_map(of_device, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)

    expected = attention.attend(*x, "xla", is_causal=True)
    jax.tree.map(lambda found: np.testing.assert_array_equal(found, expected), run(True))
    with pytest.raises(
        UserError, match=r"^attention: tokens are sharded over `context`, and the model counts positions"
    ):
        run(False)
