"""Checks marks of matmuls and of arrays for the host. This module tests zerojax.zero.blocks.marks."""

import collections
from typing import Any, NamedTuple

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from zerojax.errors import UserError
from zerojax.zero.blocks import block_settings, marks, remat

X, W = jnp.ones((3, 4)), jnp.ones((4, 5))


def test_naming_for_the_host_keeps_the_tree():
    class Pair(NamedTuple):
        first: Any
        second: Any

    parts: dict = {"z": X, "a": 1, 3: Pair(None, [X, "word"])}
    for value in (parts, collections.OrderedDict(parts), flax.core.FrozenDict({"z": X, "a": X})):
        named = marks.for_host(value)
        assert type(named) is type(value) and list(named) == list(value)
    assert isinstance(marks.for_host(parts)[3], Pair) and marks.for_host(parts)[3].second[1] == "word"
    assert marks.for_host("word") == "word" and marks.for_host(None) is None

    def arrays(x):
        return [
            leaf
            for leaf in jax.tree.leaves(marks.for_host((x, Pair(None, [x, "word"]))))
            if isinstance(leaf, jax.Array)
        ]

    assert str(jax.make_jaxpr(arrays)(X)).count(marks.HOST) == 2


def test_of_a_module_the_result_of_its_call_alone_is_named():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.weight()

        def weight(self):
            return self.param("w", nn.initializers.ones, W.shape)

    named = marks.Modules(block_settings.Blocks("block", offload="block/net"))

    def run(x):
        with nn.intercept_methods(
            lambda call, args, kwargs, context: named.call("block/net", call, args, kwargs, context.module)
        ):
            return Net().apply({"params": {"w": W}}, x)

    assert str(jax.make_jaxpr(run)(X)).count(marks.HOST) == 1


def test_marks_reach_matmuls_in_functions_that_are_called_or_mapped():
    """In jitted functions, loops, branches and checkpoints, and under vmap."""

    def wrapped(x, w):
        y = jax.jit(jnp.dot)(x, w)
        y = y + jax.checkpoint(jnp.dot)(x, w)
        y = y + jax.lax.cond(x[0, 0] > 0, jnp.dot, lambda x, w: jnp.dot(x, 2 * w), x, w)
        return y + jax.lax.scan(lambda carry, _: (carry + jnp.dot(x, w), None), y, length=2)[0]

    def f(x, w):
        [y] = marks.not_kept(lambda: [wrapped(x, w)])
        return jnp.sum(jnp.tanh(y) ** 2)

    for loss in (f, lambda x, w: jnp.sum(jax.vmap(f, (0, None))(jnp.stack([x, x]), w))):
        found = jax.eval_shape(lambda x, w: jax.vjp(jax.checkpoint(loss, policy=remat.REMAT["dots"]), x, w)[1], X, W)  # noqa: B023
        assert not [leaf.shape for leaf in jax.tree.leaves(found) if leaf.shape[-2:] == (3, 5)]


def test_a_matmul_with_a_dot_algorithm_takes_no_mark():
    with pytest.raises(UserError, match=r"^recompute: a matmul .* has the dot algorithm .*F32_F32_F32"):
        marks.not_kept(lambda: [jnp.dot(X, W, precision="F32_F32_F32")])


@pytest.mark.parametrize("name", ["dots", "full"])
def test_arrays_named_for_the_host_are_kept_there_and_not_on_the_device(name):
    def f(x, w):
        y, said = marks.for_host((x @ w, "word"))
        assert said == "word"
        return jnp.sum(jnp.tanh(y) ** 2)

    policy = marks.Offloads(remat.policy(name))
    assert marks.without_offload(policy) is marks.without_offload(remat.REMAT[name]) is remat.REMAT[name]
    found = []

    def look(x, w):
        for leaf in jax.tree.leaves(jax.vjp(jax.checkpoint(f, policy=policy), x, w)[1]):
            if leaf.shape not in (X.shape, W.shape):
                found.append((leaf.shape, jax.typeof(leaf).memory_space))

    jax.eval_shape(look, X, W)
    assert found == [((3, 5), jax.memory.Space.Host)]
    assert remat.policy(name) is remat.REMAT[name]
