"""Judges steps by their numbers. This module tests zerojax.trainer.health; tests/whole_runs/test_fp16_runs.py has full runs."""

import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

from zerojax.errors import UserError
from zerojax.trainer import health as health_lib

GOOD = {"loss": 2.0, "grad_norm": 1.0}
SCALED = {**GOOD, "loss_scale": 8.0, "overflow_leaf": -1.0, "is_exhausted": 0.0}
OVERFLOW = {**SCALED, "grad_norm": math.inf, "overflow_leaf": 1.0}


class Saver:
    """A fake checkpointer that holds `saved` steps."""

    def __init__(self, *saved: int):
        self.directory, self._saved = pathlib.Path("checkpoints"), saved

    def wait(self):
        pass

    def steps(self):
        return list(self._saved)


def health(*saved: int, start: int = 0) -> health_lib.Health:
    params = {name: jax.ShapeDtypeStruct((2,), "float32") for name in ("a", "b")}
    return health_lib.Health(params, Saver(*saved), start=start, learning_rate=0.01, min_scale=1.0)


def test_a_finite_step_is_good():
    run = health(start=3)
    for step, numbers in ((4, GOOD), (5, SCALED)):
        run.count(step, run.flaw(numbers))
    assert (run.last_good, run.skipped, run.summary()) == (5, 0, None)


@pytest.mark.parametrize(("name", "value"), [("loss", math.nan), ("grad_norm", math.inf)])
def test_a_number_that_is_not_finite_ends_the_run_and_names_the_last_good_checkpoint(name, value):
    run = health(1, 2, 3)
    run.count(1, None)
    run.count(2, None)
    with pytest.raises(UserError) as caught:
        run.count(3, run.flaw({**GOOD, name: value}))
    assert str(caught.value) == (
        f"step 3: {name} is {value}; the last good checkpoint is of step 1 in checkpoints; "
        "lower config.optimizer.learning_rate (now 0.01) and start over, or check the data"
    )


def test_where_no_checkpoint_is_good_the_line_says_so():
    assert "no checkpoint before it is good in checkpoints" in str(health(4).end(5, "eval_loss is nan"))


def test_the_first_step_of_a_resumed_run_blames_the_restored_state_and_not_the_learning_rate():
    run = health(1, 3, start=3)
    flaw = run.flaw({**GOOD, "loss": math.nan})
    with pytest.raises(
        UserError, match=r"step 4: loss is nan; .* is of step 1 .* was restored from step 3: move"
    ) as caught:
        run.count(4, flaw)
    assert "learning_rate" not in str(caught.value)
    run.count(4, None)
    assert "learning_rate" in str(run.end(5, "loss is nan"))


def test_an_overflow_is_a_skipped_step_with_the_name_of_the_leaf():
    run = health()
    flaw = run.flaw(OVERFLOW)
    assert flaw.is_skipped and flaw.why == "the gradient of params/b is not finite at loss scale 8"
    run.count(1, flaw)
    assert "1 steps were skipped" in run.summary() and "no step was taken" in run.summary()
    run.count(2, None)
    assert (run.last_good, run.skipped) == (2, 1) and "no step was taken" not in run.summary()


def test_an_overflow_at_the_smallest_scale_ends_the_run():
    run = health()
    with pytest.raises(
        UserError, match=r"which is the smallest; .* lower config.loss_scale.min_scale \(now 1\), or lower"
    ):
        run.count(1, run.flaw({**OVERFLOW, "is_exhausted": 1.0}))


def test_a_state_that_is_not_finite_ends_the_run_and_names_the_leaf_and_the_last_good_checkpoint():
    run = health(1, 2)
    run.count(3, None)
    run.check(3, {"params": {"a": jnp.ones(2)}})
    with pytest.raises(UserError, match=r"step 3: params/a is not finite after it, .* checkpoint is of step 2 in"):
        run.check(3, {"params": {"a": jnp.array([1, jnp.inf])}})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_the_first_leaf_with_a_number_that_is_not_finite_is_found_on_any_device_and_memory(dtype, value, kind):
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"), memory_kind=kind)
    good = jnp.linspace(-1, 1, 64, dtype=dtype)
    state = {"count": jnp.int32(2**31 - 1), "key": jax.random.key(0), "mu": good, "nu": jax.device_put(good, sharding)}
    assert health_lib.first_not_finite(state) is None
    bad = jax.device_put(good.at[61].set(value), sharding)
    assert health_lib.first_not_finite({**state, "nu": bad, "w": bad}) == "nu"
    assert bad.sharding == sharding


def test_the_largest_and_smallest_numbers_are_finite():
    limits = jnp.finfo(jnp.float32)
    assert health_lib.first_not_finite({"w": jnp.array([limits.max, limits.min, limits.tiny / 4])}) is None


def test_leaves_of_one_shape_and_sharding_share_a_program_over_all_devices(caplog):
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    state = {name: jax.device_put(jnp.ones((8, 3)), sharding) for name in ("w", "mu", "nu")}
    with jax.log_compiles():
        assert health_lib.first_not_finite(state) is None
    told = [record.getMessage() for record in caplog.records]
    assert sum("Finished XLA compilation of jit(_all_finite)" in line for line in told) == 1
