"""Checks the order that blocks and collectives get from the compiler.
This module tests zerojax.zero.blocks.overlap; test_explicit its values."""

import dataclasses
import functools
import re
from typing import Any

import compile_only
import jax.numpy as jnp
import pytest

import zerojax
from configs import llama3_8b
from zerojax import display
from zerojax.plan import departures, findings, ledger
from zerojax.trainer import config, program


@functools.cache
def schedule(depth: int = 3, **options: Any) -> list[str]:
    """Returns the instructions of a stage 3 step for 8 GPUs, in their order."""
    text = compile_only.staged_text(3, reduce_dtype=jnp.float32, depth=depth, **options)
    lines = text[text.index("\nENTRY") :].splitlines()
    return [line for line in lines if " = " in line and "parameter(" not in line and "get-tuple-element(" not in line]


def places(*words: str, **options: Any) -> list[int]:
    """Returns the positions of the instructions that hold all words."""
    found = [number for number, line in enumerate(schedule(**options)) if all(word in line for word in words)]
    assert found, words
    return found


BACKWARD = "transpose(jvp"


def test_gradients_are_scattered_in_float32_and_weights_gathered_in_bf16():
    for line in schedule():
        if "reduce-scatter-start" in line and BACKWARD in line:
            assert "bf16[" not in line
        if "all-gather-start" in line:
            assert "f32[" not in line.split("metadata")[0]


def test_a_block_gathers_no_sooner_than_the_block_before_it_runs():
    forward = [place for place in places("/dot_general") if BACKWARD not in schedule()[place]]
    block_0 = [place for place in forward if "/wide/" in schedule()[place] and "(block_0)" in schedule()[place]]
    assert max(block_0) < min(places("all-gather-start(", "block_2/"))


def test_a_block_gathers_again_no_sooner_than_the_block_after_it_runs_backward():
    """At any time two blocks' weights are gathered, and not all of them."""
    gathers = places("all-gather-start(", BACKWARD, "block_0/")
    assert max(places(BACKWARD, "block_2/wide", "dot_general")) < min(gathers)
    assert min(gathers) < min(places(BACKWARD, "block_0/narrow", "dot_general"))


def test_a_blocks_gradients_are_summed_before_the_block_before_it_ends():
    """At any time one block's gradients are unreduced, and not all of them."""
    sums = places("reduce-scatter-done(", "block_2/")
    assert max(sums) < min(places("reduce-scatter-start(", "block_0/"))


def test_copies_to_and_from_the_host_overlap_the_neighbours():
    """A copy to the host has ended when the second block after its own does; one from it begins beside the block after its own."""
    depth = 4
    options = {"offload": r"block_\d/wide", "depth": depth}
    find, lines = functools.partial(places, **options), schedule(**options)
    sent = [place for place in find("copy-done(") if "S(5)" in lines[place].split("copy-done(")[0]]
    fetched = [place for place in find("copy-start(") if "S(5)" not in lines[place].split(", ")[0]]
    assert len(sent) == len(fetched) == depth
    forward = {place for place in find("dot_general") if BACKWARD not in lines[place]}
    for block in range(depth - 2):
        assert sent[block] < max(place for place in find(f"(block_{block + 2})/") if place in forward)
    for block in range(depth - 2):
        assert max(find(BACKWARD, f"block_{block + 2}/", "dot_general")) < fetched[depth - 1 - block]
        assert fetched[depth - 1 - block] < max(find(BACKWARD, f"block_{block + 1}/", "dot_general"))


def test_what_packed_wires_send_between_hosts_and_inside_them_runs_beside_different_blocks():
    """Of two collectives of which one needs the other none waits for both: the compute stream would wait for the first."""
    depth, inside, between = 4, "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"
    wires = zerojax.PackedWires(weights="int8", gradients="int4", second_copy=True, host_devices=4)
    options = {"depth": depth, "wires": wires}
    find, lines = functools.partial(places, **options), schedule(**options)
    # The first one has nothing to run beside, and is one instruction from JAX 0.11 on.
    far = [place for place, line in enumerate(lines) if re.search(r" all-gather(-start)?\(", line) and between in line]
    near = find("all-gather-start(", inside)
    assert len(far) == depth and len(near) == 2 * depth - 1  # the last block's arrives once for both passes
    for block in range(depth - 2):
        end = max(place for place in find(f"(block_{block})", "dot_general") if BACKWARD not in lines[place])
        assert near[block + 1] < end and far[block + 1] < far[block + 2] < end < near[block + 2]
    for block in range(1, depth):
        before = find(BACKWARD, f"block_{block - 1}/", "dot_general")
        exchanges = find("all-to-all-start(", f"/block_{block}/")
        assert {place < min(before) for place in exchanges if inside in lines[place]} == {True}
        assert {place < min(before) for place in exchanges if between in lines[place]} == {True}
        done = find("all-to-all-done(", f"/block_{block}/")
        assert len([place for place in done if place < min(before)]) == len(done) // 2


@functools.cache
def layers() -> list[str]:
    """Returns the instructions of the trainer's step on three layers of 8B, in their order."""
    settings = llama3_8b.get_config()
    settings.model.num_layers, settings.model.offload, settings.model.recompute = 3, "", ""
    settings.model.by_columns = ""
    built = program.build(config.from_dict(settings), devices=compile_only.devices())
    text = compile_only.compile_gpu(built.train_step.lower(built.partition.abstract_state, built.abstract_batch))
    return [line for line in text[text.index("\nENTRY") :].splitlines() if " = " in line]


def moved(kind: str, *words: str) -> list[int]:
    """Returns how many arrays each of the collectives of a kind moves whose names hold the words."""
    found = [line for line in layers() if f" {kind}-start(" in line and all(word in line for word in words)]
    return [len(re.findall(r"%[\w.-]+", line.split(f" {kind}-start(")[1].split(")")[0])) for line in found]


def test_a_blocks_weights_take_one_collective_at_a_time():
    """Large ones too, which XLA would gather one by one, each waiting for a matmul to end."""
    weights = 9
    for layer in ("layer_0/", "layer_1/"):
        gathers, sums = moved("all-gather", layer), moved("reduce-scatter", layer)
        assert len(gathers) == 2 and len(sums) == 1  # forward, backward
        assert all(count in (weights, weights + 1) for count in gathers + sums)  # the last norm may come along


@pytest.mark.long
def test_the_last_block_gathers_again_beside_the_head():
    """The head's backward pass is short: it forms its gradients in the forward pass."""
    lines = layers()
    (again,) = [
        n for n, line in enumerate(lines) if "all-gather-start(" in line and BACKWARD in line and "layer_2/" in line
    ]
    (head,) = [n for n, line in enumerate(lines) if re.search(r" while\(", line)]
    (head_there,) = [n for n, line in enumerate(lines) if "all-gather-done(" in line and "head/kernel" in line]
    assert head_there < again < head


def test_matmuls_return_weight_gradients_in_float32():
    """There is no cast of an unsharded gradient between a matmul and its sum."""
    for line in layers():
        if "reduce-scatter-start(" in line and "layer_1/" in line:
            operands = re.findall(r"%[\w.-]+", line.split("reduce-scatter-start(")[1].split(")")[0])
    made = {match[1]: line for line in layers() if (match := re.match(r"\s+(%[\w.-]+) = ", line))}
    for name in operands:
        while " bitcast(" in made[name] or " slice(" in made[name] or " get-tuple-element(" in made[name]:
            name = re.search(r"(?:bitcast|slice|get-tuple-element)\((%[\w.-]+)\)", made[name])[1]
        if not re.search(r"= f32\[\d+\]", made[name]):  # vectors are not matmuls
            assert "convert" not in name, made[name]


@pytest.mark.long
def test_state_needs_no_turning_before_it_is_updated():
    """XLA lays out a gradient as its matmul makes it; another order than the state's costs copies of all moments, twice."""
    turned = [
        line for line in layers() if "/update/" in line and re.search(r" (copy|transpose)\(|transpose_fusion", line)
    ]
    assert not turned


@functools.cache
def by_columns() -> tuple[program.Program, str]:
    """Returns the trainer's program of one layer of 8B whose embedding and head no device gathers, and its compiled step."""
    settings = llama3_8b.get_config()
    settings.model.num_layers, settings.model.offload, settings.model.recompute = 1, "", ""
    settings.model.by_columns, settings.seq_len = "embed|head", 1024
    built = program.build(config.from_dict(settings), devices=compile_only.devices())
    return built, compile_only.compile_gpu(built.train_step.lower(built.partition.abstract_state, built.abstract_batch))


def test_no_device_gathers_or_sums_a_matrix_that_is_used_by_columns():
    """Of the vocabulary's 128,256 rows or columns a device has all of 512 columns, or 16,032 columns, but never a whole matrix."""
    assert not re.search(r"\[(4096,128256|128256,4096)\]", by_columns()[1])


def test_the_loss_waits_for_nothing_but_maxima_and_sums():
    """The next chunk is gathered before the logits and the sums of this one end beside the kernel's gradient."""
    _, text = by_columns()
    body = re.search(r" while\(.*?body=%([\w.-]+)", text)[1]
    lines = text[text.index(f"\n%{body} (") :].split("\n}")[0].splitlines()

    def place(*words: str) -> int:
        (found,) = [number for number, line in enumerate(lines) if all(word in line for word in words)]
        return found

    matmuls = [n for n, line in enumerate(lines) if "dot_general" in line.split(" = ")[0]]
    assert len(matmuls) == 3
    assert place("all-gather-start(", "bf16[") < matmuls[0] < place("all-gather-done(", "bf16[")
    assert place("reduce-scatter-start(") < matmuls[2] < place("reduce-scatter-done(")


def test_a_plan_tells_what_is_sent_in_place_of_a_matrix():
    built, text = by_columns()
    sent = ledger.ledger(text, built.mesh, built.partition.placements)
    assert {departure.why for departure in departures.departures(sent)} == {
        "devices use it by columns, and activations are sent instead"
    }
    find = functools.partial(findings.findings, planned=built.partition.abstract_state, compute_dtype=jnp.bfloat16)
    assert not find(sent)
    # 32 times the tokens send more than the two matrices, which do not grow.
    rows = [dataclasses.replace(row, nbytes=row.nbytes * 32 ** ("by_columns" in row.op_name)) for row in sent.rows]
    (found,) = find(dataclasses.replace(sent, rows=tuple(rows)))
    assert found.where == "params/embed/embedding, params/head/kernel"
    assert f"takes {display.human(6 * 2 * 4096 * 128256 * 7 / 8)}" in found.amount
