import dataclasses
import functools
import json
from unittest import mock

import jax
import pytest
import runs

import zerojax
from zerojax import train
from zerojax.models.llama import model as llama
from zerojax.plan import targets
from zerojax.trainer import plans, program
from zerojax.trainer.checks import host, memory_guard

# Other modules compare runs of this process with runs of others to the last bit: all take their programs from one folder.
pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.fixture(scope="module", autouse=True)
def planned_once():
    """Plans each program once. The runs of this module share theirs (`runs.run`)."""
    plan_program, found = plans.plan_program, {}

    @functools.wraps(plan_program)
    def planned(program, target, *, from_cache=False, **how):
        key = id(program.train_step), target, from_cache, *sorted(how.items())
        if key not in found:
            found[key] = program, plan_program(program, target, from_cache=from_cache, **how)
        return found[key][1]

    with mock.patch.object(plans, "plan_program", planned):
        yield


@pytest.fixture(scope="module")
def built():
    return program.build(runs.config(zero__stage=0, model__remat="none"), tokenizer_vocab=320)


@pytest.fixture(scope="module")
def plan(built):
    return memory_guard.compile_step(built)


def test_the_plan_and_the_measured_peak_are_written_side_by_side(tmp_path, built, plan):
    memory_guard.write(tmp_path, built, plan, 123)
    saved = json.loads((tmp_path / memory_guard.FILE).read_text())
    assert (saved["planned_peak_bytes"], saved["measured_peak_bytes"]) == (plan.peak, 123)
    assert saved["plan"]["peak_bytes"] == plan.peak
    assert (saved["device_kind"], saved["flops_per_token"]) == ("cpu", llama.flops_per_token(built.model, 32))


def test_the_comparison_states_the_difference_or_that_it_is_not_known(plan):
    assert "+10.0%" in memory_guard.compared(plan, round(plan.peak * 1.1))
    assert "does not report" in memory_guard.compared(plan, None)


def test_a_peak_that_was_reached_before_the_steps_is_not_taken_for_theirs(plan):
    """A process's peak never falls: tuning of kernels and the making of the state may have taken more than a small step."""
    line = memory_guard.compared(plan, 3 * plan.peak, at_start=3 * plan.peak)
    assert "kernels were tuned and the state was made" in line and "%" not in line
    assert "+200.0%" in memory_guard.compared(plan, 3 * plan.peak, at_start=3 * plan.peak - 1)  # the steps took more
    assert "-10.0%" in memory_guard.compared(plan, round(plan.peak * 0.9), at_start=plan.peak)


def test_out_of_memory_names_the_changes_that_fit(built, plan, monkeypatch, capsys):
    search_config = plans.search_config

    def with_memory(config, target, **kwargs):
        grid = {**kwargs.pop("grid"), "stage": (3,), "remat": ("none",)}
        return search_config(config, target, memory=plan.peak * 0.9, grid=grid, **kwargs)

    monkeypatch.setattr(plans, "search_config", with_memory)
    error = memory_guard.too_large(built, plan)
    assert "add --config.zero.stage=" in str(error) and "\n" not in str(error)
    assert "changes that would fit" in capsys.readouterr().out


def test_if_nothing_fits_the_way_out_is_a_smaller_run(built, plan, capsys):
    assert "more devices" in str(memory_guard.too_large(built, plan))


def test_where_the_step_fits_another_process_is_named_and_not_the_settings_of_the_run(built, plan, monkeypatch):
    target = dataclasses.replace(plan.target, memory=targets.Figure(4 * plan.peak, "this test"))
    search_config = plans.search_config

    def with_memory(config, target, **kwargs):
        grid = {**kwargs.pop("grid"), "stage": (0,), "remat": ("none",), "offload": ("none",), "params": ("none",)}
        return search_config(config, target, memory=plan.peak * 4, grid=grid, **kwargs)

    monkeypatch.setattr(plans, "search_config", with_memory)
    assert all("micro_batch_size" in change.flags for change in plans.changes_that_fit(built, most_compiles=1))
    monkeypatch.setattr(memory_guard.mesh_lib, "platform", lambda mesh: "gpu")
    monkeypatch.setattr(plans, "changes_that_fit", lambda *_, **__: [])
    error = str(memory_guard.too_large(built, dataclasses.replace(plan, target=target)))
    assert "another process" in error and "CUDA_VISIBLE_DEVICES" in error and "\n" not in error


def test_a_run_that_is_out_of_memory_ends_with_the_plan_and_one_line(tmp_path, monkeypatch, capsys):
    def no_room(state, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")

    compile_step = memory_guard.compile_step
    monkeypatch.setattr(
        memory_guard, "compile_step", lambda built: dataclasses.replace(compile_step(built), compiled=no_room)
    )
    with pytest.raises(zerojax.UserError, match="out of device memory"):
        runs.run(tmp_path)
    out = capsys.readouterr().out
    assert out.index(memory_guard.SHORT) < out.index("Memory on each device")


@pytest.mark.parametrize("is_pool", [True, False])
def test_a_step_that_needs_more_than_may_be_allocated_ends_before_anything_is(tmp_path, monkeypatch, capsys, is_pool):
    """Memory beyond JAX's pool is not known well enough to refuse a run."""
    plan_program, made = plans.plan_program, []

    def plan_on_less(*args, **how):
        plan = plan_program(*args, **how)
        memory = targets.Figure(plan.peak - 1, "this test")
        return dataclasses.replace(plan, target=dataclasses.replace(plan.target, memory=memory, is_pool=is_pool))

    def init_state(built):
        made.append(built)
        raise KeyError("made")

    monkeypatch.setattr(plans, "plan_program", plan_on_less)
    monkeypatch.setattr(train.state_lib, "first", init_state)
    with pytest.raises(zerojax.UserError if is_pool else KeyError, match="the step needs" if is_pool else "made"):
        runs.run(tmp_path)
    assert bool(made) != is_pool
    assert (memory_guard.SHORT in capsys.readouterr().out) == is_pool


def test_a_state_is_made_after_the_plan_and_is_explained_by_it_if_it_does_not_fit(tmp_path, monkeypatch, capsys):
    def no_room(built):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")

    monkeypatch.setattr(train.state_lib, "first", no_room)
    with pytest.raises(zerojax.UserError, match="out of device memory: the step needs"):
        runs.run(tmp_path)
    out = capsys.readouterr().out
    assert "compiled the step in" in out and "starts at step" not in out


def test_another_runtime_error_is_not_taken_for_out_of_memory(tmp_path, monkeypatch):
    def broken(state, batch):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    compile_step = memory_guard.compile_step
    monkeypatch.setattr(
        memory_guard, "compile_step", lambda built: dataclasses.replace(compile_step(built), compiled=broken)
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        runs.run(tmp_path)


def test_a_full_host_is_told_as_such_and_not_as_a_device(built, plan):
    for error in (
        MemoryError("too much"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
    ):
        with pytest.raises(zerojax.UserError, match=r"^out of host memory \("), memory_guard.explained(built, plan):
            raise error
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory_guard.explained(built, plan):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_a_step_that_the_host_of_cpu_devices_cannot_hold_is_refused_when_compiled(built, plan, monkeypatch):
    monkeypatch.setattr(host, "total", lambda: plan.peak * 8 - 1)
    with pytest.raises(zerojax.UserError, match=r"^out of host memory: the step needs "):
        memory_guard.compile_step(built)
