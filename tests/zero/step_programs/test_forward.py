"""Checks a function that runs forward as programs against the same in one program. This module tests zerojax.zero.step_programs.forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_nets import Net, X

from zerojax import mesh as mesh_lib
from zerojax.zero import stages
from zerojax.zero.gradients import forward_only
from zerojax.zero.step_programs import arrivals, blocks, forward


@pytest.mark.parametrize("is_by_kind", [False, True])
def test_programs_of_a_forward_pass_are_it_and_are_made_once(is_by_kind):
    net, scale = Net(1), jnp.linspace(0.5, 1.5, 16)[:, None]
    params = net.init(jax.random.key(0), X, scale)["params"]
    part = stages.partition_state({"params": params}, mesh=mesh_lib.make_mesh(), stage=3, min_size=0)
    params = jax.device_put(params, part.shardings["params"])
    how = {"compute_dtype": None, "blocks": r"block_\w+", "heads": "head"}

    def loss(params, batch):
        return net.apply({"params": params}, *batch)

    if is_by_kind:
        run = forward.mean_by_kind(loss, part, **how)
    else:
        mean = forward_only.mean(loss, part, runner=blocks.ForwardBlocks, **how)
        run = forward.Forward(mean, arrivals.ArgumentSource())
    batch = jax.device_put((X, scale), part.batch_sharding)
    np.testing.assert_allclose(run(params, batch), jax.jit(loss)(params, batch), rtol=1e-5)
    again = run.schedule(params, jax.tree.map(jnp.copy, batch))
    assert again is run.schedule(params, batch)
    assert {program.name for program in again.cut.programs} >= {"forward"}
    assert any(blocks.GATHER in program.part.also for program in again.cut.programs) == is_by_kind
