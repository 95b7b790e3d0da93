"""Compares rows in parts on devices with the same rows on one. This module tests zerojax.ops.recurrence_context."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from recurrences import DELTA, SCAN, assert_alike, drawn

import zerojax
from zerojax.ops import recurrence, recurrence_context, short_convolution

BATCH, SIZES = 2, (2, 4, 3, 5)  # groups, heads, widths of keys and values
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


def texts(length):
    """Returns numbers of texts: of one token, over several parts, ending where parts end, and padding."""
    sizes = [[1, length // 2 - 1, length // 4, length - 1 - (length // 2 - 1) - length // 4], [length - 3, 1, 0, 2]]
    return np.stack([np.repeat([1, 2, 3, 0], size) for size in sizes]).astype(np.int32)


def in_parts(ways, function, *args):
    mesh = zerojax.make_mesh(context=ways, devices=jax.devices()[:ways])
    mapped = {"in_specs": P(None, "context"), "out_specs": P(None, "context"), "check_vma": False}
    return jax.jit(jax.shard_map(function, mesh=mesh, **mapped))(*args)


@pytest.mark.parametrize("kind", [DELTA, SCAN])
@pytest.mark.parametrize("ways, local, has_texts, has_mask", [
    (2, 70, False, False), (4, 33, True, False), (8, 1, False, True), (8, 3, True, True),
])  # fmt: skip
def test_results_and_gradients_are_those_of_one_device(kind, ways, local, has_texts, has_mask):
    """Parts of one chunk, of several and of a part of one, whose texts begin and end anywhere."""
    length = ways * local
    terms, _, (d_y, _) = drawn(kind, BATCH, length, *SIZES)
    segments = texts(length) if has_texts else None
    mask = np.arange(length) < np.array([[length - 2], [length // 2]]) if has_mask else None

    def results(scan, terms, d_y, segments, mask):
        y, pull = jax.vjp(lambda terms: scan(terms, mask_BT=mask, segments_BT=segments)[0], terms)
        seen = 1 if mask is None else mask[..., None, None]
        return y * seen, pull(d_y * seen)

    wanted = jax.jit(functools.partial(results, recurrence.scan))(terms, d_y, segments, mask)
    parts = functools.partial(results, functools.partial(recurrence_context.scan, axis="context"))
    assert_alike(in_parts(ways, parts, terms, d_y, segments, mask), wanted)


@pytest.mark.parametrize("kind", [DELTA, SCAN])
def test_the_state_after_a_part_is_that_of_the_row(kind):
    (terms, *_), segments = drawn(kind, BATCH, 32, *SIZES), texts(32)
    scan = lambda *given: recurrence_context.scan(given[0], segments_BT=given[1], axis="context")[1][:, None]  # noqa: E731
    found = in_parts(4, scan, terms, segments)
    for part in range(4):
        first = jax.tree.map(lambda array, part=part: array[:, : 8 * (part + 1)], (terms, segments))
        assert_alike(found[:, part], recurrence.scan(first[0], segments_BT=first[1])[1])


@pytest.mark.parametrize("ways, local, window", [(4, 5, 4), (8, 1, 4), (8, 2, 4), (2, 4, 1)])
@pytest.mark.parametrize("has_texts", [False, True])
def test_a_convolution_reads_what_other_devices_have(ways, local, window, has_texts):
    """Also where a window reaches over several parts."""
    length = ways * local
    x, d_y, kernel = normal(BATCH, length, 3), normal(BATCH, length, 3), normal(window, 3)
    segments = texts(length) if has_texts else None

    def results(convolve, x, d_y, segments):
        y, pull = jax.vjp(lambda x: convolve(x, kernel, segments), x)
        return y, pull(d_y)

    whole = lambda x, kernel, segments: short_convolution.convolve(x, kernel, segments_BT=segments)[0]  # noqa: E731
    part = lambda x, kernel, segments: recurrence_context.convolve(x, kernel, segments_BT=segments, axis="context")  # noqa: E731
    found = in_parts(ways, functools.partial(results, part), x, d_y, segments)
    assert_alike(found, jax.jit(functools.partial(results, whole))(x, d_y, segments))
