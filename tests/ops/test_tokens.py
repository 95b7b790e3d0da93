"""Checks what models call whose tokens may be sharded. This module tests zerojax.ops.tokens."""

import contextlib
import functools

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.ops import attention, context_attention, recurrence, tokens

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


@pytest.mark.parametrize(
    "groups, heads, ways, context", [(1, 4, 4, 2), (2, 8, 4, 1), (3, 12, 2, 2), (4, 4, 2, 2), (3, 3, 2, 2)]
)
@pytest.mark.parametrize("is_delta", [False, True])
def test_heads_of_a_recurrence_on_devices_are_those_of_one(groups, heads, ways, context, is_delta):
    """Groups of keys that devices share, have several of, or have parts of; and heads that they do not divide."""
    random = np.random.default_rng(0)
    normal = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    q, k = normal(2, LENGTH, groups, 3), normal(2, LENGTH, groups, 3)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)  # as the delta rule needs them
    beta = 1 / (1 + np.exp(-normal(2, LENGTH, heads))) if is_delta else None
    terms = recurrence.Terms(q, k, normal(2, LENGTH, heads, 5), -np.exp(normal(2, LENGTH, heads) - 1), beta)
    segments, mesh = np.arange(LENGTH)[None].repeat(2, axis=0) // 6, mesh_lib.make_mesh(context=context, model=ways)
    way = context_attention.Way("gather", "contiguous", "") if context > 1 else None

    def gradients(way, terms, segments):
        recur = lambda terms: tokens.recur(terms, None, way=way, segments_BT=segments)[0]  # noqa: E731
        y, pull = jax.vjp(recur, terms)
        return y, pull(jnp.sin(y))

    rows = P("data", "context")
    cut = jax.shard_map(
        functools.partial(gradients, way),
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
        axis_names=mesh_lib.manual(mesh),
        check_vma=False,
    )
    found, wanted = jax.jit(cut)(terms, segments), gradients(None, terms, segments)
    for own, true in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(own, true, rtol=0, atol=1e-5 * max(1, np.abs(true).max()))


@pytest.mark.parametrize("what", ["recurrence", "convolution"])
def test_parts_of_rows_without_a_way_are_refused(what):
    mesh = mesh_lib.make_mesh(data=1, context=8)
    terms = recurrence.Terms(*(jnp.ones((1, 8, 1, 2)),) * 3, jnp.zeros((1, 8, 1)))
    run = {
        "recurrence": lambda: tokens.recur(terms, None, way=None),
        "convolution": lambda: tokens.convolve([jnp.ones((1, 8, 2))], jnp.ones((4, 2)), way=None),
    }[what]
    with pytest.raises(UserError, match=rf"^{what}: tokens are sharded over `context`"):
        jax.eval_shape(jax.shard_map(lambda: run()[0], mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))
