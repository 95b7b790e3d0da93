import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training import train_state

import zerojax
from zerojax import precision, roles
from zerojax.models.llama import model as llama
from zerojax.plan import step_plan, targets
from zerojax.trainer import plans, program
from zerojax.trainer import state as state_lib
from zerojax.zero import state_bytes

WORDS = 320  # entries of the vocabulary
COUNTERS = 64  # bytes; the row of the moments includes the optimizer's step counts
PACKING = 0.05  # of the peak: temporaries are packed into one block, whose size may differ from the sum at the peak


@functools.cache
def plan_of(stage: int, precision: str = "fp32", **changes):
    return plans.plan_config(
        runs.config(zero__stage=stage, precision=precision, model__vocab_size=WORDS, **changes), "cpu", "1x8"
    )


@pytest.mark.parametrize("stage", runs.cases([0, 3], long=[0]))
def test_xla_assigns_to_the_state_the_bytes_of_its_shardings(stage):
    rows = {row.role: row for row in plan_of(stage).memory}
    for role in (roles.PARAMS, roles.MOMENTS):
        assert rows[role].assigned == rows[role].arithmetic


def test_theory_divides_the_roles_that_the_stage_shards_and_arithmetic_counts_replicated_leaves():
    replicated, sharded = ({row.role: row for row in plan_of(stage).memory} for stage in (0, 3))
    for role in (roles.PARAMS, roles.MOMENTS, roles.GRADIENTS):
        assert sharded[role].theory == round(replicated[role].theory / 8)
        assert replicated[role].arithmetic == replicated[role].theory
        # norms stay replicated
        assert sharded[role].theory < sharded[role].arithmetic < 1.1 * sharded[role].theory


def test_master_weights_are_a_row_of_their_own():
    rows = {row.role: row for row in plan_of(2, "fp16", zero__min_size=0, optimizer__moments="fp32").memory}
    assert rows[roles.MASTER].assigned == rows[roles.MASTER].arithmetic
    assert 0 <= rows[roles.MOMENTS].arithmetic - 2 * rows[roles.MASTER].arithmetic <= COUNTERS


@pytest.mark.parametrize("name, moments, stage", [("fp16", "fp32", 2), ("bf16_sr", "bf16", 3)])
def test_the_plan_has_the_bytes_of_the_precisions_table(name, moments, stage):
    plan = plan_of(stage, name, zero__min_size=0, optimizer__moments=moments)
    built = program.build(runs.config(model__vocab_size=WORDS), tokenizer_vocab=WORDS)
    each = state_bytes.bytes_per_parameter(precision.PRECISIONS[name], stage, 8, moments=moments)
    for row in plan.memory:
        if row.role in each:
            expected = each[row.role] * llama.count_params(built.model)
            for found in (row.theory, row.arithmetic, row.assigned):
                assert 0 <= found - expected <= COUNTERS


def test_the_roles_add_up_to_the_peak():
    plan = plan_of(3)
    assert sum(row.assigned for row in plan.memory if row.role != roles.HOST) == pytest.approx(plan.peak, rel=PACKING)
    stats = plan.compiled.memory_analysis()
    sizes = stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes
    assert plan.peak == pytest.approx(sizes - stats.alias_size_in_bytes, rel=PACKING)


def test_the_planned_step_is_the_step():
    config = runs.config(zero__stage=3)
    built = program.build(config, tokenizer_vocab=WORDS)
    plan = plans.plan_program(built, "here")
    tokens = np.random.default_rng(0).integers(0, WORDS, (8, 33), dtype=np.int32)
    batch = {"tokens": jax.device_put(tokens, built.batch_sharding)}
    _, planned = plan.compiled(state_lib.first(built), batch)
    _, plain = built.train_step(state_lib.first(built), batch)
    assert planned["loss"] == plain["loss"]


def test_fits_is_none_for_a_device_of_unknown_memory():
    assert plan_of(3).usable is None and plan_of(3).fits is None


def test_a_custom_step_is_planned_without_a_partition():
    mesh = zerojax.make_mesh()
    model = nn.Dense(64)

    def init(key):
        params = model.init(key, jnp.zeros((1, 128)))["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    state = zerojax.partition_state(jax.eval_shape(init, jax.random.key(0)), mesh=mesh, stage=3).abstract_state

    @jax.jit
    def step(state, batch):
        grads = jax.grad(lambda p: jnp.mean(model.apply({"params": p}, batch) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    batch = jax.ShapeDtypeStruct((16, 128), jnp.float32, sharding=zerojax.batch_sharding(mesh))
    plan = step_plan.plan_step(step, state, batch, mesh=mesh, target="cpu")
    assert plan.stage is None
    assert set(plan.ledger.weights) == {"params/kernel", "params/bias"}
    held = {row.role: row.assigned for row in plan.memory}
    assert held[roles.PARAMS] == 4 * (128 * 64 // 8 + 64)
    assert any("donated" in finding.rule for finding in plan.findings)


def test_the_report_counts_the_state_as_the_plan_does():
    plan = plan_of(3)
    built = program.build(runs.config(zero__stage=3, model__vocab_size=WORDS), devices=targets.devices("cpu", "1x8"))
    counted = state_bytes.bytes_per_device(built.partition)
    rows = {row.role: row.arithmetic for row in plan.memory}
    assert counted[roles.PARAMS] == rows[roles.PARAMS] and counted[roles.GRADIENTS] == rows[roles.GRADIENTS]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_frozen_weights_are_gathered_and_have_no_gradients_and_no_moments(stage):
    model = nn.Sequential([nn.Dense(64), jnp.tanh, nn.Dense(64)])
    mesh = zerojax.make_mesh()

    def plan(trainable):
        params = model.init(jax.random.key(0), jnp.zeros((1, 64)))["params"]
        state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
        state, part = zerojax.shard_train_state(state, mesh=mesh, stage=stage, trainable=trainable)
        step = zerojax.make_train_step(
            lambda params, batch, state: jnp.mean(model.apply({"params": params}, batch) ** 2), part
        )
        batch = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=part.batch_sharding)
        return step_plan.plan_step(step, part.abstract_state, batch, mesh=mesh, target="cpu", placement=part)

    every, top = plan(""), plan("layers_2")
    rows, fewer = ({row.role: row for row in found.memory} for found in (every, top))
    assert fewer[roles.PARAMS] == rows[roles.PARAMS]
    assert fewer[roles.GRADIENTS].theory == rows[roles.GRADIENTS].theory / 2
    assert fewer[roles.GRADIENTS].arithmetic == rows[roles.GRADIENTS].arithmetic / 2
    assert abs(fewer[roles.MOMENTS].theory - rows[roles.MOMENTS].theory / 2) <= COUNTERS
    assert top.theory[roles.GRADIENTS] == pytest.approx(every.theory[roles.GRADIENTS] / 2)
    assert top.theory[roles.WEIGHTS_FORWARD] == every.theory[roles.WEIGHTS_FORWARD]
    trained = {path for row in top.ledger.rows if row.role == roles.GRADIENTS for path in row.weights}
    assert trained and all("layers_2" in path for path in trained)


TPU_SHORTAGE = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 594.90G of 95.74G hbm..\n\nTotal hbm"


def test_a_compiler_that_ends_for_lack_of_memory_says_how_much_it_needs():
    error = jax.errors.JaxRuntimeError
    assert step_plan.shortage(error(TPU_SHORTAGE)) == "the compiler needs 594.90G of 95.74G of hbm"
    assert step_plan.shortage(error("RESOURCE_EXHAUSTED: no room\nat all")) == "RESOURCE_EXHAUSTED: no room at all"
    assert step_plan.shortage(error("INTERNAL: something else")) is None


@pytest.mark.parametrize(
    "dtype, target, seconds", [(jnp.bfloat16, "h100", 1), (jnp.float32, "h100", 2), (jnp.float32, "v5p", 1)]
)
def test_the_operations_of_a_model_take_their_time_at_the_rate_of_the_dtype_that_is_computed_in(dtype, target, seconds):
    known = targets.get(target)
    flops = known.matrix_rates["bf16"].value
    assert step_plan._model_seconds(known, flops, dtype) == pytest.approx(seconds)
    assert step_plan._model_seconds(targets.get("cpu"), flops, dtype) is None
