"""Checks the kernels of a trace against sums by hand. This module tests zerojax.plan.traced."""

import jax
import jax.numpy as jnp
import pytest

from zerojax.clock import kernels, rates
from zerojax.plan import traced

H200 = rates.of("h200")


def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_trace_has_the_kernels_of_its_matmuls_and_the_bytes_of_the_rest():
    def run(x, w, v):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ v), x @ w)

    found = traced.kernels(jax.make_jaxpr(run)(like(64, 32), like(32, 16), like(16, 16)))
    matmuls = {work.dims: times for work, times in found.items() if work.kind == kernels.MATMUL}
    assert matmuls == {(1, 64, 16, 32): 1.0, (1, 64, 16, 16): 3.0}
    (rest,) = [work.nbytes for work in found if work.kind == kernels.ELEMENTWISE]
    assert rest >= traced.STORED * 3 * 2 * 64 * 16 * 2, "three times tanh, written and read"


def test_devices_that_share_a_matmul_have_all_its_tokens():
    work = kernels.KernelWork(kernels.MATMUL, "bf16", 2.0 * 8192 * 4096 * 14336, 0.0, (1, 8192, 14336, 4096))
    own = traced.shared(work, 8)
    assert own.dims == (1, 8192, 14336 // 8, 4096) and own.flops == work.flops / 8
    one, eight = (traced.seconds({work: 1.0}, H200, ways) for ways in (1, 8))
    assert one / 8 <= eight < one / 6


def test_an_operation_of_a_pass_costs_what_the_programs_inside_it_do():
    inner = jax.jit(lambda x, w: x @ w)
    outer = jax.make_jaxpr(lambda x, w: inner(inner(x, w), w))(like(4096, 4096), like(4096, 4096))
    cost = traced.cost(H200)
    assert sum(map(cost, outer.jaxpr.eqns)) == pytest.approx(2 * cost(outer.jaxpr.eqns[0]), rel=1e-6)
    assert cost(outer.jaxpr.eqns[0]) == pytest.approx(2.0 * 4096**3 / H200.figures["matmul.bf16.4096"], rel=0.2)
