"""Checks the work of kernels against counts by hand."""

import pytest

from zerojax.clock import kernels
from zerojax.hlo import flow, syntax

PROGRAM = """HloModule m, is_scheduled=true

%gated (p0: bf16[64,32], p1: bf16[64,32], p2: bf16[32,16]) -> bf16[64,16] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[64,32]{1,0} parameter(1)
  %scaled = bf16[64,32]{1,0} multiply(%p0, %p1)
  %p2 = bf16[32,16]{1,0} parameter(2)
  ROOT %dot = bf16[64,16]{1,0} dot(%scaled, %p2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%plain (p0: bf16[64,32], p2: bf16[32,16]) -> bf16[16,64] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %t = bf16[32,64]{0,1} transpose(%p0), dimensions={1,0}
  %p2 = bf16[32,16]{1,0} parameter(1)
  ROOT %dot = bf16[16,64]{1,0} dot(%p2, %t), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}

%added (p0: bf16[64,32], p2: bf16[32,16], p3: bf16[64,16]) -> bf16[64,16] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p2 = bf16[32,16]{1,0} parameter(1)
  %dot = bf16[64,16]{1,0} dot(%p0, %p2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %p3 = bf16[64,16]{1,0} parameter(2)
  ROOT %sum = bf16[64,16]{1,0} add(%dot, %p3)
}

ENTRY %main (x: bf16[64,32], y: bf16[64,32], w: bf16[32,16], z: bf16[64,16], f: f8e4m3fn[128,32]) -> bf16[64,16] {
  %x = bf16[64,32]{1,0} parameter(0)
  %y = bf16[64,32]{1,0} parameter(1)
  %w = bf16[32,16]{1,0} parameter(2)
  %z = bf16[64,16]{1,0} parameter(3)
  %f = f8e4m3fn[128,32]{1,0} parameter(4)
  %gated.1 = bf16[64,16]{1,0} fusion(%x, %y, %w), kind=kCustom, calls=%gated
  %plain.1 = bf16[16,64]{1,0} fusion(%x, %w), kind=kCustom, calls=%plain
  %added.1 = bf16[64,16]{1,0} fusion(%x, %w, %z), kind=kCustom, calls=%added
  %lt = (bf16[128,128]{1,0}, s8[1024]{0}) custom-call(%f, %f), custom_call_target="__cublas$lt$matmul$f8", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],\
"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %batched = bf16[4,16,8]{2,1,0} dot(%b, %c), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
  %host = bf16[64,32]{1,0:S(5)} parameter(5)
  %there = (bf16[64,32]{1,0:S(5)}, bf16[64,32]{1,0}, u32[]) copy-start(%x)
  %back = (bf16[64,32]{1,0}, bf16[64,32]{1,0:S(5)}, u32[]) copy-start(%host)
  %here = bf16[64,32]{0,1} copy(%x)
  %gather = (bf16[64,32]{1,0}, bf16[256,32]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %scatter = bf16[16,32]{1,0} reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
  %reduce = bf16[64,32]{1,0} all-reduce(%x), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%sum
  %alone = bf16[64,32]{1,0} all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%sum
  %b = bf16[4,16,32]{2,1,0} parameter(6)
  %c = bf16[4,32,8]{2,1,0} parameter(7)
  %fmha = (bf16[2,4,128,64]{3,1,2,0}, f32[2,4,128]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions": ["2", "4", "128", "256"]}, \
"mask_type": "CAUSAL", \
"sliding_window_length": 0}}, unknown={}
  %rows = bf16[64,16]{1,0} custom-call(%t, %x, %experts), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(step)/cond/branch_0_fun/grouped_rows/pallas_call"}
  %matrices = bf16[4,32,16]{2,1,0} custom-call(%t, %x, %z), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(step)/cond/branch_0_fun/grouped_matrices/pallas_call"}
  %narrow = bf16[64,16]{1,0} custom-call(%t, %x8, %experts8), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/fp8_matmul/jit(grouped_rows)/pallas_call"}
  %ordered = bf16[64,2,16]{2,1,0} parameter(16)
  %in_order = bf16[64,32]{1,0} bitcast(%ordered)
  %packed = bf16[64,16]{1,0} custom-call(%t, %exponents4, %in_order, %experts4), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(step)/cond/branch_1_fun/jit(rows)/grouped_rows_mxfp4/pallas_call"}
  %exponents4 = u8[4,16,1]{2,1,0} parameter(14)
  %experts4 = u8[4,16,16]{2,1,0} parameter(15)
  %x8 = f8e4m3fn[64,32]{1,0} parameter(12)
  %experts8 = f8e4m3fn[4,16,32]{2,1,0} parameter(13)
  %t = s32[4]{0} parameter(10)
  %experts = bf16[4,32,16]{2,1,0} parameter(11)
  %q = bf16[2,128,4,64]{3,2,1,0} parameter(8)
  %k = bf16[2,256,4,64]{3,2,1,0} parameter(9)
  %codes = f8e4m3fn[128,32]{1,0} parameter(12)
  %bytes = s8[4096]{0} bitcast(%codes)
  %scales = bf16[64]{0} parameter(13)
  %cache = bf16[2,256,4,64]{3,2,1,0} parameter(14)
  %product = (bf16[32]{0}, bf16[2,256,4,64]{3,2,1,0}, f32[128]{0}) custom-call(%bytes, %scales, %cache), \
custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{1}: (2, {})}, \
metadata={op_name="jit(_decode)/one_token_product/pallas_call"}, backend_config={ir = "{0}: (1, {})"}
  %few = f32[8,32]{1,0} custom-call(%codes, %scales), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(_decode)/jit(_parts)/narrow_matmul/pallas_call"}
  %seen = f32[2,4,64]{2,1,0} custom-call(%cache, %cache), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(_decode)/jit(_ranges)/cached_attention/pallas_call"}
  %wide = bf16[128,32]{1,0} convert(%codes)
  ROOT %end = bf16[64,16]{1,0} bitcast(%gated.1)
}
"""
CODES, CACHE = 128 * 32, 2 * 2 * 256 * 4 * 64  # bytes
X, W, OUT = 2 * 64 * 32, 2 * 32 * 16, 2 * 64 * 16  # bytes


@pytest.fixture(scope="module")
def found():
    module = syntax.parse(PROGRAM)
    where = flow.flow(module).calls["main"].computation
    return {one.name: kernels.of(module, where, one, 8) for one in where.instructions}


def test_a_matmul_counts_two_operations_for_each_of_its_dims(found):
    for name, dims in {"plain.1": (1, 16, 64, 32), "lt": (1, 128, 128, 32), "batched": (4, 16, 8, 32)}.items():
        (matmul,) = found[name]
        batch, m, n, k = matmul.dims
        assert matmul.kind == kernels.MATMUL and matmul.dims == dims and matmul.flops == 2 * batch * m * n * k
    assert found["lt"][0].form == "fp8" and found["batched"][0].form == "bf16"


def test_a_product_of_groups_of_rows_counts_each_row_once(found):
    for name, form in (("rows", "rows"), ("matrices", "matrices"), ("narrow", "rows.fp8"), ("packed", "rows.mxfp4")):
        (own,) = found[name]
        assert (own.kind, own.form) == (kernels.MATMUL, f"grouped_{form}")
        assert own.dims == (4, 64, 16, 32) and own.flops == 2 * 64 * 16 * 32


def test_elementwise_work_inside_of_a_matmuls_fusion_is_a_kernel_apart_and_moves_are_none(found):
    before, matmul = found["gated.1"]
    assert (before.kind, before.form, before.nbytes) == (kernels.ELEMENTWISE, kernels.FUSED, 3 * X)
    assert matmul.nbytes == X + W + OUT
    after, _ = found["added.1"]
    assert after.nbytes == 2 * OUT  # what is added is read, and the sum is written


def test_copies_between_device_and_host_have_a_direction_and_others_are_kernels(found):
    directions = {name: [(kernel.kind, kernel.nbytes) for kernel in found[name]] for name in ("there", "back", "here")}
    assert directions == {
        "there": [(kernels.TO_HOST, X)],
        "back": [(kernels.FROM_HOST, X)],
        "here": [(kernels.ELEMENTWISE, 2 * X)],
    }


def test_a_collective_counts_the_bytes_that_a_device_receives_of_a_ring(found):
    gather, scatter, reduce = (found[name][0] for name in ("gather", "scatter", "reduce"))
    assert (gather.form, gather.nbytes, gather.group) == ("all-gather", 3 * X, (0, 1, 2, 3))
    assert (scatter.form, scatter.nbytes) == ("reduce-scatter", 3 / 4 * X)
    assert (reduce.form, reduce.nbytes, reduce.group) == ("all-reduce", 2 * 3 / 4 * X, (0, 2, 4, 6))
    assert found["alone"] == ()


def test_causal_attention_counts_half_of_its_scores(found):
    (attention,) = found["fmha"]
    assert (attention.kind, attention.form, attention.dims) == (kernels.ATTENTION, "forward", (2, 4, 128, 256, 64))
    assert attention.flops == 2 * (2 * 2 * 4 * 128 * 256 * 64) / 2


def test_what_moves_nothing_is_no_kernel(found):
    assert found["x"] == found["end"] == ()


def test_kernels_of_a_token_count_what_they_stream_and_name_how_a_weight_is_stored(found):
    """The cache that `product` adds a token to is not read, and its codes in fp8 are given as bytes."""
    (product,), (few,), (seen,), (wide,) = (found[name] for name in ("product", "few", "seen", "wide"))
    assert (product.kind, product.form, product.nbytes) == (
        kernels.MATMUL,
        "one_token.fp8",
        CODES + 2 * 64 + 2 * 32 + 4 * 128,
    )
    assert (few.kind, few.form, few.nbytes) == (kernels.MATMUL, "narrow.fp8", CODES + 2 * 64 + 4 * 8 * 32)
    assert (seen.kind, seen.form, seen.nbytes) == (kernels.ATTENTION, "cached", 2 * CACHE + 4 * 2 * 4 * 64)
    assert (wide.kind, wide.form, wide.nbytes) == (kernels.ELEMENTWISE, kernels.DEQUANTIZED, 3 * CODES)
