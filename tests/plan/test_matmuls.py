"""Checks the dtypes of matmuls in compiled programs. This module tests zerojax.plan.matmuls."""

import compile_only
import fp8_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.hlo import flow, syntax
from zerojax.ops import fp8
from zerojax.plan import findings, ledger, matmuls

DIMS = (((1,), (0,)), ((), ()))


def test_all_matmuls_of_blocks_run_in_fp8_and_only_the_head_does_not():
    found = fp8_programs.compiled()
    asked = [matmul for matmul in found.matmuls if matmul.wants_fp8]
    assert {matmul.kind for matmul in asked} == {matmuls.FP8}
    assert len(asked) == 7 * 3 - 3  # XLA merges small matmuls of one input: q, k and v, and gate and up
    others = [matmul for matmul in found.matmuls if not matmul.wants_fp8]
    assert len(others) == 3 and all("head.loss" in matmul.op_name for matmul in others)
    assert matmuls.counts(found.matmuls) == {"fp8": 18, "16 bits": 3}
    assert not [finding for finding in findings.findings(found) if "fp8" in finding.rule]


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("is_dequantised", [False, True])
def test_the_kinds_of_a_programs_matmuls_are_those_in_which_they_run(is_dequantised, triton):
    """By default XLA runs a matmul of dequantised arrays in 16 bits, inside a Triton fusion. A finding names it."""
    on = Mesh(np.asarray(compile_only.devices(1)[:1]), ("data",))
    leaf = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=NamedSharding(on, P()))

    def multiply(x, w):
        if not is_dequantised:
            return fp8.dot_general(x, w, DIMS)
        with jax.named_scope(fp8.SCOPE):
            scaled = [fp8.quantized(array, fp8.FORWARD, fp8.scale_of(array, fp8.FORWARD)) for array in (x, w)]
            return jax.lax.dot_general(
                *[a.values.astype(jnp.bfloat16) * a.scale.astype(jnp.bfloat16) for a in scaled], DIMS
            )

    options = {**compile_only.FAST, "xla_gpu_enable_triton_gemm": triton}
    with compile_only.optimized():
        text = jax.jit(multiply).lower(leaf, leaf).compile(compiler_options=options).as_text()
    found = ledger.ledger(text, on, {})
    in_16_bits = is_dequantised and triton
    assert [(m.kind, m.wants_fp8) for m in found.matmuls] == [("16 bits" if in_16_bits else "fp8", True)]
    rules = [finding for finding in findings.findings(found) if "fp8" in finding.rule]
    assert len(rules) == in_16_bits
    assert all("1 of 1 matmuls run in 16 bits" in f.amount and "test_matmuls.py" in f.where for f in rules)


def test_matmuls_of_loops_count_each_time_and_integers_are_not_fp8():
    def loop(x, w):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, length=5)[0], jax.lax.dot(
            x.astype(jnp.int8), w.astype(jnp.int8), preferred_element_type=jnp.int32
        )

    text = jax.jit(loop).lower(jnp.ones((8, 8)), jnp.ones((8, 8))).compile().as_text()
    counted = matmuls.counts(matmuls.matmuls(flow.flow(syntax.parse(text))))
    assert counted == {"8 bits": 1, "32 bits": 5}
