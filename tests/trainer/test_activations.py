"""Compares the estimate of a step's temporaries with compiled steps. This module tests zerojax.trainer.activations."""

import compile_only
import jax
import pytest
import runs

from zerojax import configs
from zerojax.commands import config as wizard
from zerojax.plan import traced
from zerojax.trainer import activations, plans
from zerojax.trainer import config as config_lib
from zerojax.trainer import program as program_lib
from zerojax.zero import state_bytes

LEAST = 0.75  # of the estimated peak, that a compiled step takes: the estimate adds up what XLA lets share memory


def settings(preset, **changes):
    raw = configs.get("base")
    raw.update_from_flattened_dict({"model.preset": preset, "global_batch_size": 0, "grad_accum": 1, **changes})
    return config_lib.from_dict(raw)


def program(config, devices=None):
    return program_lib.build(config, devices=jax.devices()[:8] if devices is None else devices)


@pytest.mark.parametrize("preset", runs.cases(["test", "bart_test", "t5_test"], long=["bart_test", "t5_test"]))
def test_temporaries_grow_with_the_sequences_and_with_what_is_kept(preset):
    built = program(settings(preset, seq_len=64, micro_batch_size=1, precision="fp32"))
    temporaries = activations.estimate(built)
    assert (
        temporaries(0, 1, "full", 1)
        < temporaries(0, 2, "full", 1)
        < temporaries(0, 2, "dots", 1)
        < temporaries(0, 2, "none", 1)
    )
    assert temporaries(2, 2, "dots", 1) < temporaries(3, 2, "dots", 1), "gathered weights"


def test_residuals_of_dots_are_the_matmuls_of_a_block():
    config = settings("test", seq_len=64, micro_batch_size=2, precision="fp32")
    built = program(config)
    model, tokens = built.model, 2 * 64
    one, two = (activations.residuals(built, 2, "dots", {"num_layers": count}) for count in (1, 2))
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    matmuls = heads + 2 * kv + 2 * model.mlp_dim + model.embed_dim  # q, k, v, gate, up; o or the input of the block
    scores = 2 * 64 * model.num_heads
    assert (two - one) / 4 / tokens >= matmuls
    assert (two - one) / 4 / tokens <= matmuls + 2 * heads + 3 * model.embed_dim + scores


def test_gradients_of_a_step_in_fp8_multiply_in_fp8_inside_layers_alone():
    found = {}
    for name in ("bf16", "fp8"):
        built = program(settings("test", seq_len=64, micro_batch_size=1, precision=name), jax.devices()[:1])
        one, two = (traced.kernels(activations.gradients(built, 1, {"num_layers": count})) for count in (1, 2))
        for part, kernels in (("layer", traced.less(two, one)), ("rest", traced.less(one, traced.less(two, one)))):
            for work, times in kernels.items():
                found[name, part, work.form] = found.get((name, part, work.form), 0.0) + times * work.flops
    assert found["fp8", "layer", "fp8"] > 0 and ("fp8", "rest", "fp8") not in found
    in_16_bits = found["bf16", "layer", "bf16"]
    assert found["fp8", "layer", "fp8"] + found["fp8", "layer", "bf16"] == pytest.approx(in_16_bits)
    assert found["fp8", "rest", "bf16"] == found["bf16", "rest", "bf16"]


@pytest.mark.long
@pytest.mark.parametrize(
    "preset, changes",
    [
        ("llama3_8b", {"zero.stage": 3, "micro_batch_size": 2, "seq_len": 8192}),
        ("llama3_8b", {"zero.stage": 3, "micro_batch_size": 1, "seq_len": 8192, "model.remat": "full"}),
        ("llama3_1b", {"zero.stage": 0, "micro_batch_size": 2, "seq_len": 4096}),
        (
            "llama3_1b",
            {"zero.stage": 1, "micro_batch_size": 2, "grad_accum": 2, "seq_len": 4096, "model.remat": "full"},
        ),
        ("llama3_1b", {"zero.stage": 2, "micro_batch_size": 4, "seq_len": 4096, "model.remat": "none"}),
    ],
)
def test_a_compiled_step_needs_no_more_than_the_estimate_and_not_far_less(preset, changes):
    config = settings(preset, **{"model.num_layers": 4, **changes})
    with compile_only.optimized():
        built = program(config, list(compile_only.devices(8)))
        plan = plans.plan_program(built, "h200")
    accumulates = built.sizes.grad_accum > 1
    held = sum(state_bytes.bytes_per_device(built.partition, accumulates=accumulates, by_hand=True).values())
    peak = held + activations.estimate(built)(
        config.zero.stage, config.micro_batch_size, config.model.remat, built.sizes.grad_accum
    )
    assert LEAST * peak <= plan.peak <= peak


@pytest.mark.long
def test_a_deep_models_plan_follows_from_two_shallow_ones():
    config = settings("llama3_1b", seq_len=4096, micro_batch_size=2, global_batch_size=16, grad_accum=0)
    chosen = wizard.Fit(3, 2, 1, "dots", 0.0, 0.0)
    with compile_only.optimized():
        devices = list(compile_only.devices(8))
        found = wizard._planned(config, "h200", devices, chosen)
        whole = plans.plan_program(program(config, devices), "h200")
    assert found.peak == pytest.approx(whole.peak, rel=0.01)
    assert found.tokens_per_second == pytest.approx(whole.bound.most_tokens_per_second(whole.tokens), rel=0.01)
