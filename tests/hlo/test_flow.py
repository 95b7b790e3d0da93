import jax
import jax.numpy as jnp
import pytest

from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import syntax

LOOP = """
HloModule jit_step, is_scheduled=true

%cond (p: (s32[], f32[8], f32[4,8])) -> pred[] {
  %p = (s32[], f32[8], f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant(7)
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

%body (p: (s32[], f32[8], f32[4,8])) -> (s32[], f32[8], f32[4,8]) {
  %p = (s32[], f32[8], f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = f32[8] get-tuple-element(%p), index=1
  %kept = f32[4,8] get-tuple-element(%p), index=2
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %w16 = bf16[8] convert(%w)
  %whole = bf16[64] all-gather(%w16), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %y = f32[8] dot(%whole, %w), metadata={op_name="jit(f)/jvp(N)/dot"}
  %row = f32[1,8] reshape(%w)
  %stack = f32[4,8] dynamic-update-slice(%kept, %row, %i, %two)
  ROOT %out = (s32[], f32[8], f32[4,8]) tuple(%next, %w, %stack)
}

ENTRY %main (weight: f32[8]) -> f32[4,8] {
  %weight = f32[8] parameter(0), metadata={op_name="params['w']"}
  %start = s32[] constant(1)
  %zero = f32[] constant(0)
  %zeros = f32[4,8] broadcast(%zero), dimensions={}
  %moved = f32[8] copy(%weight)
  %init = (s32[], f32[8], f32[4,8]) tuple(%start, %moved, %zeros)
  %loop = (s32[], f32[8], f32[4,8]) while(%init), condition=%cond, body=%body
  %stacked = f32[4,8] get-tuple-element(%loop), index=2
  ROOT %slice = f32[1,8] dynamic-slice(%stacked, %start, %start), dynamic_slice_sizes={1,8}
}
"""


def of(text):
    return hlo_flow.flow(syntax.parse(text))


def test_a_loops_trip_count_is_computed_from_its_counter():
    # from 1, below 7, by 2: 1, 3, 5
    assert of(LOOP).calls["body"].times == 3


def test_a_known_trip_count_is_used():
    known = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"12"}}')
    assert of(known).calls["body"].times == 12


def test_a_condition_that_is_not_understood_counts_once():
    assert of(LOOP.replace("direction=LT", "direction=NE")).calls["body"].times == 1


def test_nested_loops_multiply():
    # A compiled program of real nested scans: 3 iterations of 5.
    def inner(x, _):
        return jnp.sin(x @ x), None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, length=5)[0], None

    text = jax.jit(lambda x: jax.lax.scan(outer, x, None, length=3)[0]).lower(jnp.ones((8, 8))).compile().as_text()
    assert max(call.times for call in of(text).calls.values()) == 15


def test_a_cast_copy_in_a_loop_is_traced_to_its_argument():
    flow = of(LOOP)
    found = hlo_flow.origins(flow, flow.module.computation("body"), "w16")
    assert [i.op_name for i in found] == ["params['w']"]


def test_a_stacked_value_is_traced_through_its_loop():
    flow = of(LOOP)
    assert [i.name for i in hlo_flow.origins(flow, flow.module.entry, "slice")] == ["weight"]


def test_an_output_of_a_fusion_is_traced_to_the_operands_that_it_reads():
    text = """
HloModule jit_step, is_scheduled=true

%fused (p: f32[8], q: f32[8]) -> (bf16[8], bf16[8]) {
  %p = f32[8] parameter(0)
  %q = f32[8] parameter(1)
  %a = bf16[8] convert(%p)
  %b = bf16[8] convert(%q)
  ROOT %both = (bf16[8], bf16[8]) tuple(%a, %b)
}

ENTRY %main (v: f32[8], w: f32[8]) -> bf16[8] {
  %v = f32[8] parameter(0)
  %w = f32[8] parameter(1)
  %cast = (bf16[8], bf16[8]) fusion(%v, %w), kind=kLoop, calls=%fused
  ROOT %second = bf16[8] get-tuple-element(%cast), index=1
}
"""
    flow = hlo_flow.flow(syntax.parse(text))
    assert [found.name for found in hlo_flow.origins(flow, flow.module.entry, "second")] == ["w"]


def test_matmuls_end_a_trace():
    flow = of(LOOP)
    assert hlo_flow.origins(flow, flow.module.computation("body"), "y") == ()


def test_readers_are_found_behind_moves_and_inside_loops():
    flow = of(LOOP)
    found = hlo_flow.readers(flow, flow.module.entry, "moved")
    assert {"y", "stack"} <= {reader.name for reader in found}
    assert [r.name for r in found if hlo_flow.stacks(flow, r)] == ["stack"]


@pytest.mark.parametrize(
    "opcode, runs", [("fusion", ()), ("fusion-start", ()), ("call-start", ("c",)), ("call", ("c",))]
)
def test_the_instructions_of_fusions_do_not_run_one_by_one(opcode, runs):
    assert hlo_flow.runs(syntax.Instruction("x", opcode, (), (), " calls=%c")) == runs
