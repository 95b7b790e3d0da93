"""Runs the texts in PTX without a GPU, and checks what they compute against numpy. This module tests pallas_kernels.one_token_ptx."""

import functools

import jax.numpy as jnp
import numpy as np
import ptx
import pytest

from pallas_kernels import one_token, one_token_ptx
from pallas_kernels.one_token_ptx import ROWS, WARPS, WIDE, ProductShape

UNIT = 1 / 127
BFLOAT16 = np.dtype(jnp.bfloat16)
SHARED, DEVICE = 0x400, 0x7F25_4000_0000  # addresses
GROUPS = 19  # the first counter of groups of columns

STEPS = 127 * 128  # of the largest of 32 values
ROUNDED = 0.51  # of a step: half of one, and what is lost of the inverse of a step
ONCE = 2.0**-8  # relative, of a value rounded to bfloat16 once, with room for sums in float32
FEW = 0.01  # of the values: sums of squares in another order seldom change what is rounded to bfloat16
SUMMED = 2.0**-21  # relative to the sum of what is added in float32, in a few additions


def block(shared, device=None):
    """Returns threads with such shared memory, and with the device's, which other blocks have too."""
    return ptx.Block(ptx.Memory(SHARED, shared), ptx.Memory(DEVICE, {}) if device is None else device)


def addresses(block, *names):
    """Returns where arrays are."""
    places = {name: at for memory in block.memories.values() for name, at in memory.at.items()}
    return [places[name] for name in names]


def noise(shape, dtype=np.float32):
    """Returns what nothing should be left of, or all."""
    return np.full(shape, -7.0, dtype)


def ulps(found, wanted):
    """Returns how many bfloat16 are between values of equal signs."""
    found, wanted = (np.asarray(array, BFLOAT16) for array in (found, wanted))
    return np.abs(found.view(np.int16).astype(int) - wanted.view(np.int16).astype(int))


def swizzled(codes):
    """Returns codes as the copy engine writes them: 16 bytes of row r that begin at 16 c are at 16 (c ^ (r % 8))."""
    rows, chunks = np.arange(ROWS)[:, None], np.arange(WIDE // 16)
    return codes.reshape(ROWS, WIDE // 16, 16)[rows, chunks ^ rows % 8]


def stage(random, kind):
    """Returns codes [256, 128], scales [2, 256] and x [256]."""
    codes = random.integers(-127, 128, (ROWS, WIDE)).astype(np.int8)
    x, scales = random.normal(size=ROWS), random.uniform(0.01, 1, (2, ROWS))
    if kind == "largest codes":
        codes = random.choice([-127, 127, 0], (ROWS, WIDE)).astype(np.int8)
        x = np.abs(x)
    if kind == "zeros":
        x[64:160] = 0
    if kind == "one huge":
        x[7::32] = random.choice([-1e5, 1e5], ROWS // 32)
    if kind == "whole steps":  # of 1
        x, scales = random.integers(-255, 256, ROWS) * 2.0 ** random.integers(0, 6, ROWS), np.ones((2, ROWS))
        x[3::32] = random.choice([-STEPS, STEPS], ROWS // 32)
    return codes, scales.astype(BFLOAT16), x.astype(BFLOAT16)


@pytest.mark.parametrize("kind", ["random", "largest codes", "zeros", "one huge", "whole steps"])
def test_a_stage_is_multiplied_to_15_bits(kind):
    """A value is rounded to a whole number of steps, of which the largest of 32 values times their scales has 127 * 128. So it is off by
    half a step at most, and the sum by that times the sum of |codes|; not at all where values are whole numbers of steps."""
    random = np.random.default_rng(len(kind))
    sums = [random.normal(size=256).astype(np.float32) for _ in range(16)]
    before = np.stack(sums, axis=1)
    wanted, allowed = np.zeros((2, WARPS, WIDE))
    rounded = 0 if kind == "whole steps" else ROUNDED
    for _ in range(2):
        codes, scales, x = stage(random, kind)
        own = block({"codes": swizzled(codes), "scales": scales, "x": x, "sums": noise((WARPS, WIDE))})
        sums = own.run(one_token_ptx.multiplied_text(), [*addresses(own, "codes", "scales", "x"), *sums], 16)
        values = np.repeat(x.astype(float) * scales.astype(float), 64, axis=0).reshape(WIDE, WARPS, 32)
        products = codes.astype(float).T.reshape(WIDE, WARPS, 32) * values
        step = np.abs(values).max(axis=2) / STEPS
        wanted += products.sum(axis=2).T
        allowed += (rounded * step * np.abs(codes.T.reshape(WIDE, WARPS, 32).astype(float)).sum(axis=2)).T
        allowed += SUMMED * np.abs(products).sum(axis=2).T
    own.run(one_token_ptx.write_sums_text(), [*addresses(own, "sums"), *sums])
    # Lane 4 g + t has the columns from 16 g on, and counts where g / 2 = t.
    lanes = np.arange(32).reshape(8, 4)[np.arange(8), np.arange(8) // 2]
    first = before.reshape(WARPS, 32, 16)[:, lanes].reshape(WARPS, WIDE)
    error = np.abs(own.memories["shared"]["sums"] - (wanted + first))
    assert (error <= allowed + SUMMED * np.abs(first)).all(), (error / (allowed + SUMMED * np.abs(first))).max()
    if kind == "zeros":
        np.testing.assert_array_equal(own.memories["shared"]["sums"][2:5], first[2:5])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(value):
    random = np.random.default_rng(0)
    codes, scales, x = stage(random, "random")
    x[5] = value  # one of the rows of the first warp
    own = block({"codes": swizzled(codes), "scales": scales, "x": x, "sums": noise((WARPS, WIDE))})
    zeros = [np.zeros(256, np.float32)] * 16
    sums = own.run(one_token_ptx.multiplied_text(), [*addresses(own, "codes", "scales", "x"), *zeros], 16)
    own.run(one_token_ptx.write_sums_text(), [*addresses(own, "sums"), *sums])
    found = np.isfinite(own.memories["shared"]["sums"])
    assert not found[0].any() and found[1:].all()


def of_block(sums):
    """Returns the sum over the warps times the unit, in the order in which threads add."""
    return np.float32(UNIT) * functools.reduce(np.add, sums)


def test_parts_are_written_to_their_place():
    random = np.random.default_rng(0)
    shape = ProductShape(1024, 3 * WIDE, 1, 4)
    device = ptx.Memory(DEVICE, {"parts": noise((4, 3 * WIDE))})
    wanted = device["parts"].copy()
    for strip, part in [(1, 2), (2, 3), (0, 0)]:
        sums = random.normal(size=(WARPS, WIDE)).astype(np.float32)
        own = block({"sums": sums}, device)
        text = one_token_ptx.write_parts_text(shape, UNIT)
        own.run(text, [strip, part, *addresses(own, "sums", "parts")])
        wanted[part, strip * WIDE : (strip + 1) * WIDE] = of_block(sums)
        np.testing.assert_array_equal(device["parts"], wanted)


def works(random, shape):
    """Returns the sums of each work, in shared memory, and the order in which blocks have them."""
    sums = random.normal(size=(shape.strips, shape.parts, 2, WARPS, WIDE)).astype(np.float32)
    order = [(strip, part) for strip in range(shape.strips) for part in range(shape.parts)]
    return 30 * sums, random.permutation(order)


def joined(sums):
    """Returns what these sum up to, float32[2, columns]."""
    of_parts = [[[of_block(w) for w in part] for part in strip] for strip in sums]
    return np.concatenate([functools.reduce(np.add, np.asarray(strip)) for strip in of_parts], axis=1)


def run_works(text, shape, sums, order, device, outs, of_strip):
    """Runs a text that ends works, in their order, and checks that the last of a strip alone writes what of_strip(strip) returns."""
    arrived = [0] * shape.strips
    more = [] if shape.parts == 1 else ["parts", "counts"]
    for strip, part in order:
        own = block({"sums": sums[strip, part]}, device)
        own.run(text, [strip, part, *addresses(own, "sums", *more, *outs)])
        arrived[strip] += 1
        for other, n in enumerate(arrived):
            found = of_strip(other)
            np.testing.assert_array_equal(found == -7, np.full(found.shape, n < shape.parts))
        if more:
            counts = np.zeros_like(device["counts"])
            counts[GROUPS : GROUPS + shape.strips] = [n % shape.parts for n in arrived]
            np.testing.assert_array_equal(device["counts"], counts)


def memory_of_works(shape, **arrays):
    """Returns the device's memory, where a product of several parts has these and counters."""
    parts = {"parts": noise((shape.weights, shape.parts, shape.columns)), "counts": np.zeros(40, np.int32)}
    return ptx.Memory(DEVICE, {**(parts if shape.parts > 1 else {}), **arrays}, fresh=["parts"])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_last_part_to_arrive_writes_the_gated_sums(parts):
    random = np.random.default_rng(parts)
    shape = ProductShape(1024, 3 * WIDE, 2, parts)
    sums, order = works(random, shape)
    device = memory_of_works(shape, h=noise(shape.columns, BFLOAT16))

    text = one_token_ptx.write_gated_text(shape, UNIT, GROUPS)
    run_works(text, shape, sums, order, device, ["h"], lambda strip: device["h"].reshape(-1, WIDE)[strip])
    gate, up = (half.astype(BFLOAT16).astype(float) for half in joined(sums))
    np.testing.assert_allclose(device["h"].astype(float), gate / (1 + np.exp(-gate)) * up, rtol=ONCE)


@pytest.mark.parametrize("dims, parts, slot", [(64, 1, 2), (64, 2, 0), (128, 4, 4), (128, 1, 5), (64, 2, 2**31 - 1)])
def test_queries_are_written_and_keys_and_values_of_a_slot_that_is_there(dims, parts, slot):
    random = np.random.default_rng(dims + parts)
    slots, heads, kv_heads = 5, 512 // dims, 256 // dims
    shape = ProductShape(1024, (heads + 2 * kv_heads) * dims, 1, parts)
    sums, order = works(random, shape)
    turn = random.uniform(-1, 1, dims).astype(np.float32)
    cache = noise((slots, kv_heads, dims), BFLOAT16)
    device = memory_of_works(
        shape, q=noise(heads * dims, BFLOAT16), k=cache, v=cache, turn=turn, slot=np.asarray([slot], np.int32)
    )
    is_kept = slot < slots

    def of_strip(strip):
        written = [device["q"], *(device[name][slot].reshape(-1) for name in "kv" if is_kept)]
        return np.concatenate(written)[strip * WIDE : (strip + 1) * WIDE]

    text = one_token_ptx.write_projected_text(heads * dims, shape, UNIT, (slots, kv_heads, dims), GROUPS)
    run_works(text, shape, sums, order, device, ["q", "k", "v", "turn", "slot"], of_strip)

    rows = joined(sums)[0].astype(BFLOAT16).astype(float).reshape(-1, dims)
    first, second = np.split(rows, 2, axis=1)
    cos, sin = np.split(turn.astype(float), 2)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
    allowed = ONCE * np.abs(turned) + SUMMED * np.tile(np.abs(first) + np.abs(second), 2)
    q, k, _ = np.split(turned, [heads, heads + kv_heads])
    of_q, of_k, _ = np.split(allowed, [heads, heads + kv_heads])
    assert (np.abs(device["q"].reshape(-1, dims).astype(float) - q) <= of_q).all()
    if is_kept:
        assert (np.abs(device["k"][slot].astype(float) - k) <= of_k).all()
        np.testing.assert_array_equal(device["v"][slot].astype(float), rows[-kv_heads:])
    for name in "kv":
        assert (device[name][[other for other in range(slots) if other != slot]] == -7).all()


@pytest.mark.parametrize("count", [8, 256, 1792, 2048, 2304, 6400])
def test_plain_values_are_copied_from_the_first_on(count):
    random = np.random.default_rng(count)
    device = ptx.Memory(DEVICE, {"y": random.normal(size=3 * count).astype(BFLOAT16)}, fresh=["y"])
    own = block({"x": noise(count + 8, BFLOAT16)}, device)
    for first in (2 * count, 0):
        own.run(one_token_ptx.read_plain_text(count), [first, *addresses(own, "y", "x")])
        np.testing.assert_array_equal(own.memories["shared"]["x"][:count], device["y"][first : first + count])
    assert (own.memories["shared"]["x"][count:] == -7).all()


@pytest.mark.parametrize("size, parts", [(512, 0), (512, 1), (2048, 4), (3072, 2), (3072, 0), (4096, 0), (4096, 4)])
def test_normed_values_are_those_of_the_twin(size, parts):
    random = np.random.default_rng(size + parts)
    x, scale = (random.normal(size=size).astype(BFLOAT16) for _ in range(2))
    added = random.normal(size=(parts, size)).astype(np.float32)
    summed = np.asarray(one_token.plus(x, functools.reduce(np.add, added))) if parts else x
    wanted = one_token.normed(jnp.asarray(summed), one_token.squares_of(summed, 1), one_token.Norm(scale, 1e-5))
    for number in (1, 0):
        arrays = {"x": x, "scale": scale, "added": added, "new": noise(size, BFLOAT16)}
        device = ptx.Memory(DEVICE, arrays, fresh=["x", "added"])
        own = block({"target": noise(size + 8, BFLOAT16), "sums": noise(WARPS + 1)}, device)
        names = ["target", "sums", "x", "scale", *(["added", "new"] if parts else [])]
        own.run(one_token_ptx.read_normed_text(size, parts, 1e-5), [number, *addresses(own, *names)])
        shared = own.memories["shared"]
        differences = ulps(shared["target"][:size], wanted)
        assert differences.max() <= 1 and (differences > 0).mean() < FEW
        assert (shared["target"][size:] == -7).all() and shared["sums"][WARPS] == -7
        is_written = parts > 0 and number == 0
        np.testing.assert_array_equal(device["new"], summed if is_written else noise(size, BFLOAT16))


def test_eps_is_added_to_the_mean_square():
    x = np.full(512, 1e-3, BFLOAT16)
    own = block({"target": x, "sums": noise(WARPS)}, ptx.Memory(DEVICE, {"x": x, "scale": np.ones(512, BFLOAT16)}))
    own.run(one_token_ptx.read_normed_text(512, 0, 1e-4), [0, *addresses(own, "target", "sums", "x", "scale")])
    wanted = x.astype(float) / np.sqrt(np.square(x.astype(float)) + 1e-4)
    np.testing.assert_allclose(own.memories["shared"]["target"].astype(float), wanted, rtol=ONCE)


def test_blocks_wait_for_all_arrivals_and_the_last_resets_the_counters():
    n, arrivals, waiters = 2, 3, 4
    device = ptx.Memory(DEVICE, {"counts": np.zeros(16, np.int32)}, fresh=["counts"])
    wait, arrive = one_token_ptx.wait_text(n, arrivals, waiters), one_token_ptx.arrive_text(n)

    def run(text):
        own = block({}, device)
        own.run(text, addresses(own, "counts"))
        others = np.delete(device["counts"], [2 * n, 2 * n + 1])
        assert not others.any()
        return device["counts"][2 * n : 2 * n + 2].tolist()

    for _ in range(2):  # launches
        for arrived in range(1, arrivals + 1):
            with pytest.raises(TimeoutError, match=r"^0 threads"):
                run(wait)
            assert run(arrive) == [arrived, 0]
        assert [run(wait) for _ in range(waiters)] == [[3, 1], [3, 2], [3, 3], [0, 0]]


@pytest.mark.parametrize("kind, parts", [("add", 2), ("gate", 1), ("gate", 2), ("project", 1), ("project", 2)])
def test_barriers_are_between_the_texts_of_two_works(kind, parts):
    """`ptx.Block` raises where one is missing. What is computed is checked above."""
    random = np.random.default_rng(0)
    size = ROWS * parts
    shape = ProductShape(size, 4 * WIDE, 2 if kind == "gate" else 1, parts)
    codes, scales, x = stage(random, "random")
    arrays = {"x": np.tile(x, parts), "scale": np.ones(size, BFLOAT16), "out": noise(shape.columns, BFLOAT16)}
    cache = noise((1, 1, WIDE), BFLOAT16)
    arrays |= {"turn": noise(WIDE), "slot": np.zeros(1, np.int32), "k": cache, "v": cache}
    arrays |= {"parts": noise((shape.weights, parts, shape.columns)), "counts": np.zeros(40, np.int32)}
    device = ptx.Memory(DEVICE, arrays, fresh=["parts", "x"])
    own = block(
        {"codes": codes, "scales": scales, "x_s": noise(size, BFLOAT16), "sums": noise((2, WARPS, WIDE))}, device
    )
    at = dict(zip(names := ["x", "x_s", "sums", "scale", "counts", "out"], addresses(own, *names)))
    more = addresses(own, "parts", "counts") if parts > 1 else []
    for _ in range(2):  # products
        if kind != "add":
            own.run(one_token_ptx.read_normed_text(size, 0, 0.0), [0, at["x_s"], at["sums"], at["x"], at["scale"]])
        for part in range(parts):
            if kind == "add":
                own.run(one_token_ptx.read_plain_text(ROWS), [part * ROWS, at["x"], at["x_s"]])
            for second in range(shape.weights):
                sums = [np.zeros(256, np.float32)] * 16
                given = addresses(own, "codes", "scales", "x_s")
                sums = own.run(one_token_ptx.multiplied_text(), [*given, *sums], 16)
                own.run(one_token_ptx.write_sums_text(), [at["sums"] + 4 * WARPS * WIDE * second, *sums])
            given = [1, part, at["sums"]]
            if kind == "add":
                own.run(one_token_ptx.write_parts_text(shape, UNIT), [*given, *addresses(own, "parts")])
            elif kind == "gate":
                own.run(one_token_ptx.write_gated_text(shape, UNIT, GROUPS), [*given, *more, at["out"]])
            else:
                outs = addresses(own, "out", "k", "v", "turn", "slot")
                text = one_token_ptx.write_projected_text(2 * WIDE, shape, UNIT, (1, 1, WIDE), GROUPS)
                own.run(text, [*given, *more, *outs])
        own.run(one_token_ptx.arrive_text(0), [at["counts"]])
