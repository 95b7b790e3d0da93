"""Checks the reported memory of a step. This module tests zerojax.hlo.buffers."""

import dataclasses
import shutil
import tempfile

import compile_only
import jax
import jax.numpy as jnp
import optax
import pytest
import runs
from flax.training import train_state
from jax.ad_checkpoint import checkpoint_name

from zerojax import mesh
from zerojax.errors import UserError
from zerojax.hlo import buffer_dump, buffers
from zerojax.roles import ACTIVATIONS, GATHERED, GRADIENTS, LOSS, MOMENTS, OTHER, PARAMS, REST
from zerojax.zero import stages, step

WIDTH, HIDDEN, EXAMPLES = 256, 1024, 128
WEIGHTS = 4 * 2 * WIDTH * HIDDEN  # bytes, unsharded


def model(params, x):
    for name in ("first", "second"):
        x = x + jnp.tanh(x @ params[name]["up"]) @ params[name]["down"]
    return x


def loss_fn(params, batch, _):
    y = model(params, batch["x"])
    with jax.named_scope("loss"):
        return jnp.mean((y - batch["x"]) ** 2)


def sharded(stage, devices=None):
    """Returns the partition of a state of two blocks, and an abstract batch."""
    block = {"up": jnp.zeros((WIDTH, HIDDEN)), "down": jnp.zeros((HIDDEN, WIDTH))}
    create = lambda: train_state.TrainState.create(  # noqa: E731
        apply_fn=None, params={"first": block, "second": block}, tx=optax.adam(1e-3)
    )
    found = stages.partition_state(jax.eval_shape(create), mesh=mesh.make_mesh(devices=devices), stage=stage)
    batch = {"x": jax.ShapeDtypeStruct((EXAMPLES * 8, WIDTH), jnp.float32, sharding=found.batch_sharding)}
    return found, batch


def compiled(stage, devices=None, **options):
    found, batch = sharded(stage, devices)
    train_step = step.make_train_step(loss_fn, found, **options)
    return buffers.compile_with_buffers(train_step.lower(found.abstract_state, batch))


@pytest.fixture(scope="module")
def stage3():
    return compiled(3)


def analysed(stats):
    return (
        stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    )


SMALL = 64  # bytes; constants are in only one of the sums
POINTERS = 1024  # bytes; if all outputs reuse donated memory, only a table of pointers remains


@pytest.mark.parametrize(
    "stage, options", [(0, {}), (3, {"donate": False}), (2, {"remat": "full"}), (3, {"clip_norm": 1.0})]
)
def test_the_parts_add_up_to_what_xla_allocates(stage, options):
    program, found = compiled(stage, **options)
    assert found.source == buffers.ASSIGNMENT
    assert abs(found.peak - analysed(program.memory_analysis())) <= SMALL
    assert sum(found.temporaries_by_role.values()) == found.temporaries
    assert found.temporaries_by_role["packing"] >= 0
    state = sum(a.nbytes for a in found.arguments if a.role in (PARAMS, MOMENTS))
    assert found.outputs < POINTERS if options.get("donate", True) else found.outputs >= state


@pytest.mark.parametrize("stage, params, moments", [(0, 1, 1), (2, 1, 8), (3, 8, 8)])
def test_arguments_carry_their_paths_roles_and_a_devices_share(stage, params, moments):
    _, found = compiled(stage)
    held = found.arguments_by_role
    assert held[PARAMS] == 2 * WEIGHTS // params
    assert held[MOMENTS] == 2 * 2 * WEIGHTS // moments + 4  # and the count
    paths = {a.path: a for a in found.arguments}
    up = paths["state/opt_state/0/mu/first/up"]
    assert (up.role, up.nbytes, up.space, up.is_donated) == (MOMENTS, 4 * WIDTH * HIDDEN // moments, "device", True)
    assert paths["batch/x"].role == REST and not paths["batch/x"].is_donated


def test_the_curve_peaks_where_the_temporaries_are_listed(stage3):
    _, found = stage3
    totals = [sum(column) for column in zip(*found.curve.by_role.values())]
    assert max(totals) == sum(t.nbytes for t in found.at_peak) <= found.temporaries
    assert found.curve.positions[totals.index(max(totals))] == found.peak_position
    assert all(t.start <= found.peak_position <= t.end < found.length + 1 for t in found.at_peak)
    assert [t.nbytes for t in found.at_peak] == sorted((t.nbytes for t in found.at_peak), reverse=True)
    assert list(found.curve.positions) == sorted(set(found.curve.positions))


def test_temporaries_have_their_role_and_source_line(stage3):
    program, found = stage3
    largest = {role: max(column) for role, column in found.curve.by_role.items()}
    weight = 4 * WIDTH * HIDDEN
    assert largest[GATHERED] >= weight and largest[GRADIENTS] >= weight
    made_here = [t for t in found.at_peak if "test_buffers.py:" in t.source]
    assert made_here and all(t.op_name for t in made_here)
    assert found.hlo_text == program.as_text()


def test_at_stage_0_no_weight_is_a_temporary_of_its_own():
    _, found = compiled(0, remat="none")
    assert max(found.curve.by_role[GATHERED]) < 4 * WIDTH * HIDDEN
    # Both gradients of both blocks are alive until the last is computed.
    assert max(found.curve.by_role[GRADIENTS]) >= WEIGHTS


def test_recomputing_all_keeps_fewer_activations_than_keeping_all():
    def most(found):
        columns = zip(*(found.curve.by_role[role] for role in (ACTIVATIONS, LOSS)))
        return max(sum(column) for column in columns)

    assert most(compiled(3, remat="full")[1]) < most(compiled(3, remat="none")[1])


def test_without_an_assignment_there_are_totals(monkeypatch, stage3):
    monkeypatch.setattr(buffer_dump, "read", lambda folder: None)
    program, found = compiled(3)
    full_program, full = stage3
    assert found.source == buffers.ANALYSIS and found.curve is None and not found.at_peak
    assert found.peak == analysed(program.memory_analysis()) == analysed(full_program.memory_analysis())
    assert found.temporaries == full.temporaries
    assert found.arguments_by_role == full.arguments_by_role
    assert {a.path: a.is_donated for a in found.arguments} == {a.path: a.is_donated for a in full.arguments}


def test_a_program_in_the_compilation_cache_is_compiled_again(cache_dir, stage3):
    def double(x):
        return x * 2 + jnp.float32(1.25)

    for _ in range(2):
        lowered = jax.jit(double).lower(jax.ShapeDtypeStruct((64,), jnp.float32))
        lowered.compile()
        assert buffers.compile_with_buffers(lowered)[1].source == buffers.ASSIGNMENT
    assert jax.config.jax_enable_compilation_cache


@pytest.mark.parametrize("free", [[0], [1 << 30, 1 << 20]])
def test_a_full_disk_of_temporary_files_is_refused_before_and_after_xla_writes_there(free, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free.pop(0)))
    lowered = jax.jit(jnp.cos).lower(jax.ShapeDtypeStruct((64,), jnp.float32))
    with pytest.raises(
        UserError, match=rf"^{tmp_path}: has \d+ bytes free, and XLA .* or name another folder by TMPDIR$"
    ):
        buffers.compile_with_buffers(lowered)
    assert free == [] and not list(tmp_path.iterdir())
    free.append(0)
    monkeypatch.setattr(buffer_dump, "read", None)
    with runs.jax_settings(jax_compilation_cache_dir=None):
        assert buffers.compile_with_buffers(lowered, from_cache=True)[1].source == buffers.ANALYSIS


def test_host_memory_is_the_same_with_and_without_an_assignment(monkeypatch):
    keep = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(x):
        for _ in range(2):
            x = jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.cos(x), "kept")), policy=keep)(x)
        return jnp.sum(x)

    x = jax.ShapeDtypeStruct(
        (64, 256, 256), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(compile_only.gpus()[0])
    )
    lowered = jax.jit(jax.grad(loss)).lower(x)
    _, full = buffers.compile_with_buffers(lowered, compiler_options=compile_only.FAST)
    monkeypatch.setattr(buffer_dump, "read", lambda folder: None)
    _, found = buffers.compile_with_buffers(lowered, compiler_options=compile_only.FAST)
    assert (full.source, found.source) == (buffers.ASSIGNMENT, buffers.ANALYSIS)
    assert found.host == full.host == 2 * 4 * 64 * 256 * 256


def test_a_program_that_jax_cannot_read_is_refused_in_one_line():
    """As one of a TPU compiler that is newer than JAX."""

    class Unreadable:
        def as_text(self):
            raise jax.errors.JaxRuntimeError(
                "INTERNAL: RET_CHECK failure: async-update should have 1 operands\n\n*** Begin stack"
            )

    with pytest.raises(
        UserError, match=r"^the compiled program: jax .* cannot read .*async-update.* pip install [^\n]*$"
    ):
        buffers.text_of(Unreadable())


def test_values_at_the_same_offset_are_counted_once():
    names = [("start", 0, 4), ("carry", 2, 9), ("end", 9, 12), ("inside", 10, 11)]
    values = [buffer_dump.Value(name, "", 64, 0, "f32[16]", first, last) for name, first, last in names]
    disjoint = buffers._one_at_a_time([*values, dataclasses.replace(values[1], name="elsewhere", offset=64)])
    spans = {value.name: (value.start, value.end) for value in disjoint}
    assert spans == {"start": (0, 4), "carry": (5, 9), "elsewhere": (2, 9), "end": (10, 12)}


def test_gathers_in_the_asynchronous_wrappers_of_gpu_programs_are_found():
    with compile_only.optimized():
        program, found = compiled(3, compile_only.gpus())
    assert found.source == buffers.ASSIGNMENT
    assert abs(found.peak - analysed(program.memory_analysis())) <= SMALL
    assert max(found.curve.by_role[GATHERED]) >= 4 * WIDTH * HIDDEN
    assert max(found.curve.by_role[GRADIENTS]) >= 4 * WIDTH * HIDDEN // 8
    assert max(found.curve.by_role[OTHER]) < 4 * WIDTH * HIDDEN // 8  # values that cannot be found have no role
    assert found.arguments_by_role[PARAMS] == 2 * WEIGHTS // 8
