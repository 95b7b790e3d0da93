"""Checks attention of blocks of keys against attention of all. This module tests zerojax.ops.attention_blocks."""

import json
import re

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.ops import attention_blocks as blocks

ROUNDING = 1e-5  # float32 sums of some terms in another order


def arrays():
    draw = np.random.default_rng(0).normal
    q, k, v, dy = (
        jnp.asarray(draw(size=(2, length, heads, 8)), jnp.float32)
        for length, heads in ((5, 4), (12, 2), (12, 2), (5, 4))
    )
    seen = np.random.default_rng(1).random((2, 5, 12)) < 0.6
    seen[:, :3, :4], seen[0, 4] = False, False  # queries that see no key of a block, and one that sees none at all
    return q, k, v, dy, jnp.asarray(seen)


@pytest.mark.long
def test_merged_blocks_and_their_gradients_are_those_of_all_keys():
    q, k, v, dy, seen = arrays()

    def whole(q, k, v):
        y = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=0.3)
        return jnp.where(jnp.any(seen, -1)[:, :, None, None], y, 0)

    expected, gradients = jax.vjp(whole, q, k, v)
    cut = [(k[:, i : i + 4], v[:, i : i + 4], seen[:, :, i : i + 4]) for i in (0, 4, 8)]
    form = blocks.BlockForm("xla", 0.3)
    first, *others = (blocks.forward(form, q, *block) for block in cut)
    for other in others:
        first = blocks.merged(first, other)
    y, l = blocks.finished(blocks.merged(first, others[0], is_seen=False))
    np.testing.assert_allclose(y, expected, atol=ROUNDING)
    dq, dk, dv = zip(*(blocks.backward(form, q, *block, y, l, dy) for block in cut))
    found = sum(dq), jnp.concatenate(dk, 1), jnp.concatenate(dv, 1)
    for one, other in zip(found, gradients(dy)):
        np.testing.assert_allclose(one, other, atol=ROUNDING)


@pytest.mark.parametrize("is_causal, window, is_masked", [(True, 0, False), (True, 4, True), (False, 0, True)])
def test_parts_of_the_queries_give_what_all_at_once_give(is_causal, window, is_masked, monkeypatch):
    draw = np.random.default_rng(2).normal
    q, dy, k, v = (jnp.asarray(draw(size=(2, 11, heads, 8)), jnp.float32) for heads in (4, 4, 2, 2))
    seen = jnp.asarray(np.random.default_rng(3).random((2, 11, 11)) < 0.7) if is_masked else None
    form, cut = blocks.BlockForm("xla", 0.3, is_causal, window, 5.0), []

    def both(q, k, v):
        cut.append(blocks._parts(form, 11, 11))
        y, l = blocks.finished(blocks.forward(form, q, k, v, seen))
        return y, l, blocks.backward(form, q, k, v, seen, y, l, dy)

    expected = jax.jit(both)(q, k, v)
    for name, size in (("QUERIES", 2), ("PARTS", 4), ("_TILE", 2)):
        monkeypatch.setattr(blocks, name, size)
    found = jax.jit(lambda *given: both(*given))(q, k, v)
    assert [len(parts) for parts in cut] == [1, 4]
    assert sum(part.last - part.first for part in cut[1]) < (44 if is_causal else 45), (
        "keys that no query sees are read"
    )
    jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, atol=ROUNDING), found, expected)


def calls(function, *shapes):
    """Returns each call of cuDNN in a lowered program: its target, its types and layouts, and its config."""
    found = []
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    mesh = jax.sharding.Mesh(np.asarray(compile_only.gpus(topology="1x1")), ("context",))
    run = jax.shard_map(function, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    for line in jax.jit(run).lower(*like).as_text().splitlines():
        if "__cudnn$fmha" in line:
            config = re.search(r'backend_config = "(.*?)", operand', line)[1]
            target, types = re.search(r"@(\S+?)\(", line)[1], line.partition("operand_layouts")[2]
            config = json.loads(re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), config))
            found.append((target, re.search(r"api_version = \d", line)[0], types, config))
    return found


def check_config(own, theirs):
    """Checks that what `own` lacks has no value."""
    for key, value in theirs.items():
        if isinstance(value, dict):
            check_config(own.get(key, {}), value)
        elif key in own:
            assert own[key] == value, key
        else:
            assert not value or value in ("0", "PRIMITIVE_TYPE_INVALID", [False] * 4), key
    assert own.keys() <= theirs.keys()


@pytest.mark.parametrize("is_causal, window", [(False, 0), (True, 0), (True, 24)])
def test_cudnn_is_called_as_jax_calls_it(is_causal, window):
    def theirs(q, k, v, dy):
        def attend(q, k, v):
            near = (window - 1, 0) if window else None
            how = {"is_causal": is_causal, "local_window_size": near, "implementation": "cudnn", "scale": 0.3}
            return jax.nn.dot_product_attention(q, k, v, **how)

        out, gradients = jax.vjp(attend, q, k, v)
        return out, gradients(dy)

    def own(q, k, v, dy):
        form = blocks.BlockForm("cudnn", 0.3, is_causal, window)
        y, l = blocks.forward(form, q, k, v, None)
        return y, blocks.backward(form, q, k, v, None, y, l, dy)

    shapes = [(2, 64, 4, 32), (2, 64, 2, 32), (2, 64, 2, 32), (2, 64, 4, 32)]
    ours, expected = calls(own, *shapes), calls(theirs, *shapes)
    assert len(ours) == 2 and [call[:3] for call in ours] == [call[:3] for call in expected]
    for (*_, config), (*_, whole) in zip(ours, expected):
        check_config(config, whole)


def test_cudnn_takes_a_mask_as_jax_gives_it():
    def theirs(q, k, v):
        mask = jnp.tri(64, dtype=bool)[None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn", scale=0.3, return_residual=True)

    def own(q, k, v):
        return blocks.forward(blocks.BlockForm("cudnn", 0.3), q, k, v, jnp.tri(64, dtype=bool)[None])

    shapes = [(2, 64, 4, 32), (2, 64, 2, 32), (2, 64, 2, 32)]
    ((*call, config),), ((*expected, whole),) = calls(own, *shapes), calls(theirs, *shapes)
    assert call == expected
    check_config(config, whole)
