import dataclasses

import jax
import numpy as np
import pytest

from zerojax.hlo import linked, syntax
from zerojax.plan import ledger
from zerojax.profile import breakdown, phases, traces

HLO = """HloModule jit_train_step, is_scheduled=true

%fused (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %sine = f32[8,8]{1,0} sine(%p)
}

%scattering (q: f32[8,8]) -> f32[4,8] {
  %q = f32[8,8]{1,0} parameter(0)
  ROOT %reduce-scatter.24 = f32[4,8]{1,0} reduce-scatter(%q), replica_groups={{0,1}}, dimensions={0}, to_apply=%add
}

%body (s: f32[8,8]) -> f32[8,8] {
  %s = f32[8,8]{1,0} parameter(0)
  ROOT %loop_fusion.7 = f32[8,8]{1,0} fusion(%s), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/gradients/jvp(loss)/while/sin"}
}

ENTRY %main (w: f32[4,8]) -> f32[4,8] {
  %w = f32[4,8]{1,0} parameter(0), metadata={op_name="state.params['w']"}
  %gather = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%w), replica_groups={{0,1}}, dimensions={0}, metadata={op_name="jvp()/mul"}
  %gathered = f32[8,8]{1,0} all-gather-done(%gather)
  %cublas-gemm.1 = f32[8,8]{1,0} custom-call(%gathered), custom_call_target="__cublas$gemm", metadata={op_name="jit(f)/dot_general"}
  %while.3 = f32[8,8]{1,0} while(%cublas-gemm.1), condition=%cond, body=%body
  %reduce-scatter-start = ((f32[8,8]{1,0}), f32[4,8]{1,0}) async-start(%while.3), calls=%scattering
  %reduce-scatter-done = f32[4,8]{1,0} async-done(%reduce-scatter-start)
  ROOT %loop_add_fusion.2 = f32[4,8]{1,0} fusion(%reduce-scatter-done), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/update/add"}
}

%cond (s: f32[8,8]) -> pred[] {
  %s = f32[8,8]{1,0} parameter(0)
  ROOT %always = pred[] constant(true)
}
"""
MILLISECOND = 1e6  # in nanoseconds
# name, instruction in the trace, start and end: one step of 100 ms with 10 ms idle
STEP = (
    ("ncclDevKernel_AllGather", "gather", 0, 20),
    ("nvjet_tst_128x256", "cublas-gemm.1", 15, 45),
    ("while.3", "while.3", 45, 65),
    ("loop_fusion_7", "command_buffer_2", 45, 55),  # in a CUDA graph, only the kernel's name identifies it
    ("loop_fusion_7", "while.3", 55, 65),
    ("ncclDevKernel_ReduceScatter", "reduce-scatter-start", 60, 80),
    ("MemcpyD2D", "", 75, 85),
    ("loop_add_fusion_2", "loop_add_fusion.2", 95, 100),
)


@pytest.fixture(scope="module")
def sent():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    return ledger.ledger(HLO, mesh, {"params/w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)})


def step(device="/device:GPU:0", at=0.0, module="jit_train_step", scale=1.0):
    return [
        traces.Kernel(device, name, op, module, (at + start * scale) * MILLISECOND, (at + end * scale) * MILLISECOND)
        for name, op, start, end in STEP
    ]


EXPECTED = {  # milliseconds owned and hidden, and kernels
    phases.ATTENTION: (0, 0, 0),
    phases.MATMULS: (30, 0, 1),
    phases.LOSS: (20, 0, 2),
    phases.OPTIMIZER: (5, 0, 1),
    phases.OTHER: (0, 0, 0),
    phases.COLLECTIVES: (30, 10, 2),
    phases.COPIES: (5, 5, 1),
    phases.IDLE: (10, 0, 0),
}


def milliseconds(shares):
    return {name: pytest.approx((s.owned * 1e3, s.hidden * 1e3, s.kernels)) for name, s in shares.items()}


def test_a_step_is_divided_by_the_phases_of_its_kernels(sent):
    found = breakdown.profile(step(), sent, 3, 3)
    assert milliseconds(found.shares) == EXPECTED
    assert (found.devices, found.step_seconds) == (1, pytest.approx(0.1))
    known = 20 + 30 + 20 + 20 + 5  # all but the copy
    assert found.named == pytest.approx(known / (known + 10))


def test_collectives_are_divided_by_role(sent):
    found = breakdown.profile(step(), sent, 3, 3)
    assert milliseconds(found.collectives) == {"weights forward": (15, 5, 1), "gradients": (15, 5, 1)}


def test_steps_and_devices_are_averaged(sent):
    several = [*step(), *step(at=100), *step("/device:GPU:1"), *step("/device:GPU:1", at=100)]
    found = breakdown.profile(several, sent, 3, 4)
    assert milliseconds(found.shares) == EXPECTED and found.devices == 2
    uneven = breakdown.profile([*step(), *step("/device:GPU:1", scale=3.0)], sent, 3, 3)
    assert uneven.step_seconds == pytest.approx(0.2)
    assert uneven.shares[phases.MATMULS].owned == pytest.approx(0.06)


def test_the_kernels_that_took_longest_come_first_with_their_instruction(sent):
    found = breakdown.profile([*step(), *step(at=100)], sent, 3, 4).kernels
    first = breakdown.KernelTime("nvjet_tst_128x256", phases.MATMULS, 0.03, 1, "cublas-gemm.1", "jit(f)/dot_general")
    assert dataclasses.replace(found[0], seconds=round(found[0].seconds, 9)) == first
    assert [kernel.seconds for kernel in found] == sorted((kernel.seconds for kernel in found), reverse=True)
    assert "while.3" not in {kernel.name for kernel in found}  # the kernels in it count


def test_the_phase_of_another_programs_kernels_depends_on_their_names_alone(sent):
    found = breakdown.profile(step(module="jit_evaluate"), sent, 3, 3)
    assert found.named == 0
    assert found.shares[phases.OPTIMIZER].kernels == 0 and found.shares[phases.OTHER].kernels == 4


def test_the_kernels_of_a_step_of_several_programs_have_their_phases(sent):
    """Those of one program have rows in the ledger, as of the group of a pipeline that the plan shows; another one is of another group."""
    one, other = (syntax.parse(HLO.replace("jit_train_step", f"jit_stage_{stage}_forward")) for stage in (0, 1))
    row = [linked.LinkedProgram(one, (0,), (1,))]
    module = linked.link(row, {0: ("state/params/w", syntax.Array("f32", (4, 8)))}, 1)
    of_one = ledger.ledger(module, sent.mesh, sent.weights)
    for name in ("jit_stage_0_forward", "jit_stage_1_forward"):
        found = breakdown.profile(step(module=name), of_one, 3, 3, [one, other])
        assert milliseconds(found.shares) == EXPECTED, name
        assert found.named > 0.9
    assert breakdown.profile(step(module="jit_stage_1_forward"), of_one, 3, 3).named == 0


def test_a_trace_without_kernels_is_an_empty_profile(sent):
    found = breakdown.profile([], sent, 3, 3)
    assert (found.devices, found.step_seconds, found.shares, found.kernels, found.named) == (0, 0, {}, (), 0)
