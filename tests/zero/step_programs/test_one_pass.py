"""Checks one pass of a step that is cut into programs. This module tests zerojax.zero.step_programs.one_pass."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from block_nets import Net, X, loss_of, prepared_layout
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax.zero import stages
from zerojax.zero.blocks import block_settings
from zerojax.zero.offload import step_by_block
from zerojax.zero.sharded_batch import outputs


@pytest.mark.parametrize(
    ("count", "reduce_dtype", "in_16_bits", "expected"),
    [
        (2, "bfloat16", True, "bfloat16"),
        (2, "bfloat16", False, "float32"),
        pytest.param(2, "float32", True, "float32", marks=pytest.mark.long),
        (1, "bfloat16", True, "float32"),
    ],
)
def test_gradients_of_a_pass_are_in_bf16_where_both_of_their_sums_are(count, reduce_dtype, in_16_bits, expected):
    net, mesh = Net(1), mesh_lib.make_mesh(1, 8)
    params = jax.eval_shape(net.init, jax.random.key(0), X, X[:, :1])["params"]
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.adam(1e-3)), params)
    part = stages.partition_state(state, mesh=mesh, stage=3, min_size=0)
    steps = step_by_block.passes_of(
        outputs.with_aux(functools.partial(loss_of, net), lambda state: 1.0),
        part,
        block_settings.Blocks(r"block_\w+", heads="head"),
        prepared_layout(count),
        reduce_dtype=jnp.dtype(reduce_dtype),
        compute_dtype=None,
        in_16_bits=in_16_bits,
    )
    batch = {"x": X, "scale": jnp.ones((16, 1))}
    if count > 1:
        batch = jax.tree.map(lambda leaf: jnp.stack([leaf] * count), batch)
    one_pass = steps.one_pass(part.abstract_state.replace(opt_state=()), batch)
    found = {one_pass.schedule.cut.values[number].dtype for path, number in one_pass.grads.items() if "block_" in path}
    assert found == {jnp.dtype(expected)}
