"""Checks the bytes that programs read and write against counts by hand."""

import jax
import jax.numpy as jnp

from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import syntax, traffic


def moved(function, *shapes, donate=(), dtypes=None):
    arrays = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes or [jnp.float32] * len(shapes))]
    text = jax.jit(function, donate_argnums=donate).lower(*arrays).compile().as_text()
    return traffic.memory_traffic(hlo_flow.flow(syntax.parse(text)))


def test_one_pass_over_an_array_reads_and_writes_it_once():
    assert moved(lambda x: x * 2 + 1, (512, 512)) == 2 * 4 * 512 * 512
    assert moved(lambda x, y: x * y, (512, 512), (512, 512)) == 3 * 4 * 512 * 512


def test_of_a_table_that_is_converted_only_the_rows_that_are_looked_up_are_read():
    rows, width, looked_up = 4096, 512, 16
    found = moved(
        lambda table, row: table.astype(jnp.float32)[row] * 2,
        (rows, width),
        (looked_up,),
        dtypes=(jnp.bfloat16, jnp.int32),
    )
    assert found == looked_up * (2 * width + 4 * width + 4)


def test_a_table_that_is_converted_and_updated_is_read_whole():
    rows, width = 4096, 512
    found = moved(
        lambda table, new: jax.lax.dynamic_update_slice(table.astype(jnp.float32), new, (3, 0)),
        (rows, width),
        (1, width),
        dtypes=(jnp.bfloat16, jnp.float32),
    )
    assert found >= 2 * rows * width


def test_the_workspace_of_a_library_is_not_moved():
    text = """HloModule m, is_scheduled=true

ENTRY %main (a: bf16[256,128], b: bf16[128,64]) -> (bf16[256,64], s8[33554432]) {
  %a = bf16[256,128]{1,0} parameter(0)
  %b = bf16[128,64]{1,0} parameter(1)
  ROOT %c = (bf16[256,64]{1,0}, s8[33554432]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm"
}
"""
    assert traffic.memory_traffic(hlo_flow.flow(syntax.parse(text))) == 2 * (256 * 128 + 128 * 64 + 256 * 64)


def test_a_loop_that_reads_slices_moves_only_the_slices():
    def sums(x):
        return jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(x.shape[1]), x)[0]

    rows, width = 64, 4096
    array = 4 * rows * width
    # Each row moves a few times. If each iteration moved the array, the traffic would be 64 x.
    assert array < moved(sums, (rows, width)) < 8 * array
