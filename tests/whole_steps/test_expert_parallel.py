"""Trains experts that live on different devices (`make_mesh(expert=...)`), in a Flax model of one's own, against a device that has all."""

import dataclasses
import functools
import re

import compile_only
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.errors import UserError
from zerojax.models import experts
from zerojax.models.llama import family
from zerojax.models.llama.config import MixtureForm
from zerojax.ops import expert_parallel
from zerojax.traces import equations
from zerojax.trainer import plans, program
from zerojax.zero import state_bytes
from zerojax.zero.gradients import forward_only
from zerojax.zero.host import selection
from zerojax.zero.offload import fetched_params

F32 = 1e-5  # float32 sums over devices, in another order
EXPERTS, TOP, DIM, TOKENS, EXAMPLES = 8, 2, 16, 8, 16
TABLE = (("experts/(gate|up)$", P("expert", None, "model")), ("experts/down$", P("expert", "model")))
FUSED = (  # gate and up are one array, with biases
    ("experts/gate_up$", P("expert", None, "model")),
    ("experts/gate_up_bias", P("expert", "model")),
    ("experts/down$", P("expert", "model")),
    ("experts/down_bias", P("expert")),
)
CLAMP = (7.0, 1.702)
BATCH_SPECS = [("", P(("replica", "data"), "context"))]


class Block(nn.Module):
    """A residual mixture."""

    capacity: float = 0.0
    clamp: tuple | None = None

    @nn.compact
    def __call__(self, x):
        how = {"capacity_factor": self.capacity, "clamp": self.clamp, "stddevs": (1.0, 0.2, 0.2)}
        return x + experts.Experts(EXPERTS, TOP, 24, **how, name="experts")(x)


class Net(nn.Module):
    """Blocks between two sums."""

    capacity: float = 0.0
    clamp: tuple | None = None
    layers: int = 1

    @nn.compact
    def __call__(self, x):
        x = x / 2
        for number in range(self.layers):
            x = Block(self.capacity, self.clamp, name=f"block_{number}")(x)
        return 2 * x


def batch_of(passes=1):
    random = np.random.default_rng(0)
    batch = {name: random.normal(size=(EXAMPLES, TOKENS, DIM)).astype(np.float32) for name in ("x", "y")}
    batch["x"][..., 0] = 1  # by which a router's bias is possible
    return {name: value.reshape(passes, -1, *value.shape[1:]) if passes > 1 else value for name, value in batch.items()}


def made(mesh, stage=3, bias=0.0, capacity=0.0, table=TABLE, trainable="", clamp=None, layers=1, **how):
    """Returns a state and its partition; of a bias all tokens go to experts 3 and 2."""
    net = Net(capacity, clamp, layers)

    def init(key):
        params = net.init(key, batch_of()["x"])["params"]
        for block in params.values():
            router = block["experts"]["router"]
            block["experts"]["router"] = router.at[0, 3].add(bias).at[0, 2].add(bias / 2)
        return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.5, momentum=0.9))

    how |= {"stage": stage, "min_size": 0, "overrides": table, "trainable": trainable}
    return zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, **how)


def loss_of(capacity, params, batch, *_, clamp=None, layers=1):
    return jnp.mean((Net(capacity, clamp, layers).apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def trained(
    mesh,
    stage=3,
    *,
    bias=0.0,
    capacity=0.0,
    passes=1,
    blocks=r"block_\d",
    table=TABLE,
    trainable="",
    clamp=None,
    offload=None,
    layers=1,
    schedule="",
    **how,
):
    """Returns losses and norms of two steps, the params, and a held-out loss."""
    loss_fn = functools.partial(loss_of, capacity, clamp=clamp, layers=layers)
    specs = BATCH_SPECS if mesh.shape["context"] * mesh.shape["expert_context"] > 1 else ()
    own = {"offload": offload}
    if schedule:
        micro = {name: leaf[0] for name, leaf in batch_of(passes).items()}
        own["pipeline"] = zerojax.Pipeline(loss_fn, micro, blocks, schedule=schedule, batch_specs=specs)
    state, partition = made(mesh, stage, bias, capacity, table, trainable, clamp, layers, **own)
    how = {"reduce_dtype": jnp.float32, "batch_specs": specs, "blocks": blocks} | how
    step = zerojax.make_train_step(loss_fn, partition, grad_accum=passes, donate=bool(offload), **how)
    found = []
    for _ in range(2):
        state, metrics = step(state, batch_of(passes))
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    if schedule:
        state = jax.device_get(state)
    if mesh.size > 1 and not schedule:
        own = {"batch_specs": specs, "compute_dtype": None, "blocks": blocks, "heads": ""}
        fetches = selection.are_params_on_host(partition)
        mean = fetched_params.mean_of if fetches else forward_only.mean
        held_out = mean(loss_fn, partition, **own)
        found.append(float((held_out if fetches else jax.jit(held_out))(state.params, batch_of())))
    else:
        found.append(float(loss_fn(state.params, batch_of())))
    return found, jax.tree.map(np.asarray, state.params)


@functools.cache
def of_one_device(bias, trainable="", clamp=None, layers=1):
    how = {"bias": bias, "trainable": trainable, "clamp": clamp, "layers": layers}
    return trained(zerojax.make_mesh(devices=jax.devices()[:1]), 0, table=(), reduce_dtype=None, **how)


def check(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=F32)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=F32), found[1], expected[1])


ONE_EXPERT = 100.0  # the bias by which all tokens go to two experts of one device
MESHES = {
    "all": {"expert": 8},
    "some": {"replica": 2, "expert": 2},
    "with all axes": {"context": 2, "model": 2, "expert": 4},
    "of context": {"replica": 2, "context": 2, "expert": 2},
    "of both": {"context": 4, "expert": 8},
    "model": {"model": 2, "expert": 2},
}


# All products of axes on eight devices that hold different experts.
PRODUCTS = [
    {"context": context, "model": model, "expert": expert}
    for context in (1, 2, 4, 8)
    for model in (1, 2, 4)
    for expert in (2, 4, 8)
    if 8 % (context * model) == 0 and 8 // model % expert == 0
]


@pytest.mark.long
@pytest.mark.parametrize("clamp", [None, CLAMP])
@pytest.mark.parametrize("bias", [0.0, ONE_EXPERT])
@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_every_product_of_axes_trains_as_one_device(sizes, bias, clamp):
    how = {"bias": bias, "clamp": clamp, "table": FUSED if clamp else TABLE, "expert_parts": 1 + sizes["context"] % 2}
    check(trained(zerojax.make_mesh(**sizes), **how), of_one_device(bias, clamp=clamp))


@runs.LONG
@pytest.mark.parametrize(
    "sizes", runs.cases([{"expert": 4}, {"model": 2, "expert": 2}], long=[{"model": 2, "expert": 2}])
)
def test_experts_of_one_matrix_with_biases_train_as_on_one_device(sizes):
    found = trained(zerojax.make_mesh(**sizes), clamp=CLAMP, table=FUSED, expert_parts=2)
    check(found, of_one_device(0.0, clamp=CLAMP))


GRID = [
    (name, stage, passes, bias)
    for name in MESHES
    for stage in range(4)
    for passes in (1, 2)
    for bias in (0.0, ONE_EXPERT)
]


@runs.LONG  # by default those with biases, and those in host memory, do
@pytest.mark.parametrize("case", GRID)
def test_experts_on_devices_train_as_on_one_that_has_all(case):
    name, stage, passes, bias = case
    mesh = zerojax.make_mesh(**MESHES[name])
    check(trained(mesh, stage, passes=passes, bias=bias, expert_parts=passes), of_one_device(bias))


@pytest.mark.parametrize("remat", runs.cases(["none", "full"], long=["none", "full"]))
def test_frozen_experts_pass_gradients_on_and_stay_as_they_are(remat):
    expected = of_one_device(0.0, "router")
    found = trained(zerojax.make_mesh(expert=4), trainable="router", blocks="", remat=remat)
    check(found, expected)
    for name in ("gate", "up", "down"):
        np.testing.assert_array_equal(*(one[1]["block_0"]["experts"][name] for one in (found, expected)))


@pytest.mark.parametrize("bias", runs.cases([0.0, ONE_EXPERT], long=[0.0, ONE_EXPERT]))
def test_a_capacity_drops_what_it_drops_where_devices_have_all_experts(bias):
    how = {"bias": bias, "capacity": 1.0, "stage": 2}
    check(trained(zerojax.make_mesh(expert=4), **how), trained(zerojax.make_mesh(), table=(), **how))


BOTH = {"optimizer": "host", "params": "host", "chunk_bytes": 2048, "in_flight": 2}
FETCHED = {
    "params": ({"expert": 4}, BOTH, {"expert_parts": 2, "passes": 2, "bias": ONE_EXPERT}),
    "a disk": ({"expert": 4}, BOTH | {"optimizer": "nvme", "params": "nvme"}, {"remat": "full"}),
    "of context": ({"context": 4, "expert": 8}, BOTH, {"remat": "full", "bias": ONE_EXPERT}),
    "model": ({"model": 2, "expert": 2}, BOTH, {"passes": 2}),
    "frozen": ({"expert": 4}, BOTH, {"trainable": "router", "remat": "full"}),
    "biases": ({"expert": 2}, BOTH, {"clamp": CLAMP, "table": FUSED}),
    "by_block": ({"replica": 2, "expert": 2}, {"optimizer": "host", "by_block": "on"}, {"remat": "full", "stage": 1}),
}


@pytest.mark.parametrize("case", runs.cases(FETCHED, long=[case for case in FETCHED if case != "of context"]))
def test_offloaded_experts_whose_blocks_are_programs_train_as_on_one_device(case, tmp_path, monkeypatch):
    loads, room = set(), expert_parallel.room
    monkeypatch.setattr(expert_parallel, "room", lambda *args: loads.add(args[2]) or room(*args))
    sizes, offload, how = FETCHED[case]
    offload = offload | ({"nvme_path": str(tmp_path)} if case == "a disk" else {})
    own = {name: value for name, value in how.items() if name in ("bias", "trainable", "clamp")}
    found = trained(zerojax.make_mesh(**sizes), offload=offload, expert_load=1.25, **how)
    check(found, of_one_device(**{"bias": 0.0} | own))
    assert 1.25 in loads


PIPES = [
    ({"pipe": 2, "expert": 4}, 3, "1f1b", 0.0),
    ({"pipe": 2, "expert": 2}, 1, "zero_bubble", ONE_EXPERT),
    ({"pipe": 2, "context": 2, "expert": 4}, 2, "1f1b", ONE_EXPERT),
    ({"pipe": 2, "model": 2, "expert": 2}, 3, "zero_bubble", 0.0),
    ({"pipe": 4, "expert": 2}, 0, "gpipe", 0.0),
]


@pytest.mark.long
@pytest.mark.parametrize("case", PIPES, ids=str)
def test_tokens_travel_among_the_devices_of_a_stage(case):
    sizes, stage, schedule, bias = case
    how = {"bias": bias, "layers": max(2, sizes["pipe"])}
    found = trained(
        zerojax.make_mesh(**sizes), stage, schedule=schedule, passes=4, expert_load=1.25, expert_parts=2, **how
    )
    check(found, of_one_device(**how))


def traced(mesh, **how):
    state, partition = made(mesh)
    step = zerojax.make_train_step(
        functools.partial(loss_of, 0.0), partition, reduce_dtype=jnp.float32, blocks=r"block_\d", **how
    )
    return list(equations(step.trace(state, batch_of()).jaxpr.jaxpr)), partition


def test_no_device_gathers_other_experts_and_tokens_travel_there_and_back_in_both_passes():
    rows, travels = EXAMPLES * TOKENS * TOP // 8, {}
    for load in (1.0, 2.0):
        sent, partition = traced(zerojax.make_mesh(expert=2), expert_load=load)
        gathered = [eqn.outvars[0].aval.shape for eqn in sent if eqn.primitive.name == "all_gather"]
        stacks = {shape for shape in gathered if len(shape) == 3}
        assert stacks == {(EXPERTS // 2, DIM, 24), (EXPERTS // 2, 24, DIM)}
        room = expert_parallel.room(rows, 2, load)
        shapes = [eqn.outvars[0].aval.shape for eqn in sent if eqn.primitive.name == "all_to_all"]
        travels[load] = shapes.count((2, room, DIM))
    # There, back, there again, and the two of gradients: results are not sent again. Further rounds have as many, in two loops.
    assert travels == {1.0: 2 * 5 + 1, 2.0: 5}
    weight = partition.placements["params/block_0/experts/gate"]
    assert weight.stored.shard_shape(weight.shape) == (EXPERTS // 2, DIM // 4, 24)
    assert weight.used.shard_shape(weight.shape) == (EXPERTS // 2, DIM, 24)


@pytest.mark.parametrize(
    "sizes, told",
    [
        ({"expert": 2}, "stage 3, data=8, experts expert=2 x data=4"),
        ({"context": 2, "expert": 8}, "stage 3, data=4 x context=2, experts expert=8"),
        ({}, "stage 3, data=8"),
    ],
)
def test_the_table_of_bytes_names_the_axes_of_experts(sizes, told):
    _, partition = made(zerojax.make_mesh(**sizes), table=TABLE if sizes else ())
    assert state_bytes.memory_table(partition, partition).title == f"Bytes on each device: {told}"


REFUSED = {
    "expert: is sharded by the spec of .*experts/.*pass reduce_dtype=jnp.float32": {"reduce_dtype": None},
    "expert_load: must be at least 1.*is 0.5": {"expert_load": 0.5},
    "expert_parts: must be at least 1.*is 0": {"expert_parts": 0},
    "overrides: gate, up and down of experts are all to be sharded": {"table": TABLE[:1]},
    "overrides: .* which does not divide 8; name another dim": {"mesh": {"expert": 3, "devices": 3}},
    "overrides: experts are sharded as .*shard the width of all three": {
        "table": [(r"experts/(gate|up|down)$", P("expert", "model"))],
        "mesh": {"model": 2, "expert": 2},
    },
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_experts_on_devices_cannot_is_refused_in_one_line(line):
    how = dict(REFUSED[line])
    sizes = dict(how.pop("mesh", {"expert": 2}))
    devices = jax.devices()[: sizes.pop("devices", 8)]
    with pytest.raises(UserError, match=line):
        trained(zerojax.make_mesh(**sizes, devices=devices), **how)


def test_what_else_reads_an_expert_is_refused_and_an_axis_without_experts_is_told():
    state, partition = made(zerojax.make_mesh(expert=2))

    def penalised(params, batch, state):
        return loss_of(0.0, params, batch) + 1e-3 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    with pytest.raises(UserError, match=r"expert: block_0/experts/.* is also computed with"):
        zerojax.make_train_step(penalised, partition, reduce_dtype=jnp.float32).trace(state, batch_of())
    state, partition = made(zerojax.make_mesh(expert=2), table=())
    with pytest.warns(UserWarning, match="expert: has no effect, because no override names it"):
        zerojax.make_train_step(functools.partial(loss_of, 0.0), partition, reduce_dtype=jnp.float32)


@pytest.mark.long
def test_a_plan_for_h200s_sends_what_theory_says_gathers_no_other_experts_and_finds_nothing_wrong(monkeypatch):
    """Compiled for absent GPUs: Qwen3-30B-A3B's layer with smaller sizes."""
    small = {"embed_dim": 512, "num_heads": 4, "num_kv_heads": 2, "mixture": MixtureForm(16, 4, 256)}
    preset = dataclasses.replace(family.PRESETS["qwen3_30b_a3b"], **small)
    monkeypatch.setitem(family.PRESETS, "qwen3_30b_a3b", preset)
    model = {
        "model__preset": "qwen3_30b_a3b",
        "model__num_layers": 1,
        "model__vocab_size": 1024,
        "model__remat": "dots",
    }
    mesh = {"mesh__data": 8, "mesh__expert": 4, "experts__parts": 2}
    config = runs.config(**model, **mesh, precision="bf16", seq_len=1024, global_batch_size=8)
    built = program.build(config, tokenizer_vocab=320, devices=compile_only.devices())
    with compile_only.optimized():
        plan = plans.plan_program(built, "h200", compiler_options=compile_only.FAST)
    rows = [row for row in plan.ledger.rows if any("experts/" in path and "router" not in path for path in row.weights)]
    assert {row.role: row.axes for row in rows} == dict.fromkeys(
        ("weights forward", "weights backward", "gradients"), ("data",)
    )
    assert plan.exchange.received == plan.exchange.theory > 0
    # Of ten transfers, six have matmuls beside them. What begins a pass, and what is brought again first, have none.
    sent = [row for row in plan.ledger.exchanged if len(row.dims) == 3 and row.times]
    assert len(sent) == 10 and sum("matmul" in row.overlaps for row in sent) == 6
    assert sum(row.is_async for row in sent) >= 9
    assert not plan.findings and plan.departures == ()


IN_FP8 = zerojax.Fp8(experts=True)
NEAR = 0.01  # e4m3 rounds by 1/16 at most, and a loss adds up many values


@functools.cache
def in_fp8():
    return trained(zerojax.make_mesh(), table=(), fp8=IN_FP8)


def test_experts_in_fp8_train_nearly_as_in_float32():
    found, exact = in_fp8()[0], of_one_device(0.0)[0]
    np.testing.assert_allclose(found, exact, rtol=NEAR)
    assert np.all(np.abs(np.subtract(found, exact)[:4]) > 10 * F32 * np.asarray(exact)[:4])  # it is another arithmetic


def lowered_in_fp8(mesh, table):
    state, partition = made(mesh, table=table)
    loss_fn = functools.partial(loss_of, 0.0)
    how = {"blocks": r"block_\d", "fp8": IN_FP8, "reduce_dtype": jnp.float32}
    return zerojax.make_train_step(loss_fn, partition, **how).lower(state, batch_of())


def test_experts_in_fp8_are_gathered_so_in_the_layout_that_a_pass_reads():
    """XLA drops the other. A matrix is a row where its dims are swapped, as forward. No gradient of the first block's input is needed, so
    its backward pass reads `down` alone."""
    lowered = lowered_in_fp8(zerojax.make_mesh(), ())
    assert re.findall("all_gather.*xf8E4M3FN>", lowered.as_text())
    found = re.findall(r"\[(8,[\d,]+)\]\S* all-gather\(", lowered.compile().as_text())
    assert sorted(found) == [f"8,24,{DIM}", *[f"8,{24 * DIM}"] * 3]


@pytest.mark.long
def test_experts_on_devices_of_their_own_are_not_gathered_in_fp8():
    assert not re.findall("all_gather.*xf8E4M3FN>", lowered_in_fp8(zerojax.make_mesh(expert=4), TABLE).as_text())


FORMS = {
    "stage 0": ({}, {"stage": 0, "table": ()}),
    "all kept": ({}, {"table": (), "remat": "none"}),
    "nothing kept": ({}, {"table": (), "remat": "full"}),
    "two passes": ({}, {"stage": 2, "table": (), "passes": 2}),
    "by the compiler": ({}, {"table": (), "reduce_dtype": None}),
    "experts on devices": ({"expert": 8}, {}),
    "in parts": ({"expert": 4}, {"passes": 2, "expert_parts": 2}),
    "width sharded": ({"model": 2, "expert": 2}, {}),
}


@pytest.mark.parametrize("form", runs.cases(FORMS, long=FORMS))
def test_experts_in_fp8_train_alike_in_any_form(form):
    """Scales are powers of two, so which rows share one rounds nothing, but for values far below the largest."""
    sizes, how = FORMS[form]
    check(trained(zerojax.make_mesh(**sizes), fp8=IN_FP8, **how), in_fp8())


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        {"offload": zerojax.Offload(optimizer="host")},
        {"offload": zerojax.Offload(params="host", optimizer="host")},
        {"schedule": "1f1b", "passes": 2},
    ],
)
def test_experts_in_fp8_train_alike_cut_into_programs(how):
    mesh = zerojax.make_mesh(pipe=2) if "schedule" in how else zerojax.make_mesh()
    of_two = functools.partial(trained, fp8=IN_FP8, table=(), layers=2)
    check(of_two(mesh, **how), of_two(zerojax.make_mesh()))
