"""Reads the collectives of packed wires, and what they refuse. This module tests zerojax.zero.wires.packed."""

import collections
import dataclasses
import functools
import types
import warnings

import compile_only
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import roles
from zerojax.clock import rates as rates_lib
from zerojax.clock import walk
from zerojax.plan import bound, departures, findings, ledger
from zerojax.zero import stages, state_bytes
from zerojax.zero.wires import experts, unsent
from zerojax.zero.wires import packed as packed_wires

WIDTH, HOSTS, PLACES = 256, 2, 8
MATRICES = 2 * WIDTH * WIDTH + 2 * 2 * 2 * WIDTH * WIDTH  # embed, head, and two matrices of two blocks
OF_BLOCKS = MATRICES - 2 * WIDTH * WIDTH


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(2 * WIDTH, use_bias=False, name="into", dtype=jnp.bfloat16)(x)
        return x + nn.Dense(WIDTH, use_bias=False, name="out", dtype=jnp.bfloat16)(nn.gelu(y))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, use_bias=False, name="embed", dtype=jnp.bfloat16)(x)
        for number in range(2):
            x = Block(name=f"block_{number}")(x)
        y = nn.Dense(WIDTH, use_bias=False, name="head", dtype=jnp.bfloat16)(x)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))


@functools.cache
def abstract():
    params = jax.eval_shape(lambda: Net().init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"])
    how = {"apply_fn": None, "tx": optax.adam(1e-3), "rng": jax.random.key_data(jax.random.key(0))}
    return jax.eval_shape(lambda params: zerojax.TrainState.create(params=params, **how), params)


def partition(mesh, stage=3, **how):
    return zerojax.partition_state(abstract(), mesh=mesh, stage=stage, **how)


@functools.cache
def compiled(**wires):
    """Returns the ledger of a step on two hosts of eight GPUs, and its text."""
    own = partition(zerojax.make_mesh(devices=compile_only.devices(HOSTS * PLACES)))
    chosen = zerojax.PackedWires(**wires)
    how = {"blocks": r"block_\d", "heads": "head", "reduce_dtype": jnp.float32, "compute_dtype": jnp.bfloat16}
    marked = packed_wires.marked(own, chosen, how["blocks"], jnp.float32)
    own = unsent.in_partition(own, marked)
    loss = lambda params, batch, state: Net().apply({"params": params}, batch)  # noqa: E731
    step = zerojax.make_train_step(loss, own, wires=chosen, **how)
    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32, sharding=own.batch_sharding)
    text = compile_only.compile_gpu(step.lower(own.abstract_state, batch))
    return ledger.ledger(text, own.mesh, marked.placements), text


def received(found):
    """Returns the bytes that a device receives of weights and gradients, by role, kind and dtype."""
    total = collections.Counter()
    for row in found.rows:
        if row.role in roles.SENT_OF_WEIGHTS:
            total[row.role, row.kind, row.dtype] += row.nbytes
    return total


def test_a_ledger_shows_the_bytes_of_blocks_exactly_and_theory_knows_them():
    found, _ = compiled(weights="int8", gradients="int4", second_copy=True)
    of_host, of_place = PLACES - 1, HOSTS - 1  # devices that send to each
    shard = MATRICES // (HOSTS * PLACES)
    kept = OF_BLOCKS // (HOSTS * PLACES)
    scales = 4 / packed_wires.packed.BLOCK
    near, far = of_host * HOSTS, of_place
    assert received(found) == {
        (roles.WEIGHTS_FORWARD, "all-gather", "s8"): (near + far) * shard,
        (roles.WEIGHTS_FORWARD, "all-gather", "f32"): (near + far) * shard * scales,
        (roles.WEIGHTS_BACKWARD, "all-gather", "s8"): near * kept,
        (roles.WEIGHTS_BACKWARD, "all-gather", "f32"): near * kept * scales,
        (roles.GRADIENTS, "all-to-all", "s8"): near * shard,
        (roles.GRADIENTS, "all-to-all", "u8"): far * shard // 2,
        (roles.GRADIENTS, "all-to-all", "f32"): (near + far) * shard * scales,
    }
    assert departures.departures(found, tolerance=1e-9) == ()
    assert findings.findings(found, planned=abstract(), compute_dtype=jnp.bfloat16) == ()


@pytest.mark.long
def test_no_weight_or_gradient_travels_in_16_or_32_bits():
    plain, _ = compiled(gradients="plain", weights="plain")
    assert {dtype for _, _, dtype in received(plain)} == {"bf16", "f32"}
    found, text = compiled(weights="int8", gradients="int8", host_devices=HOSTS * PLACES)
    assert {row.kind for row in found.rows if row.role == roles.GRADIENTS} == {"all-to-all"}
    assert {row.dtype for row in found.rows if row.role in roles.SENT_OF_WEIGHTS and row.elements > 512} == {"s8"}
    assert departures.departures(found, tolerance=1e-9) == ()
    assert text.count("__gpu$xla.gpu.triton") >= 6  # a kernel packs each weight, and each gradient


@pytest.mark.long
def test_error_feedback_sends_the_same_bytes_and_keeps_four_for_each_weight_over_the_devices_of_a_host():
    how = {"weights": "int8", "gradients": "int4", "second_copy": True}
    (plain, _), (kept, _) = (compiled(**how, error_feedback=on) for on in (False, True))
    assert received(kept) == received(plain) and departures.departures(kept, tolerance=1e-9) == ()
    own = partition(zerojax.make_mesh(devices=compile_only.devices(HOSTS * PLACES)))
    found = unsent.in_partition(
        own, packed_wires.marked(own, zerojax.PackedWires(**how, error_feedback=True), "b", "float32")
    )
    bytes_of = [state_bytes.bytes_per_device(one)[roles.OTHER] for one in (own, found)]
    assert bytes_of[1] - bytes_of[0] == 4 * MATRICES // PLACES


def test_a_state_without_the_field_of_its_wires_is_refused_and_so_is_a_field_without_wires():
    own = partition(zerojax.make_mesh(devices=jax.devices()[:8]))
    wires = zerojax.PackedWires(gradients="int4", host_devices=4, error_feedback=True)
    state, extended = zerojax.with_unsent(abstract(), own, wires)
    assert {path: row.sharding for path, row in state.unsent_grads.items()} == extended.shardings.unsent_grads
    how = {"blocks": r"block_\d", "reduce_dtype": jnp.float32}
    loss = lambda params, batch, state: Net().apply({"params": params}, batch)  # noqa: E731
    zerojax.make_train_step(loss, extended, wires=wires, **how)
    others = {"error_feedback": False}, {"host_devices": 2}
    wrong = [(own, wires), *((extended, dataclasses.replace(wires, **other)) for other in others)]
    for found, asked in wrong:
        with pytest.raises(zerojax.UserError, match=r"^wire.error_feedback: .*`unsent_grads`[^\n]*$"):
            zerojax.make_train_step(loss, found, wires=asked, **how)
    state, by_columns = zerojax.with_unsent(abstract(), own, wires, by_columns="head")
    assert set(state.unsent_grads) == {*extended.abstract_state.unsent_grads} - {"head/kernel"}
    zerojax.make_train_step(loss, by_columns, wires=wires, by_columns="head", **how)
    with pytest.raises(zerojax.UserError, match="with_unsent: the state needs a field"):
        zerojax.with_unsent({"params": abstract().params}, own, wires)


def found_with(network, **wires):
    """Returns the rules that find something in a step whose hosts are joined by links of so many bytes a second."""
    own, rates = compiled(**wires)[0], rates_lib.of("h200")
    rates = dataclasses.replace(rates, figures={**rates.figures, "network": network})
    foretold = walk.walk(own.flow, rates, HOSTS * PLACES, PLACES)
    found = findings.findings(own, compute_dtype=jnp.bfloat16, foretold=foretold, rates=rates)
    return {finding.rule: finding for finding in found}


def test_packed_wires_are_recommended_where_the_clock_says_that_they_pay(monkeypatch):
    slow, fast = (found_with(network, weights="plain", gradients="plain") for network in (1e8, 1e14))
    (rule,) = (rule for rule in slow if "between hosts" in rule)
    assert "wire.gradients=int4" in slow[rule].remedy and rule not in fast
    all_packed = {"weights": "int8", "gradients": "int4", "second_copy": True}
    assert rule not in found_with(1e8, **all_packed)
    monkeypatch.setattr(findings.bound_lib, "hosts", lambda mesh, over: {0: len(tuple(over))})
    assert any("all devices are on one host" in rule for rule in found_with(1e14, **all_packed))
    assert not any("packed" in rule for rule in found_with(1e14, weights="plain", gradients="plain"))


def test_bytes_between_hosts_count_at_their_links_rate():
    own, _ = compiled(weights="int8", gradients="int4", second_copy=True)
    by_hosts = collections.Counter()
    for row in own.rows:
        by_hosts[len(bound.hosts(own.mesh, row.over))] += row.nbytes * (row.role in roles.SENT_OF_WEIGHTS)
    shard = MATRICES // (HOSTS * PLACES)
    assert by_hosts[HOSTS] == shard * (
        1 + 1 / 2 + 2 * 4 / 256
    )  # once as int8 and once as int4, from the one other host


def marked(mesh_of=8, stage=3, blocks=r"block_\d", reduce_dtype=jnp.float32, min_size=1024, **wires):
    own = partition(zerojax.make_mesh(devices=jax.devices()[:mesh_of]), stage, min_size=min_size)
    return packed_wires.marked(own, zerojax.PackedWires(**wires), blocks, reduce_dtype)


REFUSED = {
    "wire.weights: must be one of plain, int8, and is 'int4'; did you mean 'int8'?": {"weights": "int4"},
    "wire.gradients: must be one of plain, int8, int4, and is 'fp8'": {"gradients": "fp8"},
    "wire.second_copy: must be True or False": {"second_copy": 1},
    "wire.error_feedback: must be True or False": {"gradients": "int8", "error_feedback": 1},
    "wire.error_feedback: gradients that are not packed lose nothing": {"weights": "int8", "error_feedback": True},
    "wire.error_feedback: is of what is sent between hosts, and all devices": {
        "gradients": "int8",
        "error_feedback": True,
    },
    "wire.host_devices: must be a number of devices": {"weights": "int8", "host_devices": -1},
    "wire: needs explicit collectives": {"weights": "int8", "reduce_dtype": None},
    "wire: every device holds all weights, they are sharded at stage 3 alone; set `stage=3`": {
        "weights": "int8",
        "stage": 2,
    },
    "wire: every device holds all weights, most because of this: fewer than 9999999 elements; lower `min_size`": {
        "weights": "int8",
        "min_size": 9999999,
    },
    "wire.second_copy: needs `blocks`": {"second_copy": True, "blocks": "", "host_devices": 4},
    "wire.gradients: 'int4' is for the links between hosts": {"gradients": "int4"},
    "wire.second_copy: is divided among the devices of one of several hosts, and all devices": {"second_copy": True},
    "wire.second_copy: is divided among the devices of one of several hosts, and each host": {
        "second_copy": True,
        "host_devices": 1,
    },
    "wire.host_devices: 3 do not divide": {"gradients": "int4", "host_devices": 3},
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_changes_nothing_or_cannot_be_is_refused_in_one_line(line):
    with pytest.raises(zerojax.UserError) as refused:
        marked(**REFUSED[line])
    assert line in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("sizes", "hosts"), [({"expert": 2}, (2, 4)), ({"context": 4, "expert": 8}, (2, 4))])
def test_experts_that_stay_on_their_devices_are_not_packed_and_other_matrices_are(sizes, hosts):
    mesh = zerojax.make_mesh(**sizes, devices=jax.devices()[:8])
    params = {
        "experts": jax.ShapeDtypeStruct((8, 64, 64), jnp.float32),
        "dense": jax.ShapeDtypeStruct((64, 64), jnp.float32),
    }
    own = stages.partition_state(
        {"params": params}, mesh=mesh, stage=3, min_size=0, overrides=[("experts", P("expert"))]
    )
    found = packed_wires.marked(own, zerojax.PackedWires(gradients="int4", host_devices=4), r"block_\d", jnp.float32)
    wires = {path: placed.wire for path, placed in found.placements.items()}
    assert wires["params/dense"].hosts == packed_wires.Hosts(*hosts) and isinstance(
        wires["params/experts"], experts.ToExperts
    )
    assert wires["params/experts"] == own.placements["params/experts"].wire


def test_one_device_sends_nothing_and_a_warning_says_so():
    with pytest.warns(UserWarning, match="wire: has no effect"):
        marked(1, weights="int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert marked(1).placements == partition(zerojax.make_mesh(devices=jax.devices()[:1])).placements


def test_matmuls_in_fp8_refuse_packed_wires():
    own = partition(zerojax.make_mesh(devices=jax.devices()[:8]))
    loss = lambda params, batch, state: Net().apply({"params": params}, batch)  # noqa: E731
    how = {"blocks": r"block_\d", "reduce_dtype": jnp.float32, "compute_dtype": jnp.bfloat16}
    with pytest.raises(zerojax.UserError, match="wire: matmuls in fp8 gather their weights in 8 bits already"):
        zerojax.make_train_step(loss, own, fp8=zerojax.Fp8(), wires=zerojax.PackedWires(weights="int8"), **how)


@pytest.mark.parametrize(
    ("shape", "host_devices", "hosts"),
    [
        ({}, 4, (2, 4)),
        ({"replica": 2, "data": 4}, 4, (1, 4)),
        ({"replica": 2, "data": 4}, 2, (2, 2)),
        ({"model": 2}, 4, (2, 2)),
    ],
)
def test_hosts_are_neighbours_of_the_mesh(shape, host_devices, hosts):
    found = packed_wires._hosts(zerojax.make_mesh(**shape, devices=jax.devices()[:8]), host_devices)
    assert (found.count, found.size) == hosts


def test_hosts_are_processes_unless_each_has_one_device():
    def hosts(processes):
        mesh = zerojax.make_mesh(devices=jax.devices()[: len(processes)])
        devices = np.array([types.SimpleNamespace(process_index=number) for number in processes])
        like = {"shape": mesh.shape, "size": mesh.size, "devices": devices.reshape(mesh.devices.shape)}
        return packed_wires._hosts(types.SimpleNamespace(**like), 0)

    assert hosts([0, 0, 1, 1]) == packed_wires.Hosts(2, 2) and hosts([0]) == packed_wires.Hosts(1, 1)
    with pytest.raises(zerojax.UserError, match=r"^wire.host_devices: is 0, and each process has one device"):
        hosts([0, 1, 2, 3])
    with pytest.raises(zerojax.UserError, match=r"^wire.host_devices: the devices of a process do not divide"):
        hosts([0, 1, 1, 1])


def test_matrices_of_a_whole_block_that_are_gathered_and_not_shared_with_the_compiler_are_taken():
    mesh = zerojax.make_mesh(data=4, model=2, devices=jax.devices()[:8])
    block = packed_wires.packed.BLOCK
    shapes = {"whole": (8, block // 2), "part": (4, block // 2), "shared": (16, block), "both": (16, block)}
    shapes |= {"vector": (8 * block,), "model": (16, block + 1)}
    specs = {"shared": P(("model", "data")), "both": P("data", "model"), "model": P("model"), "vector": P("data")}
    specs |= {"whole": P("data"), "part": P("data")}
    state = {"params": {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}}
    own = zerojax.partition_state(state, mesh=mesh, stage=3, min_size=0, overrides=list(specs.items()))
    assert {path for path, weight in own.placements.items() if packed_wires._takes(weight)} == {
        f"params/{name}" for name in ("whole", "both")
    }


def test_weights_that_are_not_packed_travel_in_the_dtype_of_the_forward_pass():
    own = partition(zerojax.make_mesh(devices=jax.devices()[:8]))
    weight = packed_wires.marked(
        own, zerojax.PackedWires(gradients="int8", host_devices=4), r"block_\d", jnp.float32
    ).placements["params/head/kernel"]
    sent, scales = weight.wire._form(jnp.ones((4, 4)), weight, jnp.bfloat16)
    assert sent.dtype == jnp.bfloat16 and scales is None


def test_small_weights_vectors_and_codes_travel_as_they_are():
    params = {
        "matrix": jax.ShapeDtypeStruct((64, 64), jnp.float32),
        "narrow": jax.ShapeDtypeStruct((8, 64), jnp.float32),
        "vector": jax.ShapeDtypeStruct((8192,), jnp.float32),
        "frozen": {
            "nf4": jax.ShapeDtypeStruct((64, 512), jnp.uint8),
            "scales": jax.ShapeDtypeStruct((64, 512), jnp.bfloat16),
        },
    }
    state = {"params": params}
    mesh = zerojax.make_mesh(devices=jax.devices()[:8])
    own = zerojax.partition_state(state, mesh=mesh, stage=3, min_size=0, trainable="matrix|narrow|vector")
    found = packed_wires.marked(own, zerojax.PackedWires(weights="int8"), "", jnp.float32)
    sent = {path for path, weight in found.placements.items() if isinstance(weight.wire, packed_wires.InBlocks)}
    assert sent == {"params/matrix"}
    assert np.all([weight.stored.spec == P("data") for weight in own.placements.values()])
