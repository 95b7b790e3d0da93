"""Compares the update kernel, interpreted, with its twin and float64 numpy. This module tests pallas_kernels.update, rules, tiles."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from pallas_kernels import blockwise, rules, tiles, update
from zerojax import traces

ONCE = 4e-6  # one step in float32, relative to the largest value: a dozen roundings of 6e-8
NUMBERS = {"learning_rate": 0.01, "weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-8}
STEP = 3
SMALL_TILES = tiles.Launch(elements=1024, joins=True, group=4, group_elements=512, small=3000)


def scalars(scale=0.5, finite=1.0):
    b1, b2 = NUMBERS["b1"], NUMBERS["b2"]
    return rules.Scalars(
        scale=scale,
        finite=finite,
        rest1=1 - b1,
        rest2=1 - b2,
        correct1=1 / (1 - b1**STEP),
        correct2=1 / (1 - b2**STEP),
        **NUMBERS,
    )


def make_leaf(shape, grad_dtype="float32", dtype="float32", moments="float32", seed=0, name="adam"):
    rng = np.random.default_rng(seed)

    def draw():
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    mu, nu = draw() * 0.1, jnp.square(draw()) * 0.01
    if moments == "int8":
        blocks = blockwise.BlockView(tuple(shape))

        def encoded(x, dtype):
            parts = blocks.split(x)
            scales = blockwise.scales_of(parts)
            return blocks.join(blockwise.encode(parts, scales, dtype)), scales

        mu, nu = encoded(mu, jnp.int8), encoded(nu, jnp.uint8)
    else:
        mu, nu = mu.astype(moments), nu.astype(moments)
    return rules.Operands(draw().astype(grad_dtype), draw().astype(dtype), mu, nu if name == "adam" else None)


def run(implementation, rule, leaves, numbers=None, places=None, launch=None):
    places = places or [update.Shard(True)] * len(leaves)
    seeds = [jnp.asarray([n + 7] + [0] * len(place.sharded_dims), jnp.uint32) for n, place in enumerate(places)]
    how = functools.partial(update.update_leaves, rule, shards=places, implementation=implementation, launch=launch)
    return jax.jit(lambda leaves, numbers: how(leaves=leaves, scalars=numbers, seeds=seeds))(
        leaves, numbers or scalars()
    )


def assert_alike(found, expected, tolerance=ONCE):
    """Holds floats to the tolerance, and codes and 16-bit floats to their last place, which few elements may miss by one."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype and a.shape == b.shape
        wide_a, wide_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if a.dtype == jnp.float32:
            np.testing.assert_allclose(wide_a, wide_b, rtol=tolerance, atol=tolerance)
        else:
            place = 1 if a.dtype in (jnp.int8, jnp.uint8) else np.abs(wide_b) * 2**-7 + 1e-30
            assert np.all(np.abs(wide_a - wide_b) <= place) and np.mean(wide_a != wide_b) <= max(0.01, 1 / a.size)


def in_float64(rule, leaf, decays=True):
    """The equations of rules.py, written out again."""
    s = scalars()
    g, p, m = (np.asarray(x, np.float64) for x in leaf[:3])
    g = g * s.scale
    wd = s.weight_decay * decays
    if not rule.decoupled:
        g, wd = g + wd * p, 0.0
    if rule.name == "lion":
        direction = np.sign(s.b1 * m + (1 - s.b1) * g)
        return p - s.learning_rate * (direction + wd * p), s.b2 * m + (1 - s.b2) * g, None
    m = s.b1 * m + (1 - s.b1) * g
    v = s.b2 * np.asarray(leaf.nu, np.float64) + (1 - s.b2) * g * g
    direction = (m / (1 - s.b1**STEP)) / (np.sqrt(v / (1 - s.b2**STEP)) + s.eps)
    return p - s.learning_rate * (direction + wd * p), m, v


@pytest.mark.parametrize("implementation", ["jnp", "interpret"])
@pytest.mark.parametrize("rule", [rules.Rule("adam"), rules.Rule("adam", decoupled=False), rules.Rule("lion")], ids=str)
def test_one_step_is_the_equations_in_float64(implementation, rule):
    leaves = [make_leaf(shape, seed=n, name=rule.name) for n, shape in enumerate([(1,), (257, 3), (5000,), (2, 4096)])]
    places = [update.Shard(decays) for decays in (True, False, True, True)]
    for done, leaf, place in zip(run(implementation, rule, leaves, places=places, launch=SMALL_TILES), leaves, places):
        for found, expected in zip(done[:3], in_float64(rule, leaf, place.decays)):
            if expected is not None:
                np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=ONCE, atol=ONCE)


SHAPES = st.one_of(
    st.tuples(st.integers(1, 9000)),
    st.tuples(st.integers(1, 40), st.integers(1, 700)),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 5, 255, 256, 257, 512])),
)


@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(SHAPES, min_size=1, max_size=2),
    st.sampled_from(["adam", "lion"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.booleans(),
    st.sampled_from([None, "bfloat16", "float16"]),
    st.booleans(),
)
def test_the_kernel_is_its_twin(shapes, name, grads, params, moments, stochastic, copies, changes):
    # A change of a weight rounded at random is the difference of two neighbours: off by a last place of the weight where they round apart.
    changes = changes and not (stochastic and params == "bfloat16")
    rule = rules.Rule(name, stochastic=stochastic, copy_dtype=copies and jnp.dtype(copies), changes=changes)
    leaves = [make_leaf(shape, grads, params, moments, n, name) for n, shape in enumerate(shapes)]
    found, expected = (run(how, rule, leaves, launch=SMALL_TILES) for how in ("interpret", "jnp"))
    assert_alike(found, expected)


@pytest.mark.parametrize("size", runs.cases([1, 2, 255, 256, 4095, 65537, 2_100_003], long=[2, 256, 65537]))
def test_any_number_of_elements(size):
    rule = rules.Rule("adam", copy_dtype=jnp.dtype("bfloat16"), skips=True)
    leaves = [make_leaf((size,), "bfloat16", seed=size)]
    assert_alike(run("interpret", rule, leaves), run("jnp", rule, leaves))


@pytest.mark.parametrize(
    "shape", runs.cases([(1, 4096), (4096, 1), (63, 257), (3, 5, 512)], long=[(1, 4096), (4096, 1), (3, 5, 512)])
)
def test_any_shape_in_8_bits(shape):
    rule = rules.Rule("adam", stochastic=True, skips=True)
    leaves = [make_leaf(shape, moments="int8")]
    assert_alike(run("interpret", rule, leaves), run("jnp", rule, leaves))


@pytest.mark.parametrize(
    ("bad", "moments", "implementation"),
    [
        pytest.param(*case, marks=() if number in (0, 3, 5, 7, 8, 10) else runs.LONG)  # each pair of two
        for number, case in enumerate(
            itertools.product([np.nan, np.inf], ["float32", "bfloat16", "int8"], ["jnp", "interpret"])
        )
    ],
)
def test_a_step_that_is_not_finite_changes_no_bit(implementation, moments, bad):
    rule = rules.Rule("adam", stochastic=moments != "float32", skips=True, copy_dtype=jnp.dtype("bfloat16"))
    leaf = make_leaf((7, 300), "bfloat16", moments=moments)
    leaf = leaf._replace(grad=leaf.grad.at[6, 299].set(bad))
    (done,) = run(implementation, rule, [leaf], scalars(scale=np.nan, finite=0.0), launch=SMALL_TILES)
    for found, kept in zip(jax.tree.leaves(done[:3]), jax.tree.leaves(leaf[1:])):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(kept))
    np.testing.assert_array_equal(np.asarray(done.copy), np.asarray(leaf.param.astype(jnp.bfloat16)))
    (changed,) = run(implementation, rules.Rule("adam", skips=True, changes=True), [leaf], scalars(np.nan, 0.0))
    assert not np.any(changed.param)


@pytest.mark.parametrize("implementation", ["jnp", "interpret"])
def test_a_change_added_to_a_16_bit_weight_is_the_weight_rounded_at_random(implementation):
    leaf = make_leaf((3000,), dtype="bfloat16")
    rule = rules.Rule("adam", stochastic=True)
    (new,) = run(implementation, rule, [leaf])
    (change,) = run(implementation, rules.Rule("adam", stochastic=True, changes=True), [leaf])
    np.testing.assert_array_equal(
        (leaf.param + change.param).astype(jnp.bfloat16).astype(np.float32), new.param.astype(np.float32)
    )


def test_leaves_that_a_kernel_cannot_take_take_the_twin():
    leaf = make_leaf((0, 5))
    assert run("interpret", rules.Rule("adam"), [leaf, make_leaf((3,))])[0].param.shape == (0, 5)


@pytest.mark.parametrize("moments", runs.cases(["float32", "bfloat16", "int8"], long=["bfloat16", "int8"]))
def test_leaves_of_a_group_are_each_updated_as_alone(moments):
    """Whatever their sizes, and beside leaves that differ in dtype or decay, which are in groups of their own."""
    rule = rules.Rule("adam", stochastic=moments != "float32", skips=True, copy_dtype=jnp.dtype("bfloat16"))
    shapes = [(5, 256), (1,), (3, 300), (1, 256), (3, 1024), (2999,), (3001,)]
    leaves = [
        make_leaf(shape, "bfloat16" if n % 4 == 3 else "float32", moments=moments, seed=n)
        for n, shape in enumerate(shapes)
    ]
    places = [update.Shard(n != 2) for n in range(len(shapes))]
    assert_alike(*(run(how, rule, leaves, places=places, launch=SMALL_TILES) for how in ("interpret", "jnp")))


SIZES = st.lists(st.one_of(st.integers(1, 9000), st.integers(1, 9).map(lambda n: 1024 * n)), max_size=20)


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(SIZES)
def test_groups_hold_every_array_once_and_tiles_every_element(sizes):
    groups = tiles.groups(sizes, SMALL_TILES)
    assert sorted(number for group in groups for number in group) == list(range(len(sizes)))
    assert all(len(group) <= SMALL_TILES.group for group in groups)
    for group in groups:
        large = [sizes[number] for number in group if sizes[number] >= SMALL_TILES.small]
        assert not large or len(group) == 1 or all(size % SMALL_TILES.elements == 0 for size in large)
    for size in sizes:
        cut = tiles.flat(size, 1024)
        assert cut.width * (cut.programs - 1) < size <= cut.width * cut.programs and cut.full * cut.width <= size


def all_tiles(shape):
    """Returns the ways in which an array is cut: as one row, and in blocks."""
    return [tiles.flat(int(np.prod(shape)), 1024), tiles.in_blocks(shape, 1024), tiles.in_blocks(shape, 256)]


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.integers(1, 1500), min_size=1, max_size=2).map(tuple))
@hypothesis.example((1, 5000))
@hypothesis.example((300,))
def test_tiles_cover_every_element_once_and_full_ones_have_no_other(shape):
    for cut in all_tiles(shape):
        numbers = []
        spots = [cut.at(jnp.int32(own)) for own in range(cut.programs)] if cut.programs < 200 else []
        for own, spot in enumerate(spots):
            there, scales = (np.asarray(mask) for mask in cut.masks(spot))
            numbers.extend(np.broadcast_to(spot.elements, there.shape)[there].tolist())
            if own < cut.full:
                assert there.all() and scales.all()
        assert not spots or sorted(numbers) == list(range(int(np.prod(shape))))


@runs.LONG
@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.integers(1, 3000), min_size=2, max_size=9))
def test_every_program_of_a_group_finds_a_tile_of_its_own(sizes):
    cut = [tiles.flat(size, 512) for size in sizes]

    def found(program):
        result = []
        tiles.run(cut, program, lambda own, choose: result.append((choose(lambda n, _: jnp.int32(n)), own)))
        return result[0]

    expected = [(number, own) for number, tile in enumerate(cut) for own in range(tile.programs)]
    numbers, owns = jax.vmap(found)(jnp.arange(len(expected), dtype=jnp.int32))
    assert list(zip(numbers.tolist(), owns.tolist())) == expected


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_leaves_of_a_group_have_no_arithmetic_of_their_own(moments):
    """Launches of small leaves are bound by instruction-cache misses."""
    leaves = [make_leaf((4, 256), "float32", moments=moments) for _ in range(4)]
    rule = rules.Rule("adam", copy_dtype="bfloat16")
    step = functools.partial(run, "pallas", rule, launch=SMALL_TILES)
    kernel = next(
        e.params["jaxpr"] for e in traces.equations(jax.make_jaxpr(step)(leaves).jaxpr) if "grid_mapping" in e.params
    )
    switches = [e for e in traces.equations(kernel) if e.primitive.name == "cond" and len(e.params["branches"]) == 4]
    inside = {
        e.primitive.name for switch in switches for branch in switch.params["branches"] for e in branch.jaxpr.eqns
    }
    assert len(switches) == 2 and inside == {"masked_load", "masked_swap"}
