"""Checks attention against its equation, and which kernel is chosen. This module tests zerojax.ops.attention."""

import functools
import re

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import specs
from zerojax.errors import UserError
from zerojax.ops import attention

ROUNDING = 1e-5  # float32 sums of some terms in another order
SPLASH_ROUNDING = 1e-4  # relative to the largest: sums over 128 keys in another order
BOTH = ("xla", "cudnn")


def reference(q, k, v, *, is_causal=False, bias=0.0, mask=None, scale=None):
    """Softmax of the scores, in float64 and head by head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bthn,bshn->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    if mask is not None:
        scores = np.where(mask[:, None, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshn->bthn", weights / weights.sum(-1, keepdims=True), v)


def arrays(queries=5, keys=5, heads=4, kv_heads=2):
    draw = np.random.default_rng(0).normal
    shapes = [(2, queries, heads, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, 8)]
    return [jnp.asarray(draw(size=shape), jnp.float32) for shape in shapes]


def over_data(function, mesh):
    """Returns a function of rows on each device's rows, in a shard_map that leaves `model` to the compiler, as a train step does."""
    rows = P("data")
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=rows, out_specs=rows, axis_names=mesh_lib.manual(mesh), check_vma=False
        )
    )


# Key heads that divide, one that all devices read, some that two devices read, and query heads that do not divide.
@pytest.mark.parametrize("heads, kv_heads", [pytest.param(4, 2, marks=pytest.mark.long), (4, 1), (6, 3), (3, 3)])
def test_heads_are_sharded_over_model_where_it_is_left_to_the_compiler(heads, kv_heads):
    q, k, v = arrays(heads=heads, kv_heads=kv_heads)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(2, heads, 5, 5)), jnp.float32)
    mask = jnp.arange(5) < jnp.asarray([[5], [3]])

    def value_and_grads(q, k, v, bias, mask):
        def total(*args):
            out = attention.attend(*args[:3], "xla", is_causal=True, bias=args[3], mask=mask)
            return jnp.sum(jnp.sin(3 * out)), out

        (_, out), grads = jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, bias)
        return out, grads

    mesh = mesh_lib.make_mesh(data=2, model=2, devices=jax.devices()[:4])
    by_row = [jax.tree.map(lambda a, row=row: a[row : row + 1], (q, k, v, bias, mask)) for row in (0, 1)]
    expected = jax.tree.map(lambda *rows: jnp.concatenate(rows), *(jax.jit(value_and_grads)(*row) for row in by_row))
    found = over_data(value_and_grads, mesh)(q, k, v, bias, mask)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=ROUNDING), found, expected)


def test_cudnn_compiles_with_heads_sharded_over_model():
    mesh = mesh_lib.make_mesh(data=2, model=2, devices=compile_only.gpus(topology="1x4"))
    like = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", None, "model")))
    run = over_data(functools.partial(attention.attend, kernel="cudnn", is_causal=True), mesh)
    text = compile_only.compile_gpu(run.lower(like, like, like))
    assert "fmha" in text and not re.search("all-gather|all-reduce|all-to-all", text)


@pytest.mark.parametrize(
    "is_causal, mask", [(False, ()), (False, (2, 63)), (False, (2, 62, 63)), (True, ()), (True, (2, 63))]
)
def test_gradients_of_any_lengths_and_masks_are_cudnns(is_causal, mask):
    [gpu] = compile_only.gpus(topology="1x1")
    here = jax.sharding.SingleDeviceSharding(gpu)
    q, k = (jax.ShapeDtypeStruct((2, size, 4, 64), jnp.bfloat16, sharding=here) for size in (62, 63))
    masks = [jax.ShapeDtypeStruct(mask, bool, sharding=here)] if mask else [None]
    if is_causal:
        q = k

    @jax.checkpoint  # its gradient is traced after `attend` has returned
    def total(q, k, mask):
        return jnp.sum(attention.attend(q, k, k, "cudnn", is_causal=is_causal, mask=mask).astype(jnp.float32))

    assert "SoftmaxBackward" in jax.jit(jax.grad(total)).lower(q, k, *masks).as_text()


def test_causal_attention_with_shared_heads():
    q, k, v = arrays()
    found = attention.attend(q, k, v, "xla", is_causal=True)
    np.testing.assert_allclose(found, reference(q, k, v, is_causal=True), atol=ROUNDING)


def test_a_bias_is_added_to_scores_that_a_scale_multiplies():
    q, k, v = arrays(queries=3, keys=6)
    bias = np.random.default_rng(1).normal(size=(4, 3, 6)).astype(np.float32)
    found = attention.attend(q, k, v, "xla", is_causal=False, bias=jnp.asarray(bias), scale=1.0)
    np.testing.assert_allclose(found, reference(q, k, v, bias=bias, scale=1.0), atol=ROUNDING)


def test_masked_keys_are_not_seen():
    q, k, v = arrays(queries=3, keys=6)
    mask = np.arange(6) < np.array([[6], [2]])
    found = attention.attend(q, k, v, "xla", is_causal=False, mask=jnp.asarray(mask))
    np.testing.assert_allclose(found, reference(q, k, v, mask=mask), atol=ROUNDING)


def test_a_mask_may_differ_by_query_and_a_bias_by_row():
    q, k, v = arrays(queries=3, keys=6)
    mask = np.random.default_rng(2).random((2, 3, 6)) < 0.6
    mask[..., 0] = True
    bias = np.random.default_rng(1).normal(size=(2, 4, 3, 6)).astype(np.float32)
    found = attention.attend(q, k, v, "xla", is_causal=False, mask=jnp.asarray(mask), bias=jnp.asarray(bias))
    expected = reference(q, k, v, bias=np.where(mask[:, None], bias, -np.inf))
    np.testing.assert_allclose(found, expected, atol=ROUNDING)


@pytest.mark.parametrize("window", [1, 3, 5, 9])
def test_a_window_ends_at_the_querys_own_token(window):
    q, k, v = arrays()
    distance = np.arange(5)[:, None] - np.arange(5)
    bias = np.where((distance >= 0) & (distance < window), 0.0, -np.inf)
    found = attention.attend(q, k, v, "xla", is_causal=True, window=window)
    np.testing.assert_allclose(found, reference(q, k, v, bias=bias), atol=ROUNDING)


def test_a_causal_query_that_sees_no_key_has_0():
    q, k, v = arrays()
    mask = jnp.array([[False, True, True, True, True], [True, True, False, False, False]])
    found = attention.attend(q, k, v, "xla", is_causal=True, mask=mask, window=2)
    is_blind = np.array([[True, False, False, False, False], [False, False, False, True, True]])
    assert (np.asarray(found)[is_blind] == 0).all() and (np.asarray(found)[~is_blind] != 0).all()


def test_one_query_and_one_key_of_one_head_run_in_bfloat16():
    one = jnp.ones((1, 1, 1, 16), jnp.bfloat16)
    y = jax.jit(lambda q, k, v: attention.attend(q + 1, k + 1, 2 * v, "xla", is_causal=False))(one, one, one)
    assert y.dtype == jnp.bfloat16 and (y == 2).all()


def test_float16_comes_out_as_float16():
    q, k, v = (x.astype(jnp.float16) for x in arrays())
    assert attention.attend(q, k, v, "xla", is_causal=True).dtype == jnp.float16


@pytest.mark.parametrize(
    "wanted, known, platform, dtype, expected",
    [
        ("auto", BOTH, "gpu", jnp.bfloat16, "cudnn"),
        ("auto", BOTH, "gpu", jnp.float16, "cudnn"),
        ("auto", BOTH, "gpu", jnp.float32, "xla"),
        ("auto", BOTH, "tpu", jnp.bfloat16, "xla"),
        ("auto", ("xla",), "gpu", jnp.bfloat16, "xla"),
        ("xla", BOTH, "gpu", jnp.bfloat16, "xla"),
        ("cudnn", BOTH, "gpu", jnp.bfloat16, "cudnn"),
    ],
)
def test_auto_is_cudnn_on_gpus_in_16_bits_where_the_family_can(wanted, known, platform, dtype, expected):
    assert attention.choose_kernel(wanted, known, platform, dtype) == expected


@pytest.mark.parametrize(
    "head_dim, capability, expected",
    [
        (128, 8.0, "cudnn"),
        (192, 8.0, "xla"),
        (192, 9.0, "cudnn"),
        (256, 10.0, "cudnn"),
        (264, 9.0, "xla"),
        (20, 9.0, "xla"),
    ],
)
def test_cudnn_takes_heads_as_wide_as_its_gpu_allows(head_dim, capability, expected):
    given = {"head_dim": head_dim, "capability": capability}
    assert attention.choose_kernel("auto", BOTH, "gpu", jnp.bfloat16, **given) == expected
    if expected == "xla":
        with pytest.raises(
            UserError, match=f"cudnn takes heads .* and this model's have {head_dim}; set `attention=xla`"
        ):
            attention.choose_kernel("cudnn", BOTH, "gpu", jnp.bfloat16, **given)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (5, 6), (6, 5), (1, 7)])
@pytest.mark.parametrize("given", ["nothing", "bias", "row mask", "mask", "bias and mask"])
def test_what_is_made_even_for_cudnn_changes_no_value_and_no_gradient(queries, keys, given):
    q, k, v = arrays(queries, keys, 2, 2)
    draw = np.random.default_rng(3)
    bias = jnp.asarray(draw.normal(size=(1, 2, queries, keys)), jnp.float32) if "bias" in given else None
    seen = draw.random((2, 1, 1 if given == "row mask" else queries, keys)) < 0.7
    seen[..., 0] = True
    masks = jnp.asarray(seen) if "mask" in given else None
    lengths = []

    def attended(q, k, v, bias, masks):
        lengths.append((q.shape[1], k.shape[1]))
        return jax.nn.dot_product_attention(q, k, v, bias, masks, is_causal=queries == keys)

    def total(function):
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.square(function(*args, masks))), argnums=(0, 1, 2))(
            q, k, v, bias
        )

    jax.tree.map(
        lambda found, right: np.testing.assert_allclose(found, right, rtol=1e-6, atol=ROUNDING),
        total(attention.for_cudnn(attended, is_causal=queries == keys)),
        total(attended),
    )
    assert lengths == [(queries + queries % 2, keys + keys % 2), (queries, keys)]


def test_arrays_that_cudnn_does_not_take_are_refused_in_one_line():
    q = jnp.zeros((1, 4, 1, 192), jnp.bfloat16)
    with pytest.raises(UserError, match=r"^attention: cudnn does not take these arrays; set `attention=xla` \("):
        jax.eval_shape(lambda q: attention.attend(q, q, q, "cudnn", is_causal=True), q)


@pytest.mark.parametrize(
    "known, platform, dtype, message",
    [
        (BOTH, "cpu", jnp.bfloat16, "cudnn needs an NVIDIA GPU and 16-bit arithmetic; this run has cpu and bfloat16"),
        (BOTH, "gpu", jnp.float32, "this run has gpu and float32; set `attention=xla`"),
        (("xla",), "gpu", jnp.bfloat16, "this preset supports only xla, and the config sets cudnn"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(known, platform, dtype, message):
    with pytest.raises(UserError, match=message):
        attention.choose_kernel("cudnn", known, platform, dtype)


def test_splash_attention_and_its_gradients_are_those_of_xla():
    """Interpreted on the CPU, with two heads that share keys and values."""
    draw = np.random.default_rng(0).normal
    q, k, v = (jnp.asarray(draw(size=(1, attention.LANES, heads, 128)), jnp.float32) for heads in (2, 1, 1))
    weight = jnp.asarray(draw(size=q.shape), jnp.float32)

    def run(attend):
        return jax.jit(jax.value_and_grad(lambda *qkv: jnp.sum(attend(*qkv) * weight), argnums=(0, 1, 2)))(q, k, v)

    found = run(lambda *qkv: attention.splash(*qkv, interpret=True))
    expected = run(lambda *qkv: attention.attend(*qkv, "xla", is_causal=True))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            one, other, rtol=SPLASH_ROUNDING, atol=SPLASH_ROUNDING * abs(np.asarray(other)).max()
        )


def test_splash_attention_runs_on_one_devices_arrays_of_a_length_that_it_takes(monkeypatch):
    ran = []
    monkeypatch.setattr(attention, "splash", lambda q, k, v, scale: ran.append(q.shape) or q)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def attend(length, **how):
        q = jnp.ones((8, length, 2, 8))
        jax.eval_shape(lambda q: attention.attend(q, q, q, "splash", is_causal=True, **how), q)
        return q

    def inside(length):
        one = jax.P("data")
        local = jax.shard_map(
            lambda q: attention.attend(q, q, q, "splash", is_causal=True), mesh=mesh, in_specs=one, out_specs=one
        )
        jax.eval_shape(local, jnp.ones((8, length, 2, 8)))

    attend(128)  # over several devices, without shard_map
    inside(100)
    assert not ran
    inside(128)
    assert ran == [(1, 128, 2, 8)]


@pytest.mark.parametrize(
    "wanted, platform, dtype, length, expected",
    [
        ("auto", "tpu", jnp.bfloat16, 8192, "splash"),
        ("splash", "tpu", jnp.bfloat16, 128, "splash"),
        ("auto", "tpu", jnp.bfloat16, 100, "xla"),
        ("auto", "tpu", jnp.float32, 8192, "xla"),
        ("auto", "gpu", jnp.bfloat16, 8192, "cudnn"),
    ],
)
def test_auto_is_splash_on_tpus_where_it_can_run(wanted, platform, dtype, length, expected):
    assert attention.choose_kernel(wanted, (*BOTH, "splash"), platform, dtype, length) == expected


@pytest.mark.parametrize("platform, length", [("gpu", 128), ("tpu", 100)])
def test_splash_is_refused_where_it_cannot_run(platform, length):
    message = rf"splash needs a TPU, .* has {platform}, bfloat16 and seq_len={length}; set `attention=xla`"
    with pytest.raises(UserError, match=message):
        attention.choose_kernel("splash", ("xla", "splash"), platform, jnp.bfloat16, length)


def test_gradients_reach_the_bias():
    q, k, v = arrays()
    total = jax.jit(jax.grad(lambda bias: attention.attend(q, k, v, "xla", is_causal=True, bias=bias).sum()))
    grad = total(jnp.zeros((4, 5, 5)))
    assert grad.shape == (4, 5, 5) and abs(grad).max() > 0


@pytest.mark.parametrize(
    "heads, kv_heads", [(4, 2), (4, 1), (6, 3)], ids=["own heads", "one head of keys", "not divided"]
)
@pytest.mark.parametrize("window", [0, 3])
def test_a_cache_that_devices_share_is_read_by_each_as_by_one(heads, kv_heads, window):
    """Rows over `data`, heads over `model`, where these divide them; the kernel is interpreted."""
    draw = np.random.default_rng(0).normal
    q, k, v = (
        jnp.asarray(draw(size=shape), jnp.bfloat16)
        for shape in ((4, 1, heads, 16), (4, 70, kv_heads, 16), (4, 70, kv_heads, 16))
    )
    ends = jnp.array([70, 1, 0, 65])
    mesh = mesh_lib.make_mesh(data=2, model=2, devices=jax.devices()[:4])
    one = mesh_lib.make_mesh(data=1, devices=jax.devices()[:1])
    readers = attention.TokenReader(mesh, ("data",), "interpret"), attention.TokenReader(one, (), "jnp")
    assert all(attention.token_kernel_can_run(q, k, reader) for reader in readers)
    found, wanted = (
        jax.jit(functools.partial(attention.attend_token, reader=reader, window=window))(q, k, v, ends)
        for reader in readers
    )
    spread = readers[0].specs_of(heads, kv_heads)
    assert [len(specs.axes(spec)) for spec in spread] == [1 + (kv_heads != 3), 1 + (kv_heads == 2)]
    np.testing.assert_allclose(found.astype(np.float32), wanted.astype(np.float32), rtol=0, atol=0.01)
    assert not np.any(found[2]) and np.all(np.any(found[jnp.array([0, 1, 3])] != 0, axis=(1, 2, 3)))
