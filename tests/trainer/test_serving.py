"""Compares what is planned with what an engine holds. This module tests zerojax.trainer.serving."""

import dataclasses
import json
import math
import types

import compile_only
import jax
import jax.numpy as jnp
import pytest
import runs

import zerojax
from zerojax.errors import UserError
from zerojax.inference.engine import engine as engine_lib
from zerojax.models import family as family_lib
from zerojax.plan import serving as plan_serving
from zerojax.plan import targets
from zerojax.trainer import model as model_lib
from zerojax.trainer import serving
from zerojax.zero import stages
from zerojax.zero.host import memory_kind

SETTINGS = {"model__vocab_size": 320, "seq_len": 64}


def held(arrays):
    """Returns the bytes of arrays on the first device."""
    device = jax.devices()[0]
    shards = [shard for leaf in jax.tree.leaves(arrays) for shard in leaf.addressable_shards if shard.device == device]
    return sum(shard.data.nbytes for shard in shards)


@pytest.mark.parametrize(
    "preset, precision, kind, ways",
    [
        ("test", "bf16", "int8", 2),
        ("hybrid_test", "bf16", "none", 2),
        *[
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("test", "fp32", "none", 1), ("test", "bf16", "nf4", 1), ("moe_test", "bf16", "none", 2))
        ],
    ],
)
def test_an_engine_holds_what_is_planned(preset, precision, kind, ways):
    config = runs.config(**SETTINGS, model__preset=preset, precision=precision, mesh__model=ways)
    planned = serving.served(config, kind)
    family, model = model_lib.shape(config, None)
    mesh = zerojax.make_mesh(model=ways, devices=jax.devices()[:ways])
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    shapes = family_lib.abstract_params(family.parts, model)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, dtype), shapes)
    partition = stages.partition_state({"params": shapes}, mesh=mesh, stage=0)
    given = types.SimpleNamespace(
        family=family, config=model, special=family_lib.SpecialTokens(), partition=partition, params=params
    )
    made = engine_lib.Engine(given, format=kind, slots=3, max_len=64, chunk=16)
    assert planned.weights == held(made._params) and 3 * planned.cache == held(made._caches)
    assert 3 * planned.kept == (0 if made._kept is None else held(made._kept.arrays))
    assert bool(planned.kept) == (preset == "hybrid_test")
    table = model.vocab_size * model.embed_dim * jnp.dtype(dtype).itemsize
    unread = planned.weights - planned.dense - planned.experts
    has_experts = preset in ("moe_test", "hybrid_test")
    assert unread in (0, table, table // ways) and bool(planned.experts) == has_experts
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert has_experts or planned.flops < 2.5 * count / ways
    assert ("dequantized" in planned.runs) == (kind != "none")


def test_float16_is_bounded_as_bfloat16_is():
    of_16 = [
        serving.served(runs.config(**SETTINGS, model__preset="test", precision=name), "none")
        for name in ("fp16", "bf16")
    ]
    assert [served.dtype for served in of_16] == ["fp16", "bf16"]
    few, others = (plan_serving.plan(served, targets.get("h200")).rows for served in of_16)
    assert few == others


def test_an_engine_whose_weights_are_in_host_memory_streams_what_is_planned():
    """On the device are the others, and at most the weights of four blocks at once."""
    config = runs.config(
        **SETTINGS, model__preset="test", model__num_layers=6, offload__params="host", offload__params_fraction=0.8
    )
    planned, everything = (
        serving.served(config, "none"),
        serving.served(runs.config(**SETTINGS, model__preset="test", model__num_layers=6), "none"),
    )
    family, model = model_lib.shape(config, None)
    shapes = family_lib.abstract_params(family.parts, model)
    mesh = zerojax.make_mesh(devices=jax.devices()[:1])
    offload = {"params": "host", "params_fraction": 0.8}
    partition = stages.partition_state({"params": shapes}, mesh=mesh, stage=3, offload=offload)
    params = jax.tree.map(
        lambda leaf, sharding: jax.device_put(jnp.ones(leaf.shape, leaf.dtype), sharding),
        shapes,
        partition.shardings["params"],
    )
    on_host = [leaf.nbytes for leaf in jax.tree.leaves(params) if memory_kind.is_on_host(leaf)]
    assert planned.streamed == sum(on_host) and planned.dense == everything.dense and planned.cache == everything.cache
    resident = everything.weights - planned.streamed
    assert resident < planned.weights < resident + 0.8 * planned.streamed


def test_weights_that_the_devices_do_not_divide_are_told(capsys):
    serving.served(runs.config(**{**SETTINGS, "mesh__model": 3}), "none")
    assert capsys.readouterr().err.startswith("zerojax: config.mesh: ")


def test_what_is_not_served_is_refused_in_one_line():
    for line, changes in (
        ("--serve: plans decoders", {"model__preset": "t5_test"}),
        ("offload.params: is 'nvme', and an engine streams", {"offload__params": "nvme"}),
        ("offload.params: is 'host', .*mesh.model=1", {"offload__params": "host", "mesh__model": 2}),
        ("mesh.context: is 2", {"mesh__context": 2}),
        ("mesh.expert: is 2", {"mesh__expert": 2}),
        ("mesh.model: is 16, and --serve sees 8 devices", {"mesh__model": 16}),
        ("seq_len: is 4096, and the model has 1024 positions", {"model__preset": "gpt2", "seq_len": 4096}),
    ):
        with pytest.raises(UserError, match=line):
            serving.served(runs.config(**{**SETTINGS, **changes}), "none")


def test_no_token_is_foretold_faster_than_the_bound_and_more_texts_take_longer():
    """For an absent H200."""
    config = runs.config(**SETTINGS, model__preset="test", precision="bf16")
    target, devices = targets.get("h200"), compile_only.gpus(topology="1x1")
    with pytest.MonkeyPatch.context() as patched, compile_only.optimized():
        compile = jax.stages.Lowered.compile
        patched.setattr(jax.stages.Lowered, "compile", lambda lowered: compile(lowered, dict(compile_only.FAST)))
        found = serving.foretold(config, "none", target, devices, (2, 512), 16)
    planned = serving.served(config, "none")
    bound = plan_serving.plan(planned, target)
    at_most = {batch: rate for batch, _, rate in bound.rows}
    assert [own.texts for own in found.steps] == [2, 512] and found.prompt.tokens == 16
    assert all(own.rate < at_most[own.texts] for own in found.steps)
    assert found.steps[0].seconds < found.steps[1].seconds < 256 * found.steps[0].seconds
    for own in (*found.steps, found.prompt):
        assert (
            own.seconds == pytest.approx(sum(own.parts.values()))
            and own.peak > planned.weights + own.texts * planned.cache
        )
    told = dataclasses.replace(bound, foretold=found)
    assert "the first token of a prompt of 16 tokens" in plan_serving.text(told)
    assert json.loads(json.dumps(plan_serving.as_json(told)))["foretold"]["steps"][1]["texts"] == 512
    with pytest.raises(UserError, match="--prompt: is 64, and a text has seq_len=64 tokens"):
        serving.foretold(config, "none", target, devices, (1,), 64)
