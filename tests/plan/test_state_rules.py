"""Each test plants one defect in how a step takes its state, compiles it for GPUs, and asks whether the findings name it."""

import jax
import pytest
from compile_only import compile_plain, mesh, plain_state, plain_step, read, rules
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.plan import findings, ledger

LESS_SPLIT = "the step takes leaves less split than the plan says"
NOT_DONATED = "the state is not donated"
ON_DEVICE = "offloaded state stays on the device"


def test_a_state_that_is_not_donated_is_found():
    on = mesh()
    state = plain_state(on, split=P())
    found = read(compile_plain(plain_step, state, on, donate=False), state, on)
    assert rules(found, state) == [NOT_DONATED]
    held = sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(state))
    assert findings.findings(found, planned=state)[0].nbytes == held


def test_a_leaf_that_the_step_takes_whole_is_found():
    on = mesh()
    planned = plain_state(on)
    given = planned.replace(params=plain_state(on, split=P()).params)
    found = read(compile_plain(plain_step, given, on), planned, on)
    assert LESS_SPLIT in rules(found, planned)
    worst = next(f for f in findings.findings(found, planned=planned) if f.rule == LESS_SPLIT)
    assert worst.nbytes == 6 * 256 * 512 * 4 * 7 // 8
    assert "opt_state" not in worst.where


HOST_PROGRAM = """
HloModule jit_step, is_scheduled=true, input_output_alias={{ {{0}}: (0, {{}}, may-alias) }}

ENTRY %main (p0: f32[64]) -> (f32[64]) {{
  %p0 = f32[64]{{0:{memory}}} parameter(0), metadata={{op_name="state.opt_state[0].mu['w']"}}
  ROOT %tuple = (f32[64]{{0:{memory}}}) tuple(%p0)
}}
"""


@pytest.mark.parametrize("memory, expected", [("T(8)", [ON_DEVICE]), ("T(8)S(5)", [])])
def test_state_planned_for_the_host_that_stays_on_the_device_is_found(memory, expected):
    on_cpu = zerojax.make_mesh(devices=jax.devices()[:1])  # a compile-only device forgets a sharding's memory kind
    host = NamedSharding(on_cpu, P(), memory_kind="pinned_host")
    planned = {"opt_state": [{"mu": {"w": jax.ShapeDtypeStruct((64,), "float32", sharding=host)}}]}
    found = ledger.ledger(HOST_PROGRAM.format(memory=memory), mesh(), {})
    assert rules(found, planned) == expected
