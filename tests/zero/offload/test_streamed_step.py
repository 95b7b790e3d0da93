"""Tests of zerojax.zero.offload.streamed_step: steps with offloaded optimizer state equal those without, and hold a bounded part of it."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import offloads
import optax
import programs
import pytest
import rough
import runs

import zerojax
from zerojax import tree
from zerojax.checkpoint import logical
from zerojax.errors import UserError
from zerojax.zero.host import memory_kind

FLOAT16 = "float16 with dynamic scaling"
# (optimizer, how the state is made, how the step is made), each with a precision, a form of state or a part of the step of its own
POLICIES = {
    FLOAT16: (
        lambda: zerojax.with_master_weights(offloads.adam()),
        {"dtype": jnp.float16, "scaler": zerojax.DynamicLossScale(init_scale=2.0**15, window=3, hysteresis=1)},
        {"compute_dtype": jnp.float16, "clip_norm": 0.5, "reduce_dtype": jnp.float32},
    ),
    "one pass, 8-bit moments": (
        lambda: zerojax.fused_adamw(1e-2, moments="int8", stochastic_rounding=True),
        {"width": 64, "offload": "host"},
        {"clip_norm": 0.5},
    ),
    "one pass, 16-bit weights rounded stochastically": (
        lambda: zerojax.fused_adamw(1e-2, moments="bf16", stochastic_rounding=True),
        {"dtype": jnp.bfloat16, "offload": "host"},
        {"compute_dtype": jnp.bfloat16, "reduce_dtype": jnp.float32},
    ),
    "master weights, frozen weights": (
        lambda: zerojax.with_master_weights(zerojax.fused_adamw(1e-2)),
        {"dtype": jnp.bfloat16, "trainable": "wide|scale"},
        {"clip_norm": 0.5, "reduce_dtype": jnp.float32},
    ),
    "padded, half of it, two passes": (
        lambda: optax.chain(optax.scale_by_lion(), optax.add_decayed_weights(0.1), optax.scale(-1e-2)),
        {"width": 20, "indivisible": "pad", "offload": {**offloads.PIECES, "fraction": 0.5}},
        {"clip_norm": 0.5, "grad_accum": 2, "reduce_dtype": jnp.float32},
    ),
    "hyperparameters in the state": (
        lambda: optax.inject_hyperparams(optax.lion)(learning_rate=optax.linear_schedule(1e-2, 1e-3, 5)),
        {},
        {"clip_norm": 0.5},
    ),
}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=runs.LONG), 3])
def test_twelve_steps_equal_those_without_offload_bit_for_bit(stage):
    resident, metrics, _, _ = offloads.trained(offloads.adam(), None, 12, stage=stage)
    offloaded, own_metrics, _, partition = offloads.trained(offloads.adam(), offloads.PIECES, 12, stage=stage)
    assert partition.cuts
    assert metrics["loss"] == own_metrics["loss"]
    offloads.assert_equal(offloaded, resident)


@pytest.mark.parametrize(
    "name",
    runs.cases(
        POLICIES,
        long=[
            FLOAT16,
            "one pass, 16-bit weights rounded stochastically",
            "hyperparameters in the state",
            "one pass, 8-bit moments",
        ],
    ),
)
def test_every_policy_takes_the_steps_that_it_takes_without_offload(name):
    make, how, step = POLICIES[name]
    how, tx = dict(how), make()
    offload = how.pop("offload", offloads.PIECES)
    width, passes = how.get("width", offloads.WIDTH), step.get("grad_accum", 1)

    def batches(number):
        batch = offloads.batch_of(number, *([passes] if passes > 1 else []), width=width)
        return batch.at[0].set(np.inf) if number == 2 and "scaler" in how else batch

    both = [offloads.trained(tx, choice, 6, batches=batches, step=step, stage=2, **how) for choice in (offload, None)]
    (offloaded, metrics, train_step, _), (resident, expected, _, _) = both
    assert train_step.updates.weights
    offloads.assert_equal(offloaded, resident)
    assert {key: float(value) for key, value in metrics.items()} == {
        key: float(value) for key, value in expected.items()
    }
    assert int(metrics.get("skipped_steps", 1)) >= 1


def distance_in_float16() -> float:
    """Returns the largest difference between master weights with and without offload, after six steps in float16."""
    make, how, step = POLICIES[FLOAT16]
    tx = make()
    both = [offloads.trained(tx, offload, 6, step=step, stage=2, **how)[0] for offload in (offloads.PIECES, None)]
    offloaded, resident = (logical.to_stored(state) for state in both)
    masters = [path for path in resident if "master" in path]
    return max(float(np.abs(np.subtract(offloaded[path], resident[path])).max()) for path in masters)


# Six steps at 1e-2. A gradient that is rounded otherwise differs by up to 2^-11, and moves m / sqrt(v) by up to twice as much.
ROUNDINGS = 6 * 1e-2 * 2.0**-10


@runs.LONG
@pytest.mark.skipif(
    not rough.HAS_FLOAT16, reason="this CPU computes float16 in float32, as the test above does everywhere"
)
def test_on_a_cpu_that_computes_in_float16_a_step_is_equal_up_to_the_rounding_of_a_gradient():
    folders = [str(programs.ROOT / "tests" / name) for name in ("zero/offload", "support", "")]
    child = (
        f"import sys; sys.path[:0] = {folders}; import rough; rough.XLA_FLAGS = ''; import conftest, test_streamed_step"
    )
    command = [sys.executable, "-c", f"{child}; print(test_streamed_step.distance_in_float16())"]
    done = subprocess.run(command, env=programs.environment(), stdout=subprocess.PIPE, check=True)
    assert float(done.stdout) <= ROUNDINGS


def test_the_moments_of_optax_adam_are_equal_bit_for_bit_and_its_weights_up_to_the_rounding_of_a_division():
    """XLA divides by a scalar that one leaf reads by multiplying with its inverse, so a program of one leaf may round otherwise."""
    tx = optax.adamw(1e-2, weight_decay=0.1)
    offloaded, resident = (offloads.trained(tx, offload, 1)[0] for offload in (offloads.PIECES, None))
    offloads.assert_equal(offloaded.replace(params=()), resident.replace(params=()))
    for one, other in zip(jax.tree.leaves(offloaded.params), jax.tree.leaves(resident.params)):
        np.testing.assert_allclose(one, other, rtol=0, atol=2 * np.finfo(np.float32).eps)  # weights are below 1


def test_leaves_that_need_their_own_norm_are_updated_whole():
    offloaded, _, _, partition = offloads.trained(optax.lars(1e-2), offloads.PIECES, 3)
    resident, _, _, _ = offloads.trained(optax.lars(1e-2), None, 3)
    assert not partition.cuts
    for one, other in zip(jax.tree.leaves(offloaded), jax.tree.leaves(resident)):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)  # norms are summed in another order


def test_moments_live_on_the_host_before_and_after_a_step():
    for steps in (0, 2):
        state, _, _, partition = offloads.trained(offloads.adam(), offloads.PIECES, steps)
        kinds = {path: leaf.sharding.memory_kind for path, leaf in tree.flatten(state)}
        host = {path for path, kind in kinds.items() if kind == memory_kind.MEMORY_KIND}
        assert host == {p for p, leaf in tree.flatten(partition.abstract_state) if memory_kind.is_on_host(leaf)}
        moments = {p for p in kinds if "/mu/" in p or "/nu/" in p}
        assert host == {path for path in moments if "scale" not in path}  # 16 elements are fewer than min_size
        assert [leaf.shape for leaf in jax.tree.leaves(state)] == [
            leaf.shape for leaf in jax.tree.leaves(partition.abstract_state)
        ]


def test_a_step_can_be_lowered_for_a_state_that_is_there_or_abstract():
    state, partition = offloads.sharded(offloads.adam(), offloads.PIECES)
    train_step = zerojax.make_train_step(offloads.loss_fn, partition)
    texts = {train_step.lower(own, offloads.batch_of(0)).as_text() for own in (state, partition.abstract_state)}
    assert len(texts) == 1 and "stablehlo" in texts.pop()


SOME_ON_DEVICE = optax.adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=8)  # sums of rows and columns stay there


@pytest.mark.parametrize(("tx", "donate"), [(offloads.adam(), True), (offloads.adam(), False), (SOME_ON_DEVICE, False)])
def test_a_step_deletes_the_old_state_only_if_it_may(tx, donate):
    state, partition = offloads.sharded(tx, offloads.HOST)
    train_step = zerojax.make_train_step(offloads.loss_fn, partition, donate=donate)
    before = jax.tree.leaves(state)
    after, _ = train_step(state, offloads.batch_of(0))
    again = None if donate else train_step(state, offloads.batch_of(0))[0]
    assert {leaf.is_deleted() for leaf in before} == {donate}
    if not donate:
        offloads.assert_equal(again, after)


def test_a_state_in_another_form_is_refused():
    state, partition = offloads.sharded(offloads.adam(), offloads.PIECES)
    other, _ = offloads.sharded(offloads.adam(), None)
    with pytest.raises(UserError, match="not in the offloaded form"):
        zerojax.make_train_step(offloads.loss_fn, partition)(other, offloads.batch_of(0))
    del state
