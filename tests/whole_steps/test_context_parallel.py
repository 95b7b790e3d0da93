"""Trains our families with rows in parts on devices along `mesh.context`, and compares with one device. This module tests what runs over
that axis together: rows, attention, sums, and the state that is sharded over it.
"""

import dataclasses
import functools
import itertools
import math

import compile_only
import context_costs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import specs
from zerojax.checkpoint import checkpointer
from zerojax.data import parts
from zerojax.errors import UserError
from zerojax.hlo import collectives, flow, syntax
from zerojax.models import family as family_lib
from zerojax.models.llama import family
from zerojax.models.llama import model as llama_model
from zerojax.models.llama.config import Heads
from zerojax.models.mamba2 import family as mamba2
from zerojax.models.mamba2 import model as mamba2_model
from zerojax.ops import context_attention
from zerojax.plan import departures
from zerojax.trainer import plans, program, resume
from zerojax.trainer import state as state_lib

PLAIN = {"model__remat": "dots"}
LORA = {"lora__r": 4, "lora__target_modules": "all-linear"}
PACKED = {"data__task": "chat", "data__chat_template": "plain", "data__train_file": "tests/golden/crosses/train.jsonl"}
PAIRS = {"data__task": "seq2seq", "data__train_file": "tests/golden/crosses/train.jsonl", "data__answer_len": 8}
T5, BART = {"model__preset": "t5_test"}, {"model__preset": "bart_test"}
HOST = {"offload__optimizer": "host"}
HYBRID = {"model__preset": "hybrid_test", "model__num_layers": 2}  # layers of the gated delta rule and of attention
NEMOTRON, LFM2 = {"model__preset": "nemotron_test", "model__num_layers": 4}, {"model__preset": "lfm2_test"}

# name -> (what is trained, (replica, data, context, model), how). One runs by default: it shares most of what the others have.
CASES = {
    "three axes, passes, tiles": (PLAIN, (1, 2, 2, 2), {"grad_accum": 2, "model__tile_tokens": 10}),
    "all devices, packed, stage 2": ({**PLAIN, **PACKED}, (1, 1, 8, 1), {"zero__stage": 2}),
    "stage 0": (PLAIN, (1, 1, 4, 1), {"zero__stage": 0}),
    "copies, stage 1, passes": (PLAIN, (2, 2, 2, 1), {"zero__stage": 1, "grad_accum": 2}),
    "stage 2": (PLAIN, (2, 1, 2, 2), {"zero__stage": 2, "grad_accum": 2}),
    "all devices": (PLAIN, (1, 1, 8, 1), {"reduce_dtype": "fp32"}),
    "columns": (PLAIN, (2, 2, 2, 1), {"model__by_columns": "embed|head"}),
    "a vocabulary that does not divide": (
        {"model__vocab_size": 321},
        (1, 2, 2, 1),
        {"model__remat": "full", "zero__indivisible": "pad"},
    ),
    "own rows first": (PLAIN, (1, 2, 2, 1), {"zero__overrides": (("mlp", (None,)), ("embed", (None, "data")))}),
    "optimizer on the host": (PLAIN, (1, 2, 2, 2), {**HOST, "offload__by_block": "on"}),
    "optimizer on the host, streamed": (PLAIN, (1, 2, 2, 1), {**HOST, "offload__by_block": "off", "zero__stage": 2}),
    "host": (PLAIN, (1, 2, 4, 1), {**HOST, "offload__params": "host", "grad_accum": 2}),
    "activations on the host": (PLAIN, (1, 2, 2, 1), {"model__offload": r"layer_\d+/mlp"}),
    "adapters": (LORA, (2, 1, 2, 2), {"grad_accum": 2}),
    "nf4 with adapters": ({**LORA, "lora__quantize": "nf4"}, (1, 2, 4, 1), {}),
    "int8 with adapters, host": (
        {**LORA, "lora__quantize": "int8"},
        (1, 2, 2, 1),
        {**HOST, "offload__params": "host"},
    ),
    "packed, passes": ({**PLAIN, **PACKED}, (1, 2, 2, 1), {"grad_accum": 2}),
    "t5": (T5, (1, 2, 4, 1), {}),
    "t5, model, stage 1": (T5, (1, 1, 2, 2), {"zero__stage": 1, "grad_accum": 2}),
    "bart, stage 2": (BART, (1, 2, 2, 1), {"zero__stage": 2}),
    "bart, host": (BART, (1, 1, 4, 2), HOST),
    "pairs of t5": ({**T5, **PAIRS}, (1, 2, 2, 1), {}),
    "8 bits": ({"precision": "fp8"}, (1, 2, 2, 1), {}),
    "8 bits, delayed": ({"precision": "fp8", "fp8__recipe": "delayed"}, (1, 1, 2, 2), {"grad_accum": 2}),
    "tiles": ({**PLAIN, "model__tile_tokens": 4}, (1, 2, 2, 1), {}),
    "hybrid, packed, kinds": ({**HYBRID, **PACKED}, (1, 2, 4, 1), {"model__programs": "kinds"}),
    "hybrid, stage 0, remat": ({**HYBRID, "model__remat": "full"}, (1, 1, 2, 1), {"zero__stage": 0}),
    "hybrid, model, passes": (HYBRID, (1, 1, 2, 2), {"grad_accum": 2, "reduce_dtype": "fp32"}),
    "hybrid, adapters, host": ({**HYBRID, **LORA}, (1, 2, 2, 1), HOST),
    "mamba, stage 2": (NEMOTRON, (1, 2, 4, 1), {"zero__stage": 2}),
    "mamba, packed, params on the host": (
        {**NEMOTRON, **PACKED},
        (1, 2, 2, 1),
        {**HOST, "offload__params": "host"},
    ),
    "convolutions, packed": ({**LFM2, **PACKED}, (1, 1, 8, 1), {}),
    "hybrid, stages": (HYBRID, (1, 1, 2, 1), {"mesh__pipe": 2, "grad_accum": 2, "zero__stage": 1}),
}
DEFAULT = 1
SUM_ORDER = 1e-5  # relative: the same float32 sums, taken in another order
EIGHT_BITS = 0.02  # relative: a sum in another order may round to another number of 8 bits


@pytest.fixture(scope="module")
def alone():
    """Returns f(what is trained) -> the same on one device at stage 0."""
    return functools.cache(lambda what: runs.trained(zero__stage=0, **dict(what)))


@pytest.mark.parametrize("name", runs.cases(CASES, long=list(CASES)[DEFAULT:]))
def test_mesh_context_gives_the_losses_of_one_device(name, alone):
    what, sizes, how = CASES[name]
    axes = dict(zip(("mesh__replica", "mesh__data", "mesh__context", "mesh__model"), sizes))
    found = runs.trained(math.prod(sizes) * how.get("mesh__pipe", 1), **what, **axes, **how)
    allowed = EIGHT_BITS if what.get("precision") == "fp8" else SUM_ORDER
    np.testing.assert_allclose(found, alone(tuple(what.items())), rtol=allowed)


WINDOWS = dataclasses.replace(
    family.PRESETS["test"], num_layers=2, heads=Heads(windows=(5, 0), norm="each"), num_kv_heads=4, num_heads=12
)


@runs.LONG  # tests/ops attends with windows and other heads, and the cases above train
@pytest.mark.parametrize("sizes", [(1, 2, 4, 1), (1, 1, 8, 1)])
def test_relatives_with_windows_and_norms_of_queries_have_the_losses_of_one_device(sizes, monkeypatch):
    """Twelve heads do not divide by 8; a window of 5 tokens is longer than the 4 of a device."""
    monkeypatch.setitem(family.PRESETS, "test", WINDOWS)
    settings = {"model__num_layers": 2, "seq_len": 32}
    axes = dict(zip(("mesh__replica", "mesh__data", "mesh__context", "mesh__model"), sizes))
    found = runs.trained(8, **settings, **axes)
    np.testing.assert_allclose(found, runs.trained(zero__stage=0, **settings), rtol=SUM_ORDER)


@pytest.mark.parametrize("what", [PLAIN, pytest.param({**PLAIN, **PACKED}, marks=runs.LONG)])
def test_an_evaluation_is_that_of_one_device_and_a_prompt_is_read_whole(what):
    """In training order is by device; what reads whole rows, such as the sampler, has the model without its way."""
    losses = []
    for devices, axes in ((1, {}), (8, {"mesh__data": 1, "mesh__context": 8})):
        built = program.build(runs.config(**what, **axes), tokenizer_vocab=320, devices=jax.devices()[:devices])
        losses.append(float(built.forward.loss(state_lib.first(built).params, runs.drawn_batch(built, 0))))
        assert built.model.way is None
    np.testing.assert_allclose(losses[1], losses[0], rtol=SUM_ORDER)


@pytest.mark.parametrize("what", [{"precision": "bf16"}, pytest.param({**LORA, "zero__stage": 1}, marks=runs.LONG)])
def test_a_checkpoint_of_data_restores_over_context_and_back_bit_for_bit(what, tmp_path):
    meshes = [{"mesh__data": 8}, {"mesh__data": 2, "mesh__context": 2, "mesh__model": 2}, {"mesh__data": 8}]
    built = [program.build(runs.config(**what, zero__min_size=0, **mesh), tokenizer_vocab=320) for mesh in meshes]
    numbers = np.random.default_rng(0)

    def drawn(leaf):  # zeros of moments would prove little
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.device_put(numbers.normal(size=leaf.shape), leaf.sharding).astype(leaf.dtype) if is_float else leaf

    states = [jax.tree.map(drawn, state_lib.first(built[0]))]
    for number, (before, after) in enumerate(itertools.pairwise(built)):
        with checkpointer.Checkpointer(tmp_path / str(number)) as saver:
            saver.save(1, before.to_logical(states[-1]), {}, meta=resume.meta(before))
            saver.wait()
            states.append(resume.state(after, saver, 1, saver.meta(1)))
    logical = [one.to_logical(state) for one, state in zip(built, states)]  # frozen weights are in no checkpoint
    first, *others = (jax.tree.map(np.asarray, (state.params, state.opt_state)) for state in logical)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)
    stored = jax.tree.leaves((states[1].params, states[1].opt_state))
    used = {axis for leaf in stored for axis in specs.axes(leaf.sharding.spec)}
    assert used == {"data", "context", "model"}


def test_the_state_is_sharded_over_data_and_context_together():
    built = program.build(
        runs.config(mesh__data=2, mesh__context=2, mesh__model=2, zero__min_size=0), tokenizer_vocab=320
    )
    named = {frozenset(specs.axes(leaf.spec)) & {"data", "context"} for leaf in built.partition.leaves.values()}
    assert named == {frozenset(), frozenset({"data", "context"})}
    state, moments = (built.partition.leaves[f"{role}/layer_0/mlp/up/kernel"] for role in ("params", "opt_state/0/mu"))
    assert state.spec == moments.spec == P(("data", "context"), "model")


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"seq_len": 33},
            r"33 tokens of a row do not divide into 4 parts; set --config\.seq_len=36",
        ),
        (
            {"model__preset": "t5_test", "seq_len": 36},
            r"9 targets of a row do not divide into 4 parts; set --config\.seq_len=48",
        ),
    ],
)
def test_rows_that_do_not_divide_are_refused_with_a_length_that_does(settings, words):
    axes = {"mesh__data": 2, "mesh__context": 4}
    with pytest.raises(UserError, match=f"^config\\.mesh\\.context: {words}") as caught:
        program.build(runs.config(**axes, **settings), tokenizer_vocab=320)
    length = int(str(caught.value).rpartition("=")[2])
    assert program.build(runs.config(**axes, **{**settings, "seq_len": length}), tokenizer_vocab=320).way is not None


def drawn(shapes):
    """Returns weights so large that what a token remembers of others counts."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.1, leaf.shape), leaf.dtype), shapes)


RECURRENT = {  # preset -> its config, without experts, whose rows are sums in another order
    name: dataclasses.replace(found.presets[name], vocab_size=61, mixture=None)
    for name, found in (
        ("hybrid_test", family.FAMILY),
        ("nemotron_test", family.NEMOTRON),
        ("lfm2_test", family.FAMILY),
    )
}
RECURRENT["mamba2_test"] = dataclasses.replace(mamba2.PRESETS["mamba2_test"], vocab_size=61)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("ways", [2, pytest.param(4, marks=runs.LONG)])
def test_recurrent_layers_hand_on_what_a_text_leaves_behind(name, ways):
    """Texts begin amid parts and where these do, and rows are padded. Losses of tokens and gradients are those of rows on one device."""
    model = mamba2_model if name == "mamba2_test" else llama_model
    config, params = RECURRENT[name], drawn(family_lib.abstract_params(model.parts, RECURRENT[name]))
    sizes, length = [[9, 31, 24, 12], [38, 20, 10, 8]], 76
    segments = np.stack([np.repeat([1, 2, 3, 0], size) for size in sizes]).astype(np.int32)
    tokens = np.random.default_rng(1).integers(3, 61, (2, length + 1)).astype(np.int32)
    batch = {"tokens": tokens, "segments": np.pad(segments, ((0, 0), (0, 1)))}
    batch["labeled"] = (batch["segments"] > 0).astype(np.int32)
    way = context_attention.Way("gather", "contiguous", "", False)
    mesh = zerojax.make_mesh(context=ways, devices=jax.devices()[:ways])
    in_parts = jax.shard_map(
        functools.partial(model.loss, dataclasses.replace(config, way=way), by_token=True),
        mesh=mesh,
        in_specs=(P(), P(None, "context")),
        out_specs=P(None, "context"),
        check_vma=False,
    )
    whole = functools.partial(model.loss, config, by_token=True)

    def learned(losses, params, batch):
        found, pull = jax.vjp(lambda params: losses(params, batch), params)
        return found, pull(jnp.ones_like(found) / found.size)

    found = jax.jit(functools.partial(learned, in_parts))(params, parts.of_rows(batch, np.arange))
    wanted = jax.jit(functools.partial(learned, whole))(params, batch)
    for own, true in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(own, true, rtol=0, atol=SUM_ORDER * max(1e-3, np.abs(true).max()))


@runs.LONG
def test_on_h200s_recurrent_layers_send_states_and_no_tokens():
    axes = {"mesh__data": 4, "mesh__context": 2}
    built = program.build(
        runs.config(**HYBRID, **axes, precision="bf16", seq_len=512, reduce_dtype="fp32"),
        tokenizer_vocab=320,
        devices=compile_only.gpus(),
    )
    text = compile_only.compile_gpu(built.train_step.lower(built.partition.abstract_state, built.abstract_batch))
    found = collectives.collectives(flow.flow(syntax.parse(text)), built.partition.mesh)
    sent = {(one.kind, part.taken.dims) for one in found if one.axes == ("context",) for part in one.parts}
    of_attention = {dims for kind, dims in sent if kind == "all-to-all"}
    states, inputs = (2, 4, 16, 16), (2, 3, 128)  # [rows, heads, keys, values], and [rows, tokens, channels]
    assert of_attention and sent - {("all-to-all", dims) for dims in of_attention} == {
        ("collective-permute", states),
        ("collective-permute", inputs),
    }


@pytest.mark.long
@pytest.mark.parametrize("way", context_attention.WAYS)
@pytest.mark.parametrize("name", ["three axes, passes, tiles", "packed, passes", "adapters", "columns"])
def test_each_way_gives_the_losses_of_one_device(name, way, alone, monkeypatch):
    what, sizes, how = CASES[name]
    monkeypatch.setattr(context_attention, "choose", functools.partial(context_attention.choose, way=way))
    axes = dict(zip(("mesh__replica", "mesh__data", "mesh__context", "mesh__model"), sizes))
    found = runs.trained(math.prod(sizes), **what, **axes, **how | {"reduce_dtype": "fp32"})
    np.testing.assert_allclose(found, alone(tuple(what.items())), rtol=SUM_ORDER)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["dots", "attention"])
def test_in_a_step_on_h200s_each_hop_of_a_ring_has_work_beside_it_and_no_block_runs_twice(policy, monkeypatch):
    monkeypatch.setattr(context_attention, "choose", functools.partial(context_attention.choose, way="ring"))
    model = {"model__preset": "llama3_1b", "model__num_layers": 2, "model__vocab_size": 1024, "model__remat": policy}
    axes = {"mesh__data": 1, "mesh__context": 4, "mesh__model": 2}
    config = runs.config(**model, **axes, precision="bf16", seq_len=8192, global_batch_size=1)
    built = program.build(config, tokenizer_vocab=320, devices=compile_only.gpus())
    text = compile_only.compile_gpu(built.train_step.lower(built.partition.abstract_state, built.abstract_batch))
    assert text.count('custom_call_target="__cudnn$fmha') == 2 * 2 * 4  # layers, passes, blocks
    found = collectives.collectives(flow.flow(syntax.parse(text)), built.partition.mesh)
    hops = [one for one in found if one.kind == "collective-permute" and one.axes == ("context",)]
    assert len(hops) == 2 * (3 + 5)
    assert all(one.is_async and (one.overlaps.get("attention", 0) or one.overlaps.get("matmul", 0)) for one in hops)


@pytest.mark.long
@pytest.mark.parametrize("model", [1, 2])
def test_a_plan_for_h200s_gathers_weights_over_data_and_context_and_finds_nothing_wrong(model):
    """Compiled for absent GPUs: 1B with two layers. Attention alone sends activations over `context`, in 16 bits."""
    preset = {"model__preset": "llama3_1b", "model__num_layers": 2, "model__vocab_size": 1024, "model__remat": "dots"}
    axes = {"mesh__data": 8 // 2 // model, "mesh__context": 2, "mesh__model": model}
    config = runs.config(**preset, **axes, precision="bf16", seq_len=8192, global_batch_size=4)
    built = program.build(config, tokenizer_vocab=320, devices=compile_only.gpus())
    plan = plans.plan_program(built, "h200", compiler_options=compile_only.FAST)
    rows = [row for row in plan.ledger.rows if row.elements > 1000]
    state = {"weights forward", "weights backward", "gradients"}
    assert {row.axes for row in rows if row.role in state} - {("model",)} == {("data", "context")}  # sums of norms
    sent = [row for row in rows if row.axes == ("context",)]
    assert {(row.role, row.kind, row.dtype) for row in sent} == {("activations", "all-to-all", "bf16")}
    sizes = {"heads": 32 // model, "kv_heads": 8 // model, "head_dim": 64, "ways": 2, "length": 8192}
    sizes["batch"] = config.global_batch_size // axes["mesh__data"]
    cost = context_costs.cost("ulysses", "contiguous", is_causal=True, **sizes)
    again = 2 * sizes["batch"] * 8192 // 2 * sizes["heads"] * 64 // 2  # of 16 bits: the result, under remat="dots"
    assert sum(row.nbytes for row in sent) == 2 * (cost.forward + cost.backward + again)  # layers
    waits = (
        {"layers wait for activations over mesh.model"} if model > 1 else set()
    )  # which `model.ring` would send beside matmuls
    assert {finding.rule for finding in plan.findings} <= waits
    assert departures.departures(plan.ledger) == ()
