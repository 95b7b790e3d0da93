"""Tests of zerojax.hlo.linked: what reads one program reads several in a row."""

import jax
import jax.numpy as jnp

from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import linked, syntax
from zerojax.plan import matmuls


def module(run, *args):
    def block_0(*values):
        with jax.named_scope("block_0"):
            return run(*values)

    return syntax.parse(jax.jit(block_0).lower(*args).compile().as_text())


def test_programs_in_a_row_are_one_program_that_runs_once_in_a_pass():
    x, weight = jnp.ones((32, 32)), jnp.ones((32, 32))
    multiply = module(lambda x, weight: [jnp.sin(x) @ weight, jnp.cos(x)], x, weight)
    finish = module(lambda x: [x.astype(jnp.bfloat16).T], x)
    array, on_host = syntax.Array("f32", (32, 32)), syntax.Array("f32", (32, 32), is_on_host=True)
    arguments = {0: ("batch/x", array), 1: ("state/params/a", array)}
    arguments |= {~2: ("state/params/b", on_host), 2: ("state/params/b", array)}  # as stored, and as it arrives
    found = linked.link(
        [
            linked.LinkedProgram(multiply, (0, 1), (3, 4)),
            linked.LinkedProgram(multiply, (3, 2), (5, 6), scope="transpose(jvp())/", names={"block_0": "block_1"}),
            linked.LinkedProgram(finish, (~2,), (7,)),
        ],
        arguments,
        passes=3,
        kept={"state/params/b"},
    )
    flow = hlo_flow.flow(found)
    counted = matmuls.matmuls(flow)
    assert [matmul.times for matmul in counted] == [3, 3]
    assert "block_0" in counted[0].op_name and "block_1" in counted[1].op_name
    assert counted[1].op_name.startswith("transpose(jvp())/") and "test_linked.py" in counted[0].source
    body = found.computation("pass")
    (casted,) = [i for i in body.instructions if any(a.dtype == "bf16" for a in i.arrays)][-1:]
    (origin,) = hlo_flow.origins(flow, body, casted.name)
    assert origin is found.entry.parameters[2] and "[\\'b\\']" in origin.attributes
    assert origin.arrays == (on_host,) and set(found.aliases) == {0, 1}
    assert [i.arrays[0].is_on_host for i in body.users["values"] if i.number("index") == 2] == [True, False]
