"""Checks what XLA makes of a mixture whose experts live on four devices, compiled for absent GPUs. This module tests
zerojax.ops.expert_parallel."""

import functools
import re

import compile_only
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped
from zerojax import mesh as mesh_lib
from zerojax.clock import kernels
from zerojax.hlo import collectives, flow, syntax
from zerojax.ops import expert_parallel, experts
from zerojax.zero.step_programs import xla_options

WAYS, TOKENS, DIM, WIDTH, EXPERTS, TOP = 4, 1024, 512, 256, 16, 4
ROWS = TOKENS * TOP
FLOPS, MEMORY = 1.05, 1.5  # over what is needed: the bar


@functools.cache
def compiled(load, parts):
    """Returns the program of a mixture's forward and backward pass, with an expert that all tokens take, and its collectives."""
    mesh = mesh_lib.make_mesh(expert=WAYS, devices=compile_only.devices()[:WAYS])

    def mixture(x, logits, first, second, *matrices):
        with expert_parallel.used():
            shares = [expert_parallel.Stack(own, ("expert",), (P(),), load, parts) for own in matrices]
            seen = [expert_parallel.add(str(number), share) for number, share in enumerate(shares)]
            return experts.apply(x, experts.route(logits, TOP), *seen) + jax.nn.silu(x @ first) @ second

    def both(*arrays):
        y, pull = jax.vjp(mixture, *arrays)
        return y, *pull(jnp.tanh(y))

    def abstract(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("expert")))

    inputs = abstract(WAYS * TOKENS, DIM), abstract(WAYS * TOKENS, EXPERTS, dtype=jnp.float32)
    shared = [abstract(WAYS * DIM, DIM)] * 2
    matrices = abstract(EXPERTS, DIM, WIDTH), abstract(EXPERTS, DIM, WIDTH), abstract(EXPERTS, WIDTH, DIM)
    every = (P("expert"),) * 7
    run = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=every, out_specs=P("expert"), check_vma=False))
    options = compile_only.FAST | xla_options.for_mesh(mesh)
    with compile_only.optimized(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "HOPPER", re.compile("none"))  # Triton's kernels compile faster than those of these GPUs
        program = run.lower(*inputs, *shared, *matrices).compile(compiler_options=options)
    found = flow.flow(syntax.parse(program.as_text()))
    return program, found, list(collectives.collectives(found, mesh))


def rows_sent(load, parts):
    """Returns the all-to-alls of rows, those of the forward pass and of the backward pass."""
    _, _, found = compiled(load, parts)
    large = [one for one in found if len(one.parts[0].given.dims) == 3]
    assert {(one.kind, one.axes) for one in found} == {("all-to-all", ("expert",))}
    return [[one for one in large if ("transpose" in one.start.op_name) == back] for back in (False, True)]


def test_no_row_is_multiplied_twice_and_memory_is_that_of_the_rows():
    program, found, _ = compiled(float(WAYS), 2)
    work = [
        work
        for call in found.calls.values()
        for each in call.computation.instructions
        for work in kernels.of(found.module, call.computation, each, WAYS)
        if work.kind == kernels.MATMUL
    ]
    products = [one for one in work if one.form.startswith("grouped")]
    assert len(products) == 2 * 9  # parts; three matmuls, each with two gradients
    needed = 9 * 2.0 * ROWS * DIM * WIDTH
    assert needed <= sum(one.flops for one in products) <= FLOPS * needed
    dense = 6 * 2.0 * TOKENS * DIM * DIM
    assert dense <= sum(one.flops for one in work if one not in products) <= FLOPS * dense
    # Of a room for all rows: x, gate, up and hidden are kept; their gradients, and that of the result, are there at once.
    kept = DIM + 3 * WIDTH
    room = WAYS * ROWS * 2 * (2 * kept + DIM)
    assert program.memory_analysis().temp_size_in_bytes <= MEMORY * room


def test_rows_travel_beside_the_matmuls_of_other_tokens_in_both_passes():
    forward, backward = rows_sent(float(WAYS), 2)
    assert len(forward) == len(backward) == 4
    # What has no matmul beside it is the first of each pass: there is no other yet.
    for one_pass in (forward, backward):
        beside = [bool(one.overlaps.get("matmul")) for one in one_pass]
        assert beside == [False, True, True, True]
        assert all(one.is_async for one in one_pass[1:])
    assert forward[0].is_async


@pytest.mark.long
def test_further_rounds_take_no_memory_beside_the_first():
    program, *_ = compiled(1.5, 1)
    sums = 4 * (3 * EXPERTS // WAYS * DIM * WIDTH + TOKENS * DIM)  # of all rounds, float32
    rows = 1.5 * ROWS * 2 * (2 * (DIM + 3 * WIDTH) + DIM)
    assert program.memory_analysis().temp_size_in_bytes <= MEMORY * (rows + sums)


@pytest.mark.long
def test_in_one_part_the_expert_of_all_tokens_runs_beside_the_way_back():
    forward, backward = rows_sent(float(WAYS), 1)
    assert [bool(one.overlaps.get("matmul")) for one in forward] == [False, True]
    assert [bool(one.overlaps.get("matmul")) for one in backward] == [False, True]
