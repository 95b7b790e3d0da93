"""Checks where traces are cut into the calls of blocks. This module tests zerojax.zero.blocks.trace_segments."""

import jax
import jax.numpy as jnp
import pytest

from zerojax.zero.blocks import trace_segments
from zerojax.zero.blocks.trace_segments import OUTSIDE, TraceValue

WIDTH = 4
BLOCKS = "abc"


def cut(loss):
    """Returns the segments of a loss of blocks a, b and c, of a weight in none, and of x: their blocks with the names of their operations;
    and the weights that are read together with those of other blocks."""
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = {name: {"up": matrix, "down": matrix} for name in BLOCKS}
    program = jax.make_jaxpr(lambda *leaves: loss(*jax.tree.unflatten(structure, leaves)))
    leaves, structure = jax.tree.flatten((params, matrix, matrix))
    paths = [f"{name}/{leaf}" for name in BLOCKS for leaf in ("down", "up")]
    inputs = [
        *(TraceValue(matrix, path[0], path) for path in paths),
        TraceValue(matrix, OUTSIDE, "other"),
        TraceValue(matrix),
    ]
    whole = {}
    found = trace_segments.read(program(*leaves), inputs, whole)
    names = [operation.eqn.primitive.name for operation in found.operations]
    return [(own.blocks, names[own.start : own.stop]) for own in trace_segments.of_blocks(found)], whole


def layer(own, x):
    x = x - x.mean(-1, keepdims=True)  # before the first weight of a layer
    return x + jnp.tanh(x @ own["up"]) @ own["down"]  # the sum is behind its last one


def test_layers_are_cut_where_the_fewest_bytes_pass():
    def loss(params, other, x):
        x = jnp.sin(x @ other)
        for name in BLOCKS:
            x = layer(params[name], x)
        return jnp.exp(x).sum()

    segments, whole = cut(loss)
    operations = ["reduce_sum", "broadcast_in_dim", "div", "sub", "dot_general", "tanh", "dot_general", "add"]
    assert segments == [([name], operations) for name in BLOCKS] and not whole


def test_what_is_made_of_weights_alone_is_made_in_the_segments_that_read_it():
    def loss(params, other, x):
        params = jax.tree.map(lambda leaf: jnp.tanh(leaf).T.astype(jnp.bfloat16), params)
        for name in BLOCKS:
            x = layer(params[name], x)
        return x.sum()

    segments, whole = cut(jax.jit(loss))
    assert [blocks for blocks, _ in segments] == [["a"], ["b"], ["c"]] and not whole
    assert all("transpose" not in names for _, names in segments)


@pytest.mark.parametrize(
    ("call", "blocks"),
    [
        (lambda a, b, x: layer(a, layer(b, layer(a, x))), [["a"], ["b"], ["a"]]),
        (lambda a, b, x: layer(a, layer(a, layer(b, x))), [["b"], ["a"], ["a"]]),  # one after the other
        (lambda a, b, x: (x @ a["up"] + x @ b["up"]) @ a["down"] @ b["down"], [["a", "b"]]),  # in turns
        (lambda a, b, x: layer(b, x @ a["up"]) @ a["down"], [["a"], ["b"], ["a"]]),  # a whole call between
        (lambda a, b, x: x @ (2 * a["up"]) + x @ a["up"] + layer(b, x), [["a"], ["b"]]),
    ],
)
def test_calls_of_blocks_that_share_weights_or_read_them_in_turns(call, blocks):
    segments, whole = cut(lambda params, other, x: call(params["a"], params["b"], x).sum())
    assert [own for own, _ in segments] == blocks and not whole


def test_weights_that_one_operation_reads_with_those_of_other_blocks_are_in_none():
    def loss(params, other, x):
        stack = jnp.stack([params["a"]["up"], params["b"]["up"]])
        return (layer(params["c"], x) @ params["a"]["down"] @ stack).sum()

    segments, whole = cut(loss)
    assert [blocks for blocks, _ in segments] == [["c"], ["a"]]
    assert whole.keys() == {"a/up", "b/up"} and all(__file__ in line for line in whole.values())


def test_a_checkpoint_of_several_blocks_is_read_and_one_of_a_block_is_an_operation_of_it():
    def loss(params, other, x):
        x = jax.checkpoint(lambda params, x: layer(params["b"], layer(params["a"], x)))(params, x)
        return jax.checkpoint(layer)(params["c"], x).sum()

    segments, whole = cut(loss)
    assert [blocks for blocks, _ in segments] == [["c"]] and not whole
    assert "checkpoint" in segments[0][1] or "remat2" in segments[0][1]
