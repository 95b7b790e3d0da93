"""Trains our families with `mesh.model` alone, and compares with one device. This module tests the tables of zerojax.models.parallel."""

import contextlib
import functools
import itertools
import math

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax import configs, roles, specs, traces
from zerojax.checkpoint import checkpointer
from zerojax.errors import UserError
from zerojax.plan import departures
from zerojax.trainer import config as config_lib
from zerojax.trainer import plans, program, resume
from zerojax.trainer import state as state_lib
from zerojax.zero.update import padding
from zerojax.zero.weights import partition as partition_lib

SUM_ORDER = 1e-5  # relative: the same float32 sums, taken in another order
EIGHT_BITS = 0.02  # relative: a sum in another order may round to another number of 8 bits

# What is trained: values that change the losses. Packed rows have texts of several examples and labels of some tokens.
PLAIN = {"model__remat": "dots"}
ODD = {"seq_len": 31, "model__vocab_size": 321}  # divide by no size of `model`
LORA = {"lora__r": 4, "lora__target_modules": "all-linear"}
PACKED = {"data__task": "chat", "data__chat_template": "plain", "data__train_file": "tests/golden/crosses/train.jsonl"}
T5, BART = {"model__preset": "t5_test"}, {"model__preset": "bart_test"}
HOST = {"offload__optimizer": "host"}

# name -> (what is trained, (replica, data, model), how). One runs by default: it shares most of what the others have.
CASES = {
    "three axes, passes, tiles": (PLAIN, (2, 2, 2), {"grad_accum": 2, "model__tile_tokens": 10}),
    "all devices, odd sizes, stage 0": (ODD, (1, 1, 8), {"zero__stage": 0}),
    "bart, stage 2": (BART, (1, 2, 2), {"zero__stage": 2, "reduce_dtype": "fp32"}),
    "nf4 with adapters": ({**LORA, "lora__quantize": "nf4"}, (1, 2, 4), {}),
    "host": (PLAIN, (1, 2, 2), {**HOST, "offload__params": "host"}),
    "packed, stage 1": ({**PLAIN, **PACKED}, (1, 2, 2), {"zero__stage": 1}),
    "t5": (T5, (1, 2, 4), {}),
    "t5, odd sizes": ({**T5, **ODD}, (2, 1, 2), {"zero__stage": 1, "grad_accum": 2}),
    "bart, all devices": (BART, (1, 1, 8), {"grad_accum": 2}),
    "bart, odd sizes, host": ({**BART, **ODD}, (1, 2, 2), HOST),
    "copies": (PLAIN, (4, 1, 2), {"zero__stage": 0}),
    "stage 1": (PLAIN, (1, 4, 2), {"zero__stage": 1, "grad_accum": 2, "accum_dtype": "fp32"}),
    "stage 2": (PLAIN, (1, 2, 4), {"zero__stage": 2, "grad_accum": 2}),
    "full remat": (PLAIN, (1, 2, 2), {"model__remat": "full", "zero__indivisible": "pad"}),
    "optimizer on the host": (PLAIN, (2, 2, 2), {**HOST, "offload__by_block": "on"}),
    "activations on the host": (PLAIN, (1, 2, 2), {"model__offload": r"layer_\d+/mlp"}),
    "adapters": (LORA, (2, 2, 2), {"grad_accum": 2}),
    "int8 with adapters, host": ({**LORA, "lora__quantize": "int8"}, (1, 2, 2), {**HOST, "offload__params": "host"}),
    "adapters of bart": ({**LORA, **BART, "lora__modules_to_save": "shared"}, (1, 2, 2), {}),
    "packed, passes": ({**PLAIN, **PACKED}, (1, 1, 4), {"grad_accum": 2}),
    "own rows first": (PLAIN, (1, 2, 2), {"zero__overrides": (("mlp", (None,)), ("embed", (None, "data")))}),
    "8 bits": ({"precision": "fp8"}, (1, 2, 2), {}),
    "8 bits, rowwise": ({"precision": "fp8", "fp8__recipe": "rowwise"}, (1, 2, 2), {"grad_accum": 2}),
    "8 bits, delayed": ({"precision": "fp8", "fp8__recipe": "delayed"}, (2, 2, 2), {}),
}
DEFAULT = 1
RING = {"model__ring": True}
CASES |= {
    "ring, all devices, stage 0": (PLAIN, (1, 1, 8), {**RING, "zero__stage": 0}),
    "ring, passes, stage 1": (PLAIN, (1, 2, 2), {**RING, "zero__stage": 1, "grad_accum": 2}),
    "ring, full remat, stage 2": (PLAIN, (2, 2, 2), {**RING, "zero__stage": 2, "model__remat": "full"}),
    "ring, adapters": (LORA, (1, 2, 2), RING),
    "ring, packed": ({**PLAIN, **PACKED}, (1, 2, 2), RING),
    "ring, everything on the host": (PLAIN, (1, 2, 2), {**RING, **HOST, "offload__params": "host"}),
    "ring, activations on the host": (PLAIN, (1, 2, 2), {**RING, "model__offload": r"layer_\d+/mlp"}),
    "ring, matmuls again": (PLAIN, (1, 2, 2), {**RING, "model__recompute": r"layer_\d+/mlp/up"}),
}


@pytest.fixture(scope="module")
def alone():
    """Returns f(what is trained) -> the same on one device at stage 0."""
    return functools.cache(lambda what: runs.trained(zero__stage=0, **dict(what)))


@pytest.mark.parametrize("name", runs.cases(CASES, long=list(CASES)[DEFAULT:]))
def test_mesh_model_gives_the_losses_of_one_device(name, alone):
    what, shape, how = CASES[name]
    axes = dict(zip(("mesh__replica", "mesh__data", "mesh__model"), shape))
    found = runs.trained(math.prod(shape), **{**what, **axes, **how})
    allowed = EIGHT_BITS if what.get("precision") == "fp8" else SUM_ORDER
    np.testing.assert_allclose(found, alone(tuple(what.items())), rtol=allowed)


def test_a_step_of_bart_over_model_is_traced_and_keeps_activations_sharded():
    """Its losses are compared with -m long, those of its imported weights in tests/interop/test_pretrained.py."""
    what, (_, data, model), how = CASES["bart, stage 2"]
    devices = jax.devices()[: data * model]
    built = program.build(
        runs.config(**what, **how, mesh__data=data, mesh__model=model), tokenizer_vocab=320, devices=devices
    )
    traced = built.train_step.trace(built.partition.abstract_state, built.abstract_batch)
    kept = [e for e in traces.equations(traced.jaxpr.jaxpr) if e.primitive.name == "sharding_constraint"]
    shapes = [e.outvars[0].aval.shape for e in kept if "model" in specs.axes(e.params["sharding"].spec)]
    # 4 examples on a device of 32 inputs and 8 targets; weights have other shapes.
    assert all(shapes.count((4, tokens, 64)) > 2 * 3 for tokens in (32, 8))  # forward and backward, of every residual


@pytest.mark.parametrize(("examples", "sent"), [(4, 2 * (2 + 2)), (3, 0)])
def test_modules_run_in_a_ring_where_the_axis_divides_a_devices_examples(examples, sent):
    """Attention and MLP of the one layer send their inputs and sums, and the gradients of both: the bytes that they send without a ring."""
    how = {"precision": "bf16", "micro_batch_size": examples, "global_batch_size": examples, **RING}
    built = program.build(runs.config(**how, mesh__model=2), tokenizer_vocab=320, devices=jax.devices()[:2])
    told = pytest.warns(
        UserWarning, match="^activations: no module .* runs in a ring, which takes examples that the axis"
    )
    with contextlib.nullcontext() if sent else told:
        traced = built.train_step.trace(built.partition.abstract_state, built.abstract_batch)
    found = [eqn for eqn in traces.equations(traced.jaxpr.jaxpr) if eqn.primitive.name == "ppermute"]
    assert [eqn.outvars[0].aval.shape[0] for eqn in found] == [examples // 2] * sent


@runs.LONG
@pytest.mark.parametrize("lora", [{}, {**LORA, "lora__dropout": 0.1}])
def test_dropout_is_that_of_the_mesh_without_the_axis(lora):
    """Devices along `data` draw their own masks, those along `model` the same."""
    what = {**T5, **lora, "model__dropout": 0.1}
    found = runs.trained(4, **what, mesh__data=2, mesh__model=2)
    np.testing.assert_allclose(found, runs.trained(2, **what, mesh__data=2), rtol=SUM_ORDER)


LOGICAL = [{"precision": "bf16"}, pytest.param({**LORA, **BART, "zero__stage": 1}, marks=runs.LONG)]


@runs.LONG
@pytest.mark.parametrize("what", LOGICAL)
def test_a_checkpoint_of_data_restores_over_model_and_back_bit_for_bit(what, tmp_path):
    """Also where the vocabulary divides by `model` alone, and is padded for `data`."""
    settings = {**what, "model__vocab_size": 322, "zero__min_size": 0, "zero__indivisible": "pad"}
    meshes = [{"mesh__data": 8}, {"mesh__replica": 2, "mesh__data": 2, "mesh__model": 2}, {"mesh__data": 8}]
    built = [program.build(runs.config(**settings, **mesh), tokenizer_vocab=320) for mesh in meshes]
    numbers = np.random.default_rng(0)

    def drawn(leaf):  # zeros of moments would prove little
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.device_put(numbers.normal(size=leaf.shape), leaf.sharding).astype(leaf.dtype) if is_float else leaf

    one = built[0].partition
    state = padding.unpad(state_lib.first(built[0]), one)
    trained = jax.tree.map(drawn, one.trainable_part(state.params))  # frozen weights are no part of a checkpoint
    params = partition_lib.with_frozen(trained, state.params)
    state = padding.pad(state.replace(params=params, opt_state=jax.tree.map(drawn, state.opt_state)), one)
    states = [state]
    for number, (before, after) in enumerate(itertools.pairwise(built)):
        with checkpointer.Checkpointer(tmp_path / str(number)) as saver:
            saver.save(1, before.to_logical(states[-1]), {}, meta=resume.meta(before))
            saver.wait()
            states.append(resume.state(after, saver, 1, saver.meta(1)))
    first, *others = (
        jax.tree.map(np.asarray, padding.unpad(own, program.partition)) for own, program in zip(states, built)
    )
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other.opt_state, first.opt_state)
        jax.tree.map(np.testing.assert_array_equal, other.params, first.params)
    leaves = jax.tree.leaves((states[1].params, states[1].opt_state))
    used = {axis for leaf in leaves for axis in specs.axes(leaf.sharding.spec)}
    assert used == {"data", "model"}


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"model__by_columns": "head"},
            "by_columns: params/head/kernel cannot be used by columns, because the mesh has model=2",
        ),
        ({"zero__overrides": (("", ()),)}, "mesh.model: is 2, and no weight is sharded over `model`"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_anything_compiles(settings, words):
    with pytest.raises(UserError, match=f"^config\\.(model\\.)?{words}"):
        program.build(runs.config(mesh__data=4, mesh__model=2, **settings), tokenizer_vocab=320)


def test_weights_that_do_not_divide_are_said_in_one_line(capfd):
    program.build(runs.config(mesh__data=1, mesh__model=8, model__vocab_size=323), tokenizer_vocab=320)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("zerojax: config.mesh: ")
    assert (
        "layer_*/attention/k/kernel, layer_*/attention/v/kernel stay replicated, because model=8 does not divide 2"
        in line
    )
    assert "embed/embedding, head/kernel stay replicated, because model=8 does not divide 323" in line


@runs.LONG
@pytest.mark.parametrize("hosts", [8, 64])
def test_70b_gathers_an_eighth_of_each_weight_and_tokens_in_16_bits(hosts):
    """Compiled for absent GPUs: the config of 70B with one layer."""
    raw = configs.get("llama3_70b_tp8")
    raw.model.num_layers = 1
    devices = list(compile_only.devices(8 * hosts))
    built = program.build(config_lib.from_dict(raw), tokenizer_vocab=320, devices=devices)
    plan = plans.plan_program(built, "h200", compiler_options=compile_only.FAST)
    weights, rows = plan.ledger.weights, plan.ledger.rows
    gathered = [row for row in rows if row.kind == "all-gather" and row.weights]
    assert {row.axes for row in gathered} == {("data",)}
    for row in gathered:
        # A device receives what it lacks of its eighth, but for small weights of which it uses all.
        (size,) = {weights[path].size for path in row.weights}
        assert row.elements == size * (hosts - 1) // hosts
        assert all(math.prod(weights[path].shape) in (8 * size, 8192) for path in row.weights)
    over_model = [row for row in rows if row.axes == ("model",) and row.role == roles.ACTIVATIONS]
    moved = [row for row in over_model if row.kind == "all-gather" and row.elements > 1e6]
    assert moved and {row.dtype for row in moved} == {"bf16"}
    sent = {(row.role, row.kind, row.dtype) for row in rows if row.weights}
    assert {(role, "all-gather", "bf16") for role in (roles.WEIGHTS_FORWARD, roles.WEIGHTS_BACKWARD)} <= sent
    assert all(dtype == "bf16" for role, kind, dtype in sent if kind == "all-gather")
    summed = [row for row in rows if row.role == roles.GRADIENTS and row.kind == "all-reduce"]
    assert not [row for row in summed if row.elements > 8192 and row.axes == ("data",)]
    assert plan.fits and plan.bound.step_seconds > 0
    assert {found.rule for found in plan.findings} == {"the step waits for weights and gradients between hosts"}, (
        "one layer is short"
    )
    assert departures.departures(plan.ledger) == ()


@runs.LONG
def test_what_a_ring_sends_has_matmuls_beside_it_in_the_compiled_program():
    """Compiled for absent GPUs: each of the ten hops of a layer, and the bytes of a layer without a ring."""
    found = []
    for ring in (True, False):
        raw = configs.get("llama3_1b")
        raw.model.num_layers, raw.model.ring, raw.mesh.model, raw.seq_len = 1, ring, 2, 32768
        raw.micro_batch_size, raw.global_batch_size = 2, 0
        built = program.build(config_lib.from_dict(raw), tokenizer_vocab=320, devices=list(compile_only.devices(2)))
        found.append(plans.plan_program(built, "h200", compiler_options=compile_only.FAST))
    rows = [row for row in found[0].ledger.rows if row.kind == "collective-permute"]
    assert sum(row.times for row in rows) == 10 and all(row.is_async and row.overlaps for row in rows)
    ringed, plain = (sum(row.nbytes * row.times for row in plan.ledger.rows) for plan in found)
    assert ringed == plain
    assert not found[0].findings and departures.departures(found[0].ledger) == ()
