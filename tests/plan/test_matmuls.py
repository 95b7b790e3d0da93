"""Checks the dtypes of matmuls in compiled programs. This module tests zerojax.plan.matmuls, and gathers in fp8."""

import functools

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import roles
from zerojax.hlo import flow, syntax
from zerojax.ops import fp8
from zerojax.plan import findings, ledger, matmuls
from zerojax.trainer import program

DIMS = (((1,), (0,)), ((), ()))


@functools.cache
def compiled() -> ledger.Ledger:
    """Returns the ledger of a step of one layer on two H200s."""
    config = runs.config(precision="fp8", zero__min_size=0, model__remat="dots")
    built = program.build(config, tokenizer_vocab=320, devices=compile_only.gpus("h200", "1x2"))
    text = compile_only.compile_gpu(built.train_step.lower(built.partition.abstract_state, built.abstract_batch))
    return ledger.ledger(text, built.partition.mesh, built.partition.placements)


def test_all_matmuls_of_blocks_run_in_fp8_and_only_the_head_does_not():
    found = compiled()
    asked = [matmul for matmul in found.matmuls if matmul.wants_fp8]
    assert {matmul.kind for matmul in asked} == {matmuls.FP8}
    assert len(asked) == 7 * 3 - 3  # XLA merges small matmuls of one input: q, k and v, and gate and up
    others = [matmul for matmul in found.matmuls if not matmul.wants_fp8]
    assert len(others) == 3 and all("head.loss" in matmul.op_name for matmul in others)
    assert matmuls.counts(found.matmuls) == {"fp8": 18, "16 bits": 3}
    assert not [finding for finding in findings.findings(found) if "fp8" in finding.rule]


def test_on_gpus_the_weights_of_fp8_matmuls_are_sent_in_8_bits_and_their_scales_at_once():
    found = compiled()
    gathers = [row for row in found.rows if row.kind == "all-gather"]
    in_fp8 = {path for row in gathers if row.dtype == "f8e4m3fn" for path in row.weights}
    assert in_fp8 == {path for path in found.weights if "layer_0" in path and path.endswith("kernel")}
    for role in (roles.WEIGHTS_FORWARD, roles.WEIGHTS_BACKWARD):
        sent = sum(row.nbytes for row in gathers if row.dtype == "f8e4m3fn" and row.role == role)
        assert sent == sum(found.weights[path].size for path in in_fp8) // 2  # half of the bytes, from the other device
    maxima = [row for row in found.rows if row.kind == "all-reduce" and "fp8_scales" in row.op_name]
    assert [(row.dtype, row.dims) for row in maxima] == [("f32", (7,))]


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
