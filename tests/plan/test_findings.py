"""Most tests put one defect into a train step, compile it for GPUs, and check that the findings name it."""

import dataclasses
import functools
import math

import compile_only
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import runs
from compile_only import compile_plain, mesh, plain, plain_state, plain_step, read, rules, staged
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import tree
from zerojax.clock import kernels, rates, walk
from zerojax.hlo import buffers
from zerojax.plan import bound, findings, ledger, targets
from zerojax.zero.weights import gather

ALL_REDUCED = "gradients are all-reduced, but the plan shards them"
FLOAT32 = "weights are gathered in float32, but matmuls run in 16 bits"
RESHARDED = "activations are resharded"
KEPT = "gathered weights are kept for the backward pass"
ANOTHER_DIM = "weights or gradients change their sharded dim"
EVERY_PASS = "replicated gradients are all-reduced in each of 4 passes"
LARGER_SHARDS = "leaves of the state are replicated, or have larger shards than planned"
NOT_DONATED = "the state is not donated"
ON_DEVICE = "offloaded state stays on the device"
TILES = "an MLP makes arrays of all tokens"
COPIES = "copies to host memory outlast the forward pass"


@pytest.mark.parametrize(
    "stage", [*(pytest.param(stage, marks=runs.LONG) for stage in range(3)), 3]
)  # in one pass stage 1 compiles as stage 2 does
def test_this_projects_own_steps_have_no_findings(stage):
    found, partition = staged(stage)
    assert rules(found, partition.abstract_state) == []


def test_a_state_that_is_not_donated_is_found_and_findings_are_sorted_by_cost_and_have_a_remedy():
    state, found = plain(P("fsdp"), P("fsdp"), False)
    listed = findings.findings(found, planned=state)
    assert [f.rule for f in listed] == [KEPT, NOT_DONATED]
    assert listed[0].nbytes >= listed[1].nbytes
    assert all(f.where and f.amount and f.remedy for f in listed)
    shards = [leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state)]
    assert listed[1].nbytes == sum(shards)


def test_rules_that_the_cpu_backend_cannot_satisfy_do_not_apply_to_it():
    on = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    state = plain_state(on)
    batch = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=NamedSharding(on, P("fsdp")))
    text = jax.jit(plain_step, donate_argnums=0).lower(state, batch).compile().as_text()
    found = ledger.ledger(text, on, dict(tree.flatten(state.params)))
    assert any(row.kind == "all-reduce" and row.role == "gradients" for row in found.rows)
    assert any(row.dtype == "f32" and row.kind == "all-gather" for row in found.rows)
    assert any(row.is_kept for row in found.rows)
    assert rules(found, state, compute_dtype=jnp.bfloat16) == []


@runs.LONG
def test_a_plain_data_parallel_step_has_no_findings():
    state, found = plain(P(), P(), True)
    assert rules(found, state) == []


@functools.cache
def replicated():
    """Returns the state and the ledger of a plain step that replicates its weights by a constraint."""
    on = mesh()
    state = plain_state(on)

    def whole(params):
        return jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(on, P())), params)

    return state, read(compile_plain(functools.partial(plain_step, used=whole), state, on), state, on)


def test_a_constraint_that_replicates_weights_is_found_to_all_reduce_gradients_and_to_gather_float32():
    state, found = replicated()
    assert set(rules(found, state)) == {ALL_REDUCED, FLOAT32, KEPT}
    worst = next(f for f in findings.findings(found, planned=state) if f.rule == ALL_REDUCED)
    assert "block_" in worst.where and "zerojax.where_used" in worst.remedy
    assert worst.nbytes == 2 * 4 * 256 * 512 * 2 * 7 // 8


def test_the_compute_dtype_argument_overrides_the_programs_dtype():
    state, found = replicated()
    assert FLOAT32 in rules(found, state)
    assert FLOAT32 not in rules(found, state, compute_dtype=jnp.float32)


def test_weights_kept_for_the_backward_pass_are_found_and_weights_gathered_again_are_not():
    state, kept = plain(P("fsdp"), P("fsdp"), True)
    assert rules(kept, state) == [KEPT]
    assert "1.00 MiB" in findings.findings(kept, planned=state)[0].amount  # four kernels in bf16
    again, partition = staged(3)
    assert KEPT not in rules(again, partition.abstract_state)


def test_a_constraint_that_reshards_activations_is_found(monkeypatch):
    on = mesh()

    class Resharding(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(512, use_bias=False, dtype=jnp.bfloat16, name="wide")(x)
            x = jax.lax.with_sharding_constraint(x, NamedSharding(on, P(None, "fsdp")))
            return nn.Dense(256, use_bias=False, dtype=jnp.bfloat16, name="narrow")(jnp.tanh(x))

    monkeypatch.setattr("compile_only.Net", Resharding)
    state = plain_state(on, split=P())
    found = read(compile_plain(plain_step, state, on), state, on)
    assert RESHARDED in rules(found, state)


def test_tensor_parallelism_is_kept_and_where_it_is_undone_is_found(monkeypatch):
    """The defect: collectives over `data` without a nested shard_map over `model`, which XLA makes whole first."""
    on = zerojax.make_mesh(model=2, devices=compile_only.devices())
    overrides = [("wide/kernel", P(None, "model")), ("narrow/kernel", P("model"))]
    state = jax.eval_shape(functools.partial(compile_only.create, depth=1), jax.random.key(0))
    partition = zerojax.partition_state(state, mesh=on, stage=3, overrides=overrides)

    def loss_fn(params, batch, state):
        return jnp.mean((state.apply_fn({"params": params}, batch) - batch).astype(jnp.float32) ** 2)

    def found():
        step = zerojax.make_train_step(
            loss_fn, partition, compute_dtype=jnp.bfloat16, blocks=r"block_\d", reduce_dtype=jnp.float32
        )
        lowered = step.lower(partition.abstract_state, jax.ShapeDtypeStruct((64, compile_only.WIDTH), jnp.bfloat16))
        return ledger.ledger(compile_only.compile_gpu(lowered), on, partition.placements)

    kept = found()
    moved = [row for row in kept.rows if row.weights]
    assert moved and not [row for row in moved if "model" in row.axes]
    # Of each kernel's half that a device uses, it receives three of the four shards.
    half = compile_only.WIDTH * compile_only.HIDDEN // 2
    assert {row.elements for row in moved if row.kind == "all-gather"} == {half * 3 // 4}
    undone = "weights are gathered over model, over which they are used sharded"
    assert undone not in rules(kept, partition.abstract_state)

    monkeypatch.setattr(gather, "of_shards", lambda collective, placement: collective)
    assert undone in rules(found(), partition.abstract_state)


def test_weights_used_with_another_sharded_dim_than_stored_are_found():
    on = mesh()
    state = plain_state(on)

    def resharded(params):
        return jax.tree.map(
            lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(on, P(None, "fsdp"))) if w.ndim > 1 else w,
            params,
        )

    found = read(compile_plain(functools.partial(plain_step, used=resharded), state, on), state, on)
    listed = {f.rule: f for f in findings.findings(found, planned=state)}
    assert "kernel" in listed[ANOTHER_DIM].where and "zerojax.partition_state" in listed[ANOTHER_DIM].remedy


def test_replicated_gradients_that_are_summed_in_every_pass_are_found():
    found, partition = staged(1, grad_accum=4)
    assert EVERY_PASS in rules(found, partition.abstract_state, passes=4)


def test_a_leaf_that_the_step_takes_replicated_is_found():
    planned, found = plain(P(), P("fsdp"), True)
    assert LARGER_SHARDS in rules(found, planned)
    worst = next(f for f in findings.findings(found, planned=planned) if f.rule == LARGER_SHARDS)
    assert worst.nbytes == 4 * 256 * 512 * 4 * 7 // 8
    assert "opt_state" not in worst.where


HOST_PROGRAM = """
HloModule jit_step, is_scheduled=true, input_output_alias={{ {{0}}: (0, {{}}, may-alias) }}

ENTRY %main (p0: f32[64]) -> (f32[64]) {{
  %p0 = f32[64]{{0:{memory}}} parameter(0), metadata={{op_name="state.opt_state[0].mu['w']"}}
  ROOT %tuple = (f32[64]{{0:{memory}}}) tuple(%p0)
}}
"""


@pytest.mark.parametrize("memory, expected", [("T(8)", [ON_DEVICE]), ("T(8)S(5)", [])])
def test_state_planned_for_the_host_that_stays_on_the_device_is_found(memory, expected):
    on_cpu = zerojax.make_mesh(devices=jax.devices()[:1])  # a compile-only device forgets a sharding's memory kind
    host = NamedSharding(on_cpu, P(), memory_kind="pinned_host")
    planned = {"opt_state": [{"mu": {"w": jax.ShapeDtypeStruct((64,), "float32", sharding=host)}}]}
    found = ledger.ledger(HOST_PROGRAM.format(memory=memory), mesh(), {})
    assert rules(found, planned) == expected


def test_a_list_names_the_costliest_and_counts_the_rest():
    assert findings._listed({"a": 1, "b": 5, "c": 3}) == "b, c, a"
    assert findings._listed({"a": 1, "b": 5, "c": 3, "d": 2, "e": 0}) == "b, c, d and 2 more"


def test_copies_to_the_host_are_named_when_the_forward_pass_is_shorter():
    target = targets.get("h200")
    state, found = plain(P(), P(), True)
    step = bound.Bound({bound.COMPUTE: 0.9})  # 8B on eight devices; its forward pass takes some 0.43 s
    for devices, is_named in ((1, False), (4, False), (8, True)):
        copies = bound.copies(target.beside(devices), step, 28 * 470 * 10**6)
        listed = findings.findings(found, planned=state, copies=copies)
        assert [f.rule for f in listed] == [COPIES] * is_named
    assert "57%" in listed[0].remedy
    assert bound.copies(target, step, 0) is None
    assert bound.copies(target, None, 1) is None


@pytest.mark.parametrize(
    ("tokens", "width", "share", "expected"),
    [
        (65536, 512, 0.5, [TILES]),
        (65536, 512, 0.1, []),  # of the peak
        (65536, 256, 0.5, []),  # the residual stream
        (16384, 512, 0.5, []),  # tokens of an ordinary pass
    ],
)
def test_an_mlp_that_makes_arrays_of_very_many_tokens_is_named_with_what_tiles_would_save(
    tokens, width, share, expected
):
    found, _ = staged(3)
    nbytes = 2 * tokens * width
    value = buffers.Temporary(
        "dot.1", "activations", nbytes, f"bf16[{tokens},{width}]{{1,0}}", 0, 1, "a/block_0/wide/dot", ""
    )
    peak = round(2 * nbytes / share)
    listed = findings.findings(found, compute_dtype=jnp.bfloat16, at_peak=[value, value], peak=peak)
    assert [finding.rule for finding in listed] == expected
    if expected:
        assert listed[0].nbytes == 2 * nbytes * (tokens - 8192) // tokens
        assert "tile_tokens=8192 would save" in listed[0].remedy


def moved(sample, count, **changes):
    return tuple(dataclasses.replace(sample, weights=(), **changes) for _ in range(count))


def test_a_ring_whose_hops_have_nothing_beside_them_is_named():
    found, _ = staged(3)
    hop = {"kind": "collective-permute", "axes": ("context",), "role": "activations", "op_name": "attention/ppermute"}
    large = {"dims": (found.params,), "nbytes": 100}

    def listed(*exposed):
        hops = [
            moved(found.rows[0], 1, is_async=not bare, overlaps={} if bare else {"attention": 1}, **hop, **large)
            for bare in exposed
        ]
        with_hops = dataclasses.replace(found, rows=sum(hops, ()))
        return [finding.rule for finding in findings.findings(with_hops, compute_dtype=jnp.bfloat16)]

    assert listed(False, False, True) == []  # the last hop, with the gradients
    assert listed(True, False, True) == ["hops of a ring have nothing beside them"]


@pytest.mark.parametrize("model", [8, 16])
def test_an_axis_over_which_layers_wait_is_named_where_it_spans_hosts(model):
    found, _ = staged(3)
    sent = {"kind": "all-gather", "axes": ("model",), "role": "activations", "op_name": "tensor_parallel/all_gather"}
    on = zerojax.make_mesh(model=model, devices=compile_only.gpus(topology="2x8"))
    rows = moved(found.rows[0], 2, dtype="bf16", **sent)
    listed = findings.findings(dataclasses.replace(found, rows=rows, mesh=on), compute_dtype=jnp.bfloat16)
    rule = "layers wait for activations that travel between hosts, because model=16 spans hosts"
    assert [finding.rule for finding in listed] == [rule] * (model == 16)


def test_tokens_that_travel_to_their_experts_beside_no_matmul_are_named():
    found, _ = staged(3)
    sent = {"kind": "all-to-all", "axes": ("expert",), "role": "activations", "dims": (found.params,), "is_async": True}
    names = {"op_name": "layer_0/expert_parallel/all_to_all", "nbytes": 100}

    def listed(*beside, times=1):
        rows = [moved(found.rows[0], 1, overlaps=own, times=times, **sent, **names) for own in beside]
        with_rows = dataclasses.replace(found, rows=sum(rows, ()))
        return [finding.rule for finding in findings.findings(with_rows, compute_dtype=jnp.bfloat16)]

    assert listed({"matmul": 2}, {"attention": 1}, {"elementwise": 3}) == []
    assert listed({"matmul": 2}, {}, {"elementwise": 3}) == [
        "tokens travel to their experts with no matmul beside them"
    ]


@pytest.mark.parametrize(("shorter", "free"), [(0.02, 0.05), (0.02, 0.0), (0.001, 0.05)])
def test_experts_that_would_be_faster_gathered_are_named(monkeypatch, shorter, free):
    found, _ = staged(3)
    sent = {
        "kind": "all-to-all",
        "axes": ("expert",),
        "role": "activations",
        "is_async": True,
        "overlaps": {"matmul": 1},
    }
    rows = moved(found.rows[0], 1, op_name="layer_0/expert_parallel/all_to_all", nbytes=100, **sent)
    (path, weight), *_ = found.weights.items()
    apart = {path: dataclasses.replace(weight, apart=8, used=(2**20, 8))}
    without = walk.StepTime(0.1 - shorter, {kernels.MATMUL: free, walk.EXPOSED: 0.0}, {kernels.COLLECTIVE: 0.0})
    monkeypatch.setattr(walk, "walk", lambda *_, **__: without)
    gathered = rates.of("h200").seconds(
        kernels.KernelWork("collective", "all-gather", nbytes=8 * 7 * 2**23, group=(*range(8),))
    )
    assert 0.001 < gathered < 0.01
    known = {"foretold": walk.StepTime(0.1, dict.fromkeys(walk.PARTS, 0.0), {}, (None,)), "rates": rates.of("h200")}
    of = dataclasses.replace(found, rows=rows, weights=apart)

    def listed(**more):
        every = findings.findings(of, compute_dtype=jnp.bfloat16, **known, **more)
        return [f for f in every if "gathered experts" in f.rule]

    expected = shorter - max(0.0, gathered - free)
    is_faster = expected > findings.PAYS * 0.1
    assert [f.seconds for f in listed()] == [pytest.approx(expected)] * is_faster
    held = 7 * 2**23 * (2 + 4)  # one layer has experts: gathered in bf16, and gradients in float32
    assert len(listed(free=held)) == is_faster
    assert not listed(free=held - 1)


def test_a_ragged_product_that_xla_makes_dense_is_named():
    on = mesh()

    def step(state, batch):
        sizes = jnp.full(8, len(batch) // 64, jnp.int32)
        run = jax.shard_map(
            lambda rows, matrices: jax.lax.ragged_dot(rows, matrices, sizes),
            mesh=on,
            in_specs=(P("fsdp"), P()),
            out_specs=P("fsdp"),
        )
        matrices = jnp.broadcast_to(state.params["block_0"]["wide"]["kernel"], (8, 256, 512))
        return state, jnp.sum(run(batch, matrices.astype(jnp.bfloat16)))

    state = plain_state(on, split=P())
    found = findings.findings(read(compile_plain(step, state, on), state, on), compute_dtype=jnp.bfloat16)
    assert "experts multiply the rows of all others too" in [finding.rule for finding in found]
