"""Compares a branch of Mamba-2 with its equations, a token at a time. This module tests zerojax.models.scan_mixer."""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.models import scan_mixer


def silu(x):
    return x / (1 + np.exp(-x))


def test_a_branch_is_its_equations():
    shape = scan_mixer.Scan(heads=4, head_dim=3, state_dim=5, groups=2, window=3, has_bias=True)
    module = scan_mixer.Mixer(shape, 6, 1e-5, 0.02)
    x = np.random.default_rng(0).normal(size=(1, 7, 6)).astype(np.float32)
    params = module.init(jax.random.key(0), x)["params"]
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.5, leaf.shape), jnp.float32), params)
    found, _ = module.apply({"params": params}, x)

    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    made = x[0] @ p["in_proj"]["kernel"] + p["in_proj"]["bias"]
    z, mixed, dt = np.split(made, [12, 12 + 32], axis=-1)
    padded = np.concatenate([np.zeros((2, 32)), mixed])
    weight = p["conv"]["weight"].reshape(32, 3) if p["conv"]["weight"].shape[0] == 32 else p["conv"]["weight"].T
    mixed = silu(sum(padded[i : i + 7] * weight[:, i] for i in range(3)) + p["conv"]["bias"])
    v, k, q = (
        part.reshape(7, *sizes) for part, sizes in zip(np.split(mixed, [12, 22], axis=-1), ((4, 3), (2, 5), (2, 5)))
    )
    dt = np.log1p(np.exp(dt + p["dt_bias"]))
    state, rows = np.zeros((4, 5, 3)), []
    for t in range(7):
        keys, queries = np.repeat(k[t], 2, axis=0), np.repeat(q[t], 2, axis=0)  # heads of a group share them
        decay = np.exp(-np.exp(p["A_log"]) * dt[t])
        state = decay[:, None, None] * state + keys[:, :, None] * (dt[t][:, None] * v[t])[:, None, :]
        rows.append(np.einsum("hk,hkv->hv", queries, state) + p["D"][:, None] * v[t])
    y = np.stack(rows).reshape(7, 12) * silu(z)
    grouped = y.reshape(7, 2, 6)
    y = (grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + 1e-5)).reshape(7, 12) * p["norm"]["scale"]
    np.testing.assert_allclose(found[0], y @ p["out_proj"]["kernel"] + p["out_proj"]["bias"], rtol=1e-4, atol=1e-5)
