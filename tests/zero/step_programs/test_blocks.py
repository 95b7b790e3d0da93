"""Checks blocks as nested functions of one program. This module tests zerojax.zero.step_programs.blocks."""

import jax
import numpy as np
from block_nets import Net, parts

from zerojax.zero.step_programs import blocks


def test_nested_blocks_in_one_program_are_the_step():
    plain, nested, *args = parts(Net())
    for have, want in zip(jax.tree.leaves(jax.jit(nested)(*args)), jax.tree.leaves(jax.jit(plain)(*args)), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-6)


def test_every_pass_of_a_plain_block_has_a_name_to_cut_at():
    _, nested, *args = parts(Net(2))
    names = [
        eqn.params["name"]
        for call in jax.make_jaxpr(nested)(*args).jaxpr.eqns
        for eqn in call.params["jaxpr"].eqns
        if str(eqn.params.get("name", "")).startswith(blocks.NAME)
    ]
    assert names == [f"{blocks.NAME}_forward"] * 5 + [f"{blocks.NAME}_backward"] * 5
