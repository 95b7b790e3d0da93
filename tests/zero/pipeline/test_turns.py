"""Checks in which turns a backward pass of a stage runs. This module tests zerojax.zero.pipeline.turns; test_step runs them."""

import compile_only
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from pipelines import Net, abstract, batch_of, prepared

import zerojax
from zerojax.zero.pipeline import order, turns
from zerojax.zero.step_programs import blocks


def test_each_turn_has_one_block_and_the_gradients_that_follow_from_it():
    _, step = prepared({"pipe": 2}, shard=abstract, schedule="1f1b", net=Net(layers=4))
    found = step.programs(jax.tree.map(lambda leaf: leaf[0], batch_of(0)))
    for stage in range(2):
        part = found.programs[order.BACKWARD, stage].part
        made = turns.of(part, order.BACKWARD, {})
        own = [[eqn.params.get("name") for call in turn.calls for eqn in call.closed.jaxpr.eqns] for turn in made]
        assert len(made) > 1 and {names.count(f"{blocks.NAME}_backward") for names in own} == {1}
        known = set(part.reads)
        for turn in made:
            assert set(turn.reads) <= known
            known |= set(turn.writes)
        assert set(part.writes) <= known
        for turn in made:  # ends with the gradients of its own block
            assert {(16, 32), (32, 16)} <= {var.aval.shape[-2:] for var in turn.writes}, [v.aval for v in turn.writes]


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(256, use_bias=False, name="down")(nn.silu(nn.Dense(2048, use_bias=False, name="up")(x)))


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(8):
            x = Wide(name=f"block_{number}")(x)
        return nn.Dense(8, name="head")(x)


def temporaries(key, rows, sizes, stage, **how):
    """Returns the bytes of temporaries of a pass of a stage on H200s."""
    mesh = zerojax.make_mesh(pipe=2, **sizes, devices=compile_only.gpus("h200", f"1x{2 * sizes['data']}"))
    net, x = Deep(), np.zeros((2, rows, 256), np.float32)

    def loss(params, batch, state):
        return jnp.mean(net.apply({"params": params}, batch["x"]) ** 2)

    def init(key):
        params = net.init(key, jnp.zeros((1, 256)))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    state = jax.eval_shape(init, jax.random.key(0))
    specs = [("", P("data"))]
    pipeline = zerojax.Pipeline(loss, {"x": x[0]}, r"block_\d+", heads="head", batch_specs=specs)
    partition = zerojax.partition_state(state, mesh=mesh, stage=stage, min_size=0, pipeline=pipeline)
    how |= {"reduce_dtype": jnp.float32, "blocks": r"block_\d+", "heads": "head", "batch_specs": specs}
    step = zerojax.make_train_step(loss, partition, grad_accum=2, remat="full", **how)
    found = step.stand_ins(step.micro({"x": jax.ShapeDtypeStruct(x.shape, x.dtype)}), None, {})
    return found.programs[key].run.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "how", [pytest.param({}, marks=pytest.mark.long), {"offload": r"block_\d+", "accum_dtype": jnp.bfloat16}]
)
def test_what_is_computed_again_is_that_of_one_block_at_a_time(how):
    found = temporaries((order.BACKWARD, 0), 4096, {"data": 1}, 1, **how)
    assert found < 3 * 4096 * 2048 * 4, "three results of `up`; XLA's own order keeps eight"


def test_a_pass_gathers_the_weights_of_three_blocks_at_a_time():
    found = temporaries((order.FORWARD, 0), 16, {"data": 2}, 3)
    assert found < 3.5 * 2 * 256 * 2048 * 4, "those of three blocks; XLA's own order gathers all four"
