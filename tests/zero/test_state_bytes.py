"""Checks counted bytes against arrays. This module tests zerojax.zero.memory."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from zerojax import display, precision, roles, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.optim import master_weights
from zerojax.zero import shard_state, stages, state_bytes

SHAPES = {"layer/kernel": (64, 40), "bias": (24,), "embed/table": (48, 8)}
COUNT = 64 * 40 + 24 + 48 * 8


def make_state(tx, dtype=jnp.float32):
    params = tree.nested({name: jnp.ones(shape, dtype) for name, shape in SHAPES.items()})
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def make_partition(stage, ways=8, dtype=jnp.float32, **options):
    tx = optax.adam(1e-3) if dtype == jnp.float32 else master_weights.with_master_weights(optax.adam(1e-3))
    mesh = mesh_lib.make_mesh(data=ways, devices=jax.devices()[:ways])
    state = make_state(tx, dtype)
    return stages.partition_state(state, mesh=mesh, stage=stage, **{"min_size": 0, **options})


@pytest.mark.parametrize("indivisible", ["whole", "pad"])
@pytest.mark.parametrize("stage", stages.STAGES)
def test_counted_bytes_are_those_of_the_shards(stage, indivisible):
    mesh = mesh_lib.make_mesh(data=3, devices=jax.devices()[:3])
    state, part = shard_state.shard_train_state(
        make_state(optax.adam(1e-3)), mesh=mesh, stage=stage, min_size=30, indivisible=indivisible
    )
    counted = state_bytes.bytes_per_device(part)
    for device in mesh.devices.flat:
        assert counted[roles.PARAMS] == state_bytes.measured_bytes(state.params, device)
        assert counted[roles.OPT_STATE] == state_bytes.measured_bytes(state.opt_state, device)
        assert sum(counted.values()) - counted[roles.GRADIENTS] == state_bytes.measured_bytes(state, device)


# Bytes a parameter that gradients add while a step runs: stage -> f(ways, bytes of one)
GRADS = {
    0: lambda n, item: item,
    1: lambda n, item: item,
    2: lambda n, item: item / n,
    3: lambda n, item: item / n,
}


def test_gradients_of_weights_in_host_memory_are_on_the_device_all_or_those_of_a_block():
    part = make_partition(3, offload={"optimizer": "host", "params": "host"})
    assert len(part.on_host) == 3 * len(SHAPES)  # weights and two moments
    counted = state_bytes.bytes_per_device(part, by_hand=True)
    assert (counted[roles.PARAMS], counted[roles.GRADIENTS]) == (0, 4 * COUNT // 8)
    by_block = state_bytes.bytes_per_device(part, by_hand=True, one_block="layer|embed")[roles.GRADIENTS]
    assert by_block == 4 * (64 * 40 + 24) // 8  # of the largest block, and of what is in none


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stage", stages.STAGES)
def test_gradients_take_their_weights_bytes_or_float32_where_they_accumulate(stage, dtype, accumulates):
    counted = state_bytes.bytes_per_device(make_partition(stage, dtype=dtype), accumulates=accumulates)
    item = 4 if accumulates else jnp.dtype(dtype).itemsize
    assert counted[roles.GRADIENTS] == GRADS[stage](8, item) * COUNT


def test_gradients_that_add_up_in_bf16_take_half_and_those_of_one_pass_do_not():
    part = make_partition(3, dtype=jnp.float32)
    counted = [state_bytes.bytes_per_device(part, accumulates=a, by_hand=True, in_16_bits=True) for a in (True, False)]
    assert [found[roles.GRADIENTS] for found in counted] == [GRADS[3](8, item) * COUNT for item in (2, 4)]


@pytest.mark.parametrize("stage", stages.STAGES)
def test_gradients_of_explicit_collectives_take_float32_and_after_one_pass_are_sharded_as_the_moments(stage):
    part = make_partition(stage, dtype=jnp.bfloat16)
    several = state_bytes.bytes_per_device(part, accumulates=True, by_hand=True)[roles.GRADIENTS]
    once = state_bytes.bytes_per_device(part, by_hand=True)[roles.GRADIENTS]
    assert several == GRADS[stage](8, 4) * COUNT  # stage 1 adds up replicated gradients over the passes
    assert once == GRADS[2 if stage else 0](8, 4) * COUNT


# Bytes a parameter on each of N devices: (precision, moments) -> stage 0, stages 1 and 2, stage 3
BYTES = {
    ("fp32", "fp32"): (12, lambda n: 4 + 8 / n, lambda n: 12 / n),
    ("bf16", "fp32"): (14, lambda n: 2 + 12 / n, lambda n: 12 / n),
    ("bf16", "bf16"): (10, lambda n: 2 + 8 / n, lambda n: 8 / n),
    ("bf16", "int8"): (8 + 1 / 32, lambda n: 2 + (6 + 1 / 32) / n, lambda n: (6 + 1 / 32) / n),
    ("fp16", "fp32"): (14, lambda n: 2 + 12 / n, lambda n: 12 / n),
    ("bf16_sr", "fp32"): (10, lambda n: 2 + 8 / n, lambda n: 10 / n),
    ("bf16_sr", "bf16"): (6, lambda n: 2 + 4 / n, lambda n: 6 / n),
    ("bf16_sr", "int8"): (4 + 1 / 32, lambda n: 2 + (2 + 1 / 32) / n, lambda n: (4 + 1 / 32) / n),
}


@pytest.mark.parametrize("name, moments", BYTES)
def test_bytes_a_parameter_are_those_of_the_table_in_the_docs(name, moments):
    replicated, middle, sharded = BYTES[name, moments]
    policy = precision.PRECISIONS[name]
    for ways in (1, 8, 64):
        found = [sum(state_bytes.bytes_per_parameter(policy, s, ways, moments=moments).values()) for s in (0, 1, 2, 3)]
        assert found == pytest.approx([replicated, middle(ways), middle(ways), sharded(ways)], rel=1e-12)


def test_no_master_saves_four_bytes_and_16_bit_moments_four_more():
    def total(name, moments="fp32"):
        return sum(state_bytes.bytes_per_parameter(precision.PRECISIONS[name], 0, 8, moments=moments).values())

    assert (total("bf16") - total("bf16_sr"), total("bf16") - total("bf16_sr", "bf16")) == (4, 8)


def test_a_line_has_the_bytes_of_a_parameter():
    line = state_bytes.per_parameter_line(make_partition(2, dtype=jnp.bfloat16), "bf16", "fp32")
    assert (
        line == "precision bf16, moments fp32: 3.501 bytes a parameter on each device (params 2, optimizer state 1.501)"
    )


def test_the_table_has_the_bytes_saved_and_the_leaves_that_stay_replicated():
    part, baseline = make_partition(3, min_size=100), make_partition(0)
    text = display.as_text(state_bytes.memory_table(part, baseline))
    assert "stage 3, data=8" in text and "replicated: 1 x fewer than 100 elements" in text
    here, there = (sum(state_bytes.bytes_per_device(p).values()) for p in (part, baseline))
    row = next(line for line in text.splitlines() if "total" in line)
    assert display.human(here) in row and display.human(there) in row and f"{1 - here / there:.0%}" in row


@pytest.mark.parametrize("trainable, has_frozen", [("", False), ("bias", True)])
def test_each_role_has_a_row_and_frozen_weights_only_where_there_are_some(trainable, has_frozen):
    state, mesh = make_state(optax.sgd(1e-3)), mesh_lib.make_mesh()
    part = stages.partition_state(state, mesh=mesh, stage=2, trainable=trainable)
    text = display.as_text(state_bytes.memory_table(part, part))
    shown = [role for role in state_bytes.ROLES if f" {roles.WORDS.get(role, role)} " in text]
    assert shown == [role for role in state_bytes.ROLES if has_frozen or role != roles.FROZEN]


def test_a_table_of_stage_0_has_nothing_saved_and_no_caption():
    part = make_partition(0)
    text = display.as_text(state_bytes.memory_table(part, part))
    assert "replicated" not in text and "0%" in next(line for line in text.splitlines() if "total" in line)
    with pytest.raises(UserError, match=r"^one_block: '\[' is not a regex"):
        state_bytes.memory_table(part, part, one_block="[")
