"""Checks the arguments made of a DeepSpeed config. This module tests zerojax.migration.own_step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.migration import keys

PARAMS = {"kernel": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "bias": jnp.ones(4)}
GRADS = {"kernel": jnp.cos(PARAMS["kernel"]), "bias": jnp.linspace(0.1, 0.4, 4)}
SAME = 1e-6  # the same float32 update in another order


def made(**blocks):
    return zerojax.from_deepspeed_config(blocks, devices=8)


def three_steps(tx):
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        updates, state = tx.update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params


def same(one, other):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=SAME, atol=SAME), three_steps(one), three_steps(other)
    )


OPTIMIZERS = {
    "Adam": ({"lr": 1e-2, "weight_decay": 0.1}, optax.adamw(1e-2, 0.9, 0.999, weight_decay=0.1)),
    "adam": (
        {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False},
        optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-2)),
    ),
    "Lion": ({"lr": 1e-2}, optax.lion(1e-2, 0.9, 0.999, weight_decay=0.0)),
    "SGD": (
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-2, 0.9, nesterov=True)),
    ),
    "Lamb": ({"lr": 1e-2}, optax.lamb(1e-2, eps=1e-8)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_is_optax_with_deepspeeds_defaults(kind):
    params, expected = OPTIMIZERS[kind]
    found = made(optimizer={"type": kind, "params": params})
    same(found.tx, expected)
    assert float(found.schedule(5)) == pytest.approx(1e-2)
    unsupported = [line.key for line in found.lines if line.verdict == keys.UNSUPPORTED]
    assert unsupported == (["optimizer.params.max_coeff"] if kind == "Lamb" else [])  # the limits of its trust ratio


def test_a_config_becomes_the_arguments_of_a_step_that_trains():
    found = zerojax.from_deepspeed_config(
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": 2},
            "fp16": {"enabled": True, "initial_scale_power": 4},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
    )
    assert (found.stage, found.global_batch_size, found.step["grad_accum"]) == (2, 32, 2)
    assert found.step["compute_dtype"] == jnp.float16 and found.loss_scale.init_scale == 16.0

    def init():
        params = {"kernel": jnp.ones((64, 8))}
        return zerojax.TrainState.create(
            apply_fn=None, params=params, tx=found.tx, rng=jnp.zeros(2, jnp.uint32), loss_scale=found.loss_scale.init()
        )

    mesh = zerojax.make_mesh(**found.mesh)
    state, partition = zerojax.shard_train_state(init, mesh=mesh, stage=found.stage, **found.options)
    step = zerojax.make_train_step(
        lambda params, batch, state: jnp.mean((batch @ params["kernel"]).astype(jnp.float32) ** 2),
        partition,
        **found.step,
    )
    batch = np.eye(64, dtype=np.float32)[np.arange(32).reshape(2, 16)]
    grad = np.zeros((64, 8), np.float32)
    grad[:32] = 2 / 32 / 8
    norm = np.sqrt((grad**2).sum())
    state, metrics = step(state, batch)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-3)
    np.testing.assert_allclose(state.params["kernel"], 1 - 0.1 * grad * min(1.0, 0.5 / norm), rtol=1e-5)


def test_schedules_that_a_config_of_the_trainer_lacks_are_made():
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}
    found = made(optimizer={"type": "Adam", "params": {}}, scheduler={"type": "OneCycle", "params": params})
    assert [float(found.schedule(count)) for count in (0, 2, 4, 6)] == pytest.approx([0, 0.5, 1, 0.5])
    assert {line.verdict for line in found.lines if line.key.startswith("scheduler")} == {keys.TAKEN}


def test_what_a_script_decides_is_left_to_it_or_asked_for():
    found = made(train_micro_batch_size_per_gpu="auto")
    assert found.tx is None and found.global_batch_size is None
    block = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    with pytest.raises(zerojax.UserError, match=r"optimizer.params.lr: is 'auto'.*pass auto="):
        made(**block)
    filled = zerojax.from_deepspeed_config(block, devices=8, auto={"optimizer.params.lr": 0.5})
    assert float(filled.schedule(0)) == 0.5


def test_wrong_and_strict_inputs_are_one_line():
    with pytest.raises(
        zerojax.UserError, match=r"train_batch_size: 20 is not a multiple of .* 8 devices; .* set it to 16"
    ):
        made(train_batch_size=20, train_micro_batch_size_per_gpu=2)
    with pytest.raises(zerojax.UserError, match=r"total_num_steps: is missing"):
        made(optimizer={"type": "Adam"}, scheduler={"type": "WarmupDecayLR"})
    with pytest.raises(zerojax.UserError, match=r"wandb.enabled: is not supported"):
        zerojax.from_deepspeed_config({"wandb": {"enabled": True}}, devices=8, strict=True)


def test_tensor_parallelism_of_a_model_of_ones_own_needs_its_overrides():
    adam = {"type": "Adam", "params": {"lr": 1e-3}}
    config = {"train_batch_size": 8, "optimizer": adam, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(
        zerojax.UserError, match=r"^tensor_parallel\.autotp_size: is not supported \(a model of your own says"
    ):
        zerojax.from_deepspeed_config(config, strict=True)
