"""Checks which calls are taken for blocks and how they run. This module tests zerojax.zero.blocks.intercept."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.zero.blocks import block_settings, intercept, remat


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="dense")(x)


class Block(nn.Module):
    """Its own weight is made in `setup`, which runs before the call."""

    rate: float = 0.0

    def setup(self):
        self.scale = self.param("scale", nn.initializers.ones, (4,))
        self.inner = Inner()
        self.dropout = nn.Dropout(self.rate, deterministic=self.rate == 0)

    def __call__(self, x, factor=1.0):
        y = self.inner(x) * self.scale * factor
        return self.dropout(y)


class Shares(nn.Module):
    """Uses a module that lives elsewhere."""

    other: nn.Module

    def __call__(self, x):
        return self.other(x)


class Net(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        first = Block(self.rate, name="block_0")
        x = first(x)
        x = Block(self.rate, name="block_1")(x, factor=2.0)
        return Shares(first, name="shares_0")(x)


X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def apply(
    rate=0.0, pattern=r"block_\d", heads="", stored=lambda leaf: leaf, used=lambda leaf: leaf, run=True, **options
):
    """Returns the output, with weights stored as `stored` says and `used` their inverse, and the calls of `run`: (paths, policy)."""
    net, plain = Net(rate), []
    params = net.init(jax.random.key(0), X)["params"]

    def run_block(body, params, arrays, policy, own):
        plain.append((sorted(params), policy))
        return body({path: used(leaf) for path, leaf in params.items()}, *arrays)

    how = block_settings.Blocks(pattern, heads, **options)
    found = intercept.Interceptor(how, lambda _, leaf: used(leaf), remat.REMAT["dots"], run=run_block if run else None)
    given = {
        name: jax.tree.map(stored, part) if found.owns(f"params/{name}/x") else part for name, part in params.items()
    }
    with found.intercepting():
        output = net.apply({"params": given}, X, rngs={"dropout": jax.random.key(1)} if rate else None)
    expected = net.apply({"params": params}, X, rngs={"dropout": jax.random.key(1)} if rate else None)
    np.testing.assert_allclose(output, expected, rtol=1e-6)
    return found, plain


@pytest.mark.parametrize("run", [True, False])
def test_blocks_find_their_weights_in_another_shape(run):
    """The shape of a sharded weight is not the one that the module's own `setup` expects."""
    found, plain = apply(stored=lambda leaf: leaf[None], used=lambda leaf: leaf[0], run=run)
    assert found.entered == {"block_0", "block_1"}
    assert len(plain) == (3 if run else 0)  # block_0 is called twice
    if run:
        paths = [f"block_0/{leaf}" for leaf in ("inner/dense/bias", "inner/dense/kernel", "scale")]
        assert plain[0][0] == paths


def test_a_plain_block_draws_what_it_draws_without_interception_also_when_it_is_called_twice():
    found, plain = apply(rate=0.5)  # compares the outputs
    assert found.entered == {"block_0", "block_1"} and len(plain) == 3


def test_a_call_inside_a_plain_block_is_not_intercepted_unless_modules_are_named(monkeypatch):
    seen, intercepted = set(), intercept.Interceptor._intercept

    def noted(self, call, args, kwargs, context):
        seen.add("/".join(context.module.path))
        return intercepted(self, call, args, kwargs, context)

    monkeypatch.setattr(intercept.Interceptor, "_intercept", noted)
    apply()
    assert seen == {"", "block_0", "block_1", "shares_0"}
    apply(recompute="block_1/inner/dense")
    assert "block_1/inner/dense" in seen


def test_a_block_that_shares_a_module_is_not_plain():
    found, plain = apply(pattern="shares_0")
    assert found.entered == {"shares_0"} and not plain


def test_heads_are_blocks_without_rematerialisation():
    _, plain = apply(pattern="block_0", heads="block_1")
    assert [policy is None for _, policy in plain] == [False, True, False]


def test_only_full_paths_match_and_the_outermost_wins():
    found, _ = apply(pattern=r"block_\d(/inner)?")
    assert found.entered == {"block_0", "block_1"}
    found, _ = apply(pattern="inner", run=False)
    assert not found.entered
    assert apply(pattern=".*")[0].entered == {"block_0", "block_1", "shares_0"}  # the model itself is none
    assert found.owns("params/inner/dense/kernel") and not found.owns("params/block_0/inner/dense/kernel")


def test_matmuls_of_named_modules_are_marked():
    found, _ = apply(recompute=r"block_1/inner/dense", offload=r"block_0/inner(/dense)?")
    assert found.marks.recomputed == {"block_1/inner/dense"}
    assert found.marks.offloaded == {"block_0/inner", "block_0/inner/dense"}
    found, _ = apply(heads="block_1", recompute=".*/dense", offload=".*/inner")  # heads keep all that they compute
    assert (found.marks.recomputed, found.marks.offloaded) == ({"block_0/inner/dense"}, {"block_0/inner"})
