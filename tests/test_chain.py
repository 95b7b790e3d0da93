"""Checks the order that blocks and collectives get from the compiler. This module tests zerojax.chain; test_per_device its values."""

import functools
from typing import Any

import compile_only
import jax.numpy as jnp


@functools.cache
def schedule(**options: Any) -> list[str]:
    """Returns the instructions of a stage 3 step for 8 GPUs, in their order."""
    text = compile_only.staged_text(3, reduce_dtype=jnp.float32, **options)
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
    """So that two blocks' weights are whole, and not all of them."""
    gathers = places("all-gather-start(", BACKWARD, "block_0/")
    assert max(places(BACKWARD, "block_2/wide", "dot_general")) < min(gathers)
    assert min(gathers) < min(places(BACKWARD, "block_0/narrow", "dot_general"))


def test_a_blocks_gradients_are_summed_before_the_block_before_it_ends():
    """So that at any time one block's gradients are whole, and not all of them."""
    sums = places("reduce-scatter-done(", "block_2/")
    assert max(sums) < min(places("reduce-scatter-start(", "block_0/"))


def test_what_waits_on_the_host_comes_and_goes_beside_the_neighbours():
    """A copy to the host has ended when the second block after its own does; one from it begins beside the block after its own."""
    depth = 6
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
