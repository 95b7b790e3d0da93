"""Checks a run against the memory of the host. This module tests zerojax.trainer.checks.host."""

import compile_only
import jax
import pytest
import runs

from zerojax import tree
from zerojax.errors import UserError
from zerojax.trainer import program
from zerojax.trainer.checks import host
from zerojax.zero import state_bytes
from zerojax.zero.host import budget, selection

OFFLOAD = {"offload__optimizer": "host", "offload__chunk_bytes": 20_000}


def built(devices=None, **changes):
    return program.build(runs.config(**changes), tokenizer_vocab=320, devices=devices)


def test_a_state_that_emulated_devices_cannot_hold_is_refused():
    with pytest.raises(
        UserError,
        match=r"^out of host memory: the state of config\.model \(preset=llama3_70b, .*\) on 8 CPU devices needs .* TiB",
    ):
        host.check(built(model__preset="llama3_70b", model__num_layers=2, model__vocab_size=2**24, zero__stage=0))
    host.check(built())


def test_the_limit_is_the_state_of_all_devices_of_this_host(monkeypatch):
    held = 8 * sum(state_bytes.bytes_per_device(built().partition).values())
    monkeypatch.setattr(host, "total", lambda: held)
    host.check(built())
    monkeypatch.setattr(host, "total", lambda: held - 1)
    with pytest.raises(UserError, match="out of host memory"):
        host.check(built())
    host.check(built(devices=compile_only.gpus()))  # they have memory of their own


@pytest.mark.parametrize("allowed, is_smaller", [(None, False), (2**59, False), (1000, True)])
def test_the_memory_of_a_container_counts_where_it_is_smaller(monkeypatch, allowed, is_smaller):
    monkeypatch.setattr(budget, "read_host", lambda: budget.Host(None, allowed))
    assert host.total() == 1000 if is_smaller else 2**28 < host.total() < 2**59


def test_an_error_of_the_host_becomes_one_line_and_another_does_not():
    line = str(host.short(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.")))
    assert line.startswith(
        "out of host memory (RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.), and this host has "
    )
    assert (
        host.short(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes."))
        is None
    )


def held_bytes(config):
    """Returns the bytes of all leaves in host memory, of eight devices."""
    partition = program.build(config, tokenizer_vocab=320).partition
    return 8 * sum(tree.shard_bytes(leaf) for leaf in selection.host_leaves(partition).values())


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_run_pins_is_bounded_before_it_uses_a_device(stage):
    config = runs.config(zero__stage=stage, precision="bf16", **OFFLOAD)
    held = held_bytes(config)
    assert held <= host.most_pinned_bytes(config) < 1.2 * held + 10 * config.offload.chunk_bytes
    assert host.most_pinned_bytes(runs.config(zero__stage=stage)) == 0


@pytest.mark.parametrize(
    ("offload", "width"),
    [(r"layer_\d+", 2 * 64), (r"layer_1/mlp/up", 128), (r".*/attention/(q|o)", 2 * (64 + 64)), ("", 0)],
)
def test_activations_on_the_host_are_counted_before_a_device_is_used(offload, width):
    config = runs.config(model__num_layers=2, model__offload=offload, model__remat="dots", grad_accum=2)
    assert (
        host.most_offloaded_activations(config) == width * 4 * 4 * 32
    )  # of 4 sequences of 32 tokens a pass, in float32


def test_those_of_all_micro_batches_in_a_pipeline_are_counted():
    one, piped = (
        runs.config(model__offload=r"layer_\d+", model__remat="full", grad_accum=4, mesh__pipe=pipe) for pipe in (1, 2)
    )
    assert host.most_offloaded_activations(piped) == 2 * host.most_offloaded_activations(one), "1F1B: of two"


@pytest.mark.parametrize("precision, part", [("bf16", 1.0), ("bf16_sr", 0.5)])
def test_what_a_run_pins_of_its_params_is_bounded_too(precision, part):
    parts = {"offload__fraction": part, "offload__params_fraction": part}
    config = runs.config(zero__stage=3, precision=precision, **(OFFLOAD | parts), offload__params="host")
    held = held_bytes(config)
    assert held <= host.most_pinned_bytes(config) < 1.3 * held + 10 * config.offload.chunk_bytes
