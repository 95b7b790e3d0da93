"""Compares our calls of cuDNN's kernels with those of JAX, in lowered programs. This module tests zerojax.ops.cudnn_attention."""

import json
import re

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.ops import attention, cudnn_attention


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
        form = {"scale": 0.3, "is_causal": is_causal, "window": window}
        y, l = cudnn_attention.forward(q, k, v, None, **form)
        return y, cudnn_attention.backward(q, k, v, l, dy, y, None, **form)

    shapes = [(2, 64, 4, 32), (2, 64, 2, 32), (2, 64, 2, 32), (2, 64, 4, 32)]
    ours, expected = calls(own, *shapes), calls(theirs, *shapes)
    assert len(ours) == 2 and [call[:3] for call in ours] == [call[:3] for call in expected]
    for (*_, config), (*_, whole) in zip(ours, expected):
        check_config(config, whole)


@pytest.mark.parametrize("is_causal, window, is_masked", [(False, 0, True), (True, 0, False), (True, 24, True)])
def test_a_deterministic_program_calls_cudnn_as_jax_does_and_says_so_in_each_call(
    monkeypatch, is_causal, window, is_masked
):
    def gradients(q, k, v, dy):
        mask = jnp.arange(64) < jnp.asarray([40, 64])[:, None] if is_masked else None
        how = {"is_causal": is_causal, "window": window, "mask": mask, "scale": 0.3}
        out, back = jax.vjp(lambda *args: attention.attend(*args, "cudnn", **how), q, k, v)
        return out, back(dy)

    shapes = [(2, 64, 4, 32), (2, 64, 2, 32), (2, 64, 2, 32), (2, 64, 4, 32)]
    expected = calls(gradients, *shapes)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    ours = calls(lambda *args: gradients(*args), *shapes)
    assert len(ours) == 2 and [call[:2] for call in ours] == [call[:2] for call in expected]
    for (*_, types, config), (*_, their_types, whole) in zip(ours, expected):
        if is_masked:  # of which JAX takes a gradient that nobody reads
            types, their_types = (re.sub(r", result_layouts.*?\} :|->.*", "", of) for of in (types, their_types))
        assert types == their_types
        assert config["cudnn_fmha_backend_config"].pop("force_deterministic") is True
        check_config(config, whole)


def test_cudnn_takes_a_mask_as_jax_gives_it():
    def theirs(q, k, v):
        mask = jnp.tri(64, dtype=bool)[None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn", scale=0.3, return_residual=True)

    def own(q, k, v):
        return cudnn_attention.forward(q, k, v, jnp.tri(64, dtype=bool)[None], scale=0.3, is_causal=False, window=0)

    shapes = [(2, 64, 4, 32), (2, 64, 2, 32), (2, 64, 2, 32)]
    ((*call, config),), ((*expected, whole),) = calls(own, *shapes), calls(theirs, *shapes)
    assert call == expected
    check_config(config, whole)
