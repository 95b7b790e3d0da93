import jax
import jax.numpy as jnp
import pytest
from compile_only import compile_plain, mesh, plain_state, plain_step, read, rules, staged
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import tree
from zerojax.plan import findings, ledger

KEPT = "gathered weights are kept for the backward pass"
NOT_DONATED = "the state is not donated"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_this_projects_own_steps_have_no_findings(stage):
    found, partition = staged(stage)
    assert rules(found, partition.abstract_state) == []


def test_findings_come_costliest_first_and_name_a_way_out():
    on = mesh()
    state = plain_state(on)
    found = read(compile_plain(plain_step, state, on, donate=False), state, on)
    listed = findings.findings(found, planned=state)
    assert [f.rule for f in listed] == [KEPT, NOT_DONATED]
    assert listed[0].nbytes >= listed[1].nbytes
    assert all(f.where and f.amount and f.remedy for f in listed)


def test_the_cpu_backend_is_not_blamed_for_what_it_cannot_do():
    on = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    state = plain_state(on)
    batch = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=NamedSharding(on, P("fsdp")))
    text = jax.jit(plain_step, donate_argnums=0).lower(state, batch).compile().as_text()
    found = ledger.ledger(text, on, dict(tree.flatten(state.params)))
    assert any(row.kind == "all-reduce" and row.role == "gradients" for row in found.rows)
    assert any(row.dtype == "f32" and row.kind == "all-gather" for row in found.rows)
    assert not [
        rule for rule in rules(found, state, compute_dtype=jnp.bfloat16) if "float32" in rule or "all-red" in rule
    ]
