"""Checks the bounds of serving by hand. This module tests zerojax.plan.serving."""

import json

import pytest

from zerojax.clock import rates
from zerojax.errors import UserError
from zerojax.plan import serving, targets

# The shapes of Llama 3 8B in bf16, with texts of 1,024 tokens.
SERVED = serving.Served(
    devices=1,
    length=1024,
    dtype="bf16",
    format="none",
    weights=16_060_000_000,
    dense=15_010_000_000,
    experts=0,
    share=0.0,
    cache=1024 * 131072,
    row=128256 * 5,
    flops=15.3e9,
)


def test_one_text_is_bound_by_the_weights_and_many_by_their_caches():
    found = serving.plan(SERVED, targets.get("h200"))
    bandwidth = rates.of("h200").figures["bandwidth"]
    first = found.rows[0]
    assert first[0] == 1 and first[2] == pytest.approx(bandwidth / (15_010_000_000 + 1024 * 131072))
    each = SERVED.cache + SERVED.row
    assert (
        SERVED.weights + found.largest * each
        <= targets.get("h200").usable
        < SERVED.weights + (found.largest + 1) * each
    )
    assert found.rows[-1][:2] == (found.largest, SERVED.weights + found.largest * each)
    speeds = [rate for _, _, rate in found.rows]
    assert speeds == sorted(speeds) and speeds[-1] < bandwidth / SERVED.cache
    assert json.loads(json.dumps(serving.as_json(found)))["largest_batch"] == found.largest
    assert f"{found.largest:,} texts fit at most" in serving.text(found)
    told = serving.dataclasses.replace(SERVED, runs="kernels")
    lines = [serving.text(serving.plan(told, targets.get(name))) for name in ("h200", "v5p")]
    assert ["a token is made by: kernels" in text for text in lines] == [True, False]


def test_short_texts_are_bound_by_matmuls():
    short = serving.dataclasses.replace(SERVED, cache=1000, row=0)
    assert serving.plan(short, targets.get("h100")).rows[-2][2] == pytest.approx(989.4e12 / SERVED.flops)


def test_a_batch_reads_the_experts_that_its_tokens_take():
    mixed = serving.dataclasses.replace(SERVED, dense=0, experts=800, share=0.25, cache=0)
    assert [mixed.read(batch) for batch in (1, 2)] == [200, 350] and mixed.read(1000) == pytest.approx(800)


def test_what_does_not_fit_and_what_is_unknown_is_told():
    large = serving.dataclasses.replace(SERVED, weights=150 * 10**9)
    with pytest.raises(UserError, match=r"--serve: the weights take 139\.70 GiB .*raise mesh\.model"):
        serving.plan(large, targets.get("h200"))
    unknown = serving.plan(SERVED, targets.Target("here", "cpu", "cpu"))
    assert unknown.largest is None and all(rate is None for _, _, rate in unknown.rows)
    assert "the memory of here is unknown" in serving.text(unknown) and "unknown" in serving.text(unknown)


def test_weights_in_host_memory_bound_a_step_by_their_link():
    """96 texts of a 70B model in bf16 on one H200: 39 GB are read at 54 GB/s for each of their tokens."""
    streamed = serving.dataclasses.replace(
        SERVED, weights=102 * 10**9, dense=140 * 10**9, cache=250 * 10**6, flops=141e9, streamed=42_500_000_000
    )
    found = serving.plan(streamed, targets.get("h200"))
    assert found.largest > 96 and found.link.value == 54e9
    assert {batch: rate for batch, _, rate in found.rows}[64] == pytest.approx(64 * 54e9 / 42.5e9)
    assert "39.58 GiB of weights in host memory, which every step reads at 54 GB/s" in serving.text(found)
    assert serving.plan(SERVED, targets.get("h200")).link is None
    with pytest.raises(UserError, match=r"raise offload\.params_fraction"):
        serving.plan(serving.dataclasses.replace(streamed, weights=150 * 10**9), targets.get("h200"))
