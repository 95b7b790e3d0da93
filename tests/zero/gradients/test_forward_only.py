"""Checks what is evaluated forward only against one device. This module tests zerojax.zero.gradients.forward_only."""

import block_nets
import flax.linen as nn
import jax
import numpy as np

from zerojax import mesh as mesh_lib
from zerojax.zero import stages
from zerojax.zero.gradients import forward_only

X = block_nets.X


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return block_nets.Head(name="head")(block_nets.Block(name="block_0")(x))


def test_a_mean_is_that_of_the_global_batch():
    params = Net().init(jax.random.key(0), X)["params"]
    part = stages.partition_state({"params": params}, mesh=mesh_lib.make_mesh(), min_size=0)
    mean = forward_only.mean(
        lambda p, b: Net().apply({"params": p}, b), part, compute_dtype=None, blocks=r"block_\d", heads="head"
    )
    sharded = jax.device_put(params, part.shardings["params"])
    np.testing.assert_allclose(jax.jit(mean)(sharded, X), Net().apply({"params": params}, X), rtol=1e-6)
