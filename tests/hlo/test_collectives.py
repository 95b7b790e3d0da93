import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from zerojax.hlo import collectives, syntax
from zerojax.hlo import flow as hlo_flow

DATA = "replica_groups={{0,1,2,3,4,5,6,7}}"
ALONE = "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}"
PAIR = "((bf16[8,8], bf16[4]), (bf16[64,8], bf16[32]))"
TWO_GATHERS = 'metadata={op_name="jit(f)/(one/mul:two/mul)"}'
TWO_SUMS = 'metadata={op_name="jit(f)/(one/sum:two/sum)"}'
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'

PROGRAM = f"""
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}}

%gemm (p: bf16[8,8]) -> bf16[8,8] {{
  %p = bf16[8,8] parameter(0)
  ROOT %d = bf16[8,8] dot(%p, %p)
}}

%joined (q: bf16[64], r: bf16[32]) -> bf16[96] {{
  %q = bf16[64] parameter(0)
  %r = bf16[32] parameter(1)
  ROOT %cat = bf16[96] concatenate(%q, %r), dimensions={{0}}
}}

%wrapped (g: bf16[64,4]) -> bf16[8,4] {{
  %g = bf16[64,4] parameter(0)
  ROOT %inner = bf16[8,4] reduce-scatter(%g), channel_id=4, {DATA}, dimensions={{0}}, to_apply=%add
}}

ENTRY %main (a: bf16[8,8], b: bf16[4], c: bf16[64,4]) -> f32[] {{
  %a = bf16[8,8] parameter(0)
  %b = bf16[4] parameter(1)
  %c = bf16[64,4] parameter(2)
  %ag = {PAIR} all-gather-start(%a, %b), channel_id=1, {DATA}, dimensions={{0}}, {TWO_GATHERS}
  %work = bf16[8,8] fusion(%a), kind=kCustom, calls=%gemm
  %free = bf16[8,8] bitcast(%work)
  %ag.done = (bf16[64,8], bf16[32]) all-gather-done(%ag)
  %rs = ((bf16[64,4]), bf16[8,4]) async-start(%c), calls=%wrapped
  %copied = bf16[8,8] copy(%work)
  %rs.done = bf16[8,4] async-done(%rs)
  %flat.a = bf16[64] bitcast(%work), metadata={{op_name="jit(f)/x"}}
  %wide = bf16[32] fusion(%b), kind=kLoop, calls=%gemm
  %flat = bf16[96] fusion(%flat.a, %wide), kind=kLoop, calls=%joined
  %ar = bf16[96] all-reduce(%flat), channel_id=2, {DATA}, to_apply=%add, {TWO_SUMS}, {SYNC}
  %alone = bf16[8,8] all-reduce(%work), {ALONE}, to_apply=%add
  %cp = (bf16[8,8], bf16[8,8], u32[], u32[]) collective-permute-start(%work), {RING}
  %cp.done = bf16[8,8] collective-permute-done(%cp)
  ROOT %loss = f32[] constant(0)
}}
"""


@pytest.fixture
def found():
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("data",), axis_types=(AxisType.Auto,))
    listed = collectives.collectives(hlo_flow.flow(syntax.parse(PROGRAM)), mesh)
    return {each.start.name: each for each in listed}


def test_collectives_over_one_device_are_omitted(found):
    assert set(found) == {"ag", "inner", "ar", "cp"}
    assert all(each.axes == ("data",) and each.ways == 8 for each in found.values())


def test_a_combined_gather_lists_each_output_once(found):
    parts = found["ag"].parts
    assert [(p.number, p.taken.dims, p.given.dims, p.op_name) for p in parts] == [
        (0, (8, 8), (64, 8), "jit(f)/one/mul"),
        (1, (4,), (32,), "jit(f)/two/mul"),
    ]


def test_work_between_start_and_done_is_counted_by_kind(found):
    assert found["ag"].is_async and found["ag"].overlaps == {"matmul": 1}


def test_the_done_of_a_wrapper_is_in_the_computation_that_starts_it(found):
    inner = found["inner"]
    assert inner.kind == "reduce-scatter" and inner.is_async
    assert inner.overlaps == {"copy": 1}
    assert (inner.where.name, inner.result) == ("main", "rs.done")
    assert [p.taken.dims for p in inner.parts] == [(64, 4)]


def test_a_flat_buffer_is_listed_as_the_arrays_that_it_concatenates(found):
    assert [(p.number, p.taken.dims, p.value, p.op_name) for p in found["ar"].parts] == [
        (None, (8, 8), "work", "jit(f)/one/sum"),
        (None, (32,), "wide", "jit(f)/two/sum"),
    ]


def test_a_synchronous_collective_overlaps_nothing(found):
    assert not found["ar"].is_async and found["ar"].overlaps == {}


def test_a_permute_counts_its_output_and_not_its_flags(found):
    assert [p.given.dims for p in found["cp"].parts] == [(8, 8)]


def test_a_fusion_that_keeps_a_slice_of_an_all_reduce_is_a_reduce_scatter_with_the_name_of_its_sum():
    """So does libtpu compile it. What follows the fusion has its name too, such as the permutes that shift its rows."""
    text = f"""
HloModule jit_step, is_scheduled=true

%add (x: bf16[], y: bf16[]) -> bf16[] {{
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %xy = bf16[] add(%x, %y), metadata={{op_name="transpose(jvp(Net))/up/kernel/add"}}
}}

%inside (g: bf16[64,4]) -> bf16[8,4] {{
  %g = bf16[64,4] parameter(0)
  %sum = bf16[64,4] all-reduce(%g), channel_id=4, {DATA}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %mine = bf16[8,4] dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={{8,4}}
}}

ENTRY %main (c: bf16[64,4]) -> bf16[8,4] {{
  %c = bf16[64,4] parameter(0)
  %rs = bf16[8,4] fusion(%c), kind=kCustom, calls=%inside
  ROOT %cp = bf16[8,4] collective-permute(%rs), channel_id=5, source_target_pairs={{{{0,1}},{{1,0}}}}
}}
"""
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("data",), axis_types=(AxisType.Auto,))
    only, permute = collectives.collectives(hlo_flow.flow(syntax.parse(text)), mesh)
    assert only.kind == "reduce-scatter"
    assert [(p.taken.dims, p.given.dims) for p in only.parts] == [((64, 4), (8, 4))]
    assert {part.op_name for part in (*only.parts, *permute.parts)} == {"transpose(jvp(Net))/up/kernel/reduce_scatter"}


@pytest.mark.parametrize(
    "opcode, attributes, kind",
    [
        ("custom-call", 'custom_call_target="__cudnn$fmhaSoftmax"', "attention"),
        ("custom-call", 'custom_call_target="__cublas$lt$matmul$f8"', "matmul"),
        ("dot", "", "matmul"),
        ("while", "", "loop"),
        ("copy", "", "copy"),
    ],
)
def test_work_has_a_kind(opcode, attributes, kind):
    module = syntax.parse(PROGRAM)
    assert collectives.work_kind(module, syntax.Instruction("x", opcode, (), (), attributes)) == kind
