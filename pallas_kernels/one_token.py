"""A decoder's layer for one new token of one text, in five kernels. This module holds them and their twins.

    project   q, k, v = turned(W norm(x)), k and v into the cache
    attend    o = attention of q to the cache
    add       x = x + W o, and the sums of squares that the next norm reads
    gate      h = silu(W norm(x)) * V norm(x)
    add       x = x + W h

A layer of one row reads its weights and does little else, so what counts is that the memory is busy all the time: few kernels, and in
each of them many wide reads on their way. A program multiplies some columns with a part of the rows. A thread reads 16 bytes of a row at
a time, several of them before it uses any (`form`), and adds in float32. The last program of a column group to arrive, which a counter
tells, adds up the parts in their order and goes on with the sum. So results do not depend on who is last.

Where devices share the weights, `multiply` takes the place of `add`, and its result, summed over the devices, is the `delta` that the next
kernel adds to x before its norm: a kernel between the two would cost a launch.

Shapes: K contracted, N columns, D embed, H query heads, J key and value heads, C dims of a head, S slots.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import cached_attention

BLOCK = 64  # weights of a scale
READ = 16  # bytes that a thread reads at once
MANY = 8192  # columns, of which a program of 256 leaves enough programs
COUNTERS = 4096  # the most column groups of a kernel that has parts
PARTS = 32  # the most, since a thread adds up those of its columns one after the other
SQUARED = 2048  # elements of x that a program squares at a time; more take more registers
MOST_GATES = COUNTERS * BLOCK // 2  # columns of each weight of `gate`

# How codes are multiplied and added: codes that share 32 bits, and a * code + sum in PTX ($0... sums, codes, factors, sums).
_CONVERSIONS = {
    "int8": (
        4,
        # A byte plus 128 in the mantissa of 2^23 is 2^23 + 128 more than the code. Conversions of integers are slow.
        ".reg .b32 u, a, b, c, d; xor.b32 u, $4, 0x80808080;"
        "prmt.b32 a, u, 0x4B000000, 0x7540; prmt.b32 b, u, 0x4B000000, 0x7541;"
        "prmt.b32 c, u, 0x4B000000, 0x7542; prmt.b32 d, u, 0x4B000000, 0x7543;"
        "mov.b32 f0, a; mov.b32 f1, b; mov.b32 f2, c; mov.b32 f3, d;"
        "add.f32 f0, f0, 0fCB000080; add.f32 f1, f1, 0fCB000080; add.f32 f2, f2, 0fCB000080; add.f32 f3, f3, 0fCB000080;",
    ),
    "float8_e4m3fn": (
        4,
        ".reg .b16 l, h, a, b, c, d; .reg .b32 x, y; mov.b32 {l, h}, $4;"
        "cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h; mov.b32 {a, b}, x; mov.b32 {c, d}, y;"
        "cvt.f32.f16 f0, a; cvt.f32.f16 f1, b; cvt.f32.f16 f2, c; cvt.f32.f16 f3, d;",
    ),
    "bfloat16": (2, ".reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xFFFF0000; mov.b32 f0, a; mov.b32 f1, b;"),
}


@dataclasses.dataclass(frozen=True)
class Portions:
    """How a product is divided: `blocks` of 64 columns and one of `parts` of the rows a program, of `warps` warps that read `ahead` tiles
    of `tile` rows before they use any."""

    blocks: int
    tile: int
    ahead: int
    warps: int
    parts: int

    @property
    def columns(self) -> int:
        """Returns the columns of a program."""
        return self.blocks * BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight as it is stored: codes [K, N] of any dtype, and their scales [K, N / 64], or None where all are 1. `transposed`: these
    transposed, for kernels that read them so (`one_token_mosaic`)."""

    codes: jax.Array
    scales: jax.Array | None = None
    unit: float = dataclasses.field(default=1.0, metadata={"static": True})
    transposed: jax.Array | None = None

    @property
    def kind(self) -> str:
        """Returns the dtype's name."""
        return self.codes.dtype.name

    def wide(self) -> jax.Array:
        """Returns the weight: float32[K, N]."""
        wide = self.codes.astype(jnp.float32)
        return wide if self.scales is None else wide * jnp.repeat(self.scales.astype(jnp.float32), BLOCK, axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm that a product applies to its input: its scale [K], and what is added to the mean square."""

    scale: jax.Array
    eps: float = dataclasses.field(metadata={"static": True})


def form(
    inputs: int,
    columns: Sequence[int],
    itemsize: int,
    *,
    width: int | None = None,
    ahead: int = 2,
    warps: int = 4,
    programs: int = 1056,
) -> Portions:
    """Returns how products of weights of these columns are divided. The defaults are near the fastest of each product on an
    H100 and an H200 (docs/benchmarks/raw/token_1xh100.txt, token_1xh200.txt).

    Args:
      inputs: K.
      columns: of each weight.
      itemsize: bytes of a code.
      width: the columns of a program, if they divide; None for 256 of many columns and 128 of few.
      ahead: the most tiles that are read before one is used.
      warps: of a program.
      programs: the most.
    """
    if width is None:
        width = 256 if min(columns) >= MANY else 128
    while width > BLOCK and any(n % width for n in columns):
        width //= 2
    blocks = width // BLOCK
    in_row = blocks * BLOCK * itemsize // READ  # threads
    while warps > 1 and (warps * 32 % in_row or inputs % (warps * 32 // in_row)):
        warps //= 2
    tile = max(1, warps * 32 // in_row)
    tiles, groups = inputs // tile, sum(columns) // width
    while ahead > 1 and tiles % ahead:
        ahead //= 2
    parts = 1
    while parts < PARTS and groups * parts * 2 <= programs and tiles % (2 * parts * ahead) == 0:
        parts *= 2
    return Portions(blocks, tile, ahead, warps, parts)


def form_of_add(weight: Weight) -> Portions:
    """Returns how the product of a weight of few columns, which writes the residual, is divided: among fewer programs of more warps."""
    (inputs, columns), itemsize = weight.codes.shape, weight.codes.dtype.itemsize
    return form(inputs, [columns], itemsize, ahead=4, warps=8, programs=264)


def counters() -> jax.Array:
    """Returns counters that count no one: int32[COUNTERS]. Each kernel leaves them so, and returns them, since the next one needs them."""
    return jnp.zeros(COUNTERS, jnp.int32)


def squares_of(x_D: jax.Array, count: int) -> jax.Array:
    """Returns sums of the squares of equal parts: float32[count]."""
    return jnp.sum(jnp.square(x_D.astype(jnp.float32)).reshape(count, -1), axis=1)


def plus(x: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns x + delta, of x's dtype, to which delta is rounded before."""
    new = delta.astype(x.dtype)
    return (x.astype(jnp.float32) + new.astype(jnp.float32)).astype(x.dtype)


def whole(
    x_D: jax.Array, *, squares: jax.Array | None = None, delta: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns x + delta and the sums of squares of its parts; see `multiply`."""
    x_D = x_D if delta is None else plus(x_D, delta)
    return x_D, squares_of(x_D, x_D.shape[0] // BLOCK) if squares is None else squares


def normed(x_K: jax.Array, squares: jax.Array, norm: Norm) -> jax.Array:
    """Returns scale x / rms(x), rounded as `layers.rms_norm` does."""
    inverse = jax.lax.rsqrt(jnp.sum(squares) / x_K.shape[0] + norm.eps)
    return (x_K.astype(jnp.float32) * inverse).astype(x_K.dtype) * norm.scale


def multiply(
    x_K: jax.Array,
    weights: Sequence[Weight],
    *,
    norm: Norm | None = None,
    squares: jax.Array | None = None,
    delta: jax.Array | None = None,
    counts: jax.Array,
    implementation: str,
    how: Portions | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns x [W, ...], float32[sum of N], and the counters.

    Args:
      x_K: one row.
      weights: W, ..., of one kind.
      norm: of x + delta; None: x is multiplied as it is.
      squares: float32, sums of squares of x's parts, which the norm reads; None: each program adds up those of x + delta.
      delta: float32[K], added to x before its norm as `plus` does; None: nothing.
      counts: `counters()`, or those that the last kernel returned.
      implementation: "pallas", "interpret" or "jnp".
      how: the product is divided; None for `form`'s default.
    """

    def ref() -> jax.Array:
        given = x_K if norm is None else normed(*whole(x_K, squares=squares, delta=delta), norm)
        return jnp.concatenate([w.unit * (given.astype(jnp.float32) @ w.wide()) for w in weights])

    if implementation == "jnp":
        return ref(), counts

    def end(group: Any, columns: Any, sums: Callable, outs: Any) -> None:
        pltriton.store(outs[0].at[columns], sums(columns))

    total = sum(w.codes.shape[1] for w in weights)
    outs, _, counts = _run(
        x_K,
        weights,
        norm,
        squares,
        counts,
        end,
        [jax.ShapeDtypeStruct((total,), jnp.float32)],
        implementation,
        delta=delta,
        how=how,
    )
    return outs[0], counts


def add(
    x_D: jax.Array,
    y_K: jax.Array,
    weight: Weight,
    *,
    counts: jax.Array,
    implementation: str,
    how: Portions | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x + W y, of x's dtype, the sums of squares of its parts, and the counters."""
    dtype = x_D.dtype
    how = form_of_add(weight) if how is None else how
    groups = x_D.shape[0] // how.columns
    if implementation == "jnp":
        x_D = x_D + (weight.unit * (y_K.astype(jnp.float32) @ weight.wide())).astype(dtype)
        return x_D, squares_of(x_D, groups), counts

    def end(group: Any, columns: Any, sums: Callable, outs: Any, before: Any) -> None:
        x = plus(pltriton.load(before.at[columns]), sums(columns))
        pltriton.store(outs[0].at[columns], x)
        wide = x.astype(jnp.float32)
        pltriton.store(outs[1].at[group], jnp.sum(wide * wide))

    outs = [jax.ShapeDtypeStruct(x_D.shape, dtype), jax.ShapeDtypeStruct((groups,), jnp.float32)]
    (x_D, squares), _, counts = _run(
        y_K, [weight], None, None, counts, end, outs, implementation, beside=[x_D], how=how
    )
    return x_D, squares, counts


def gate(
    x_D: jax.Array,
    weights: Sequence[Weight],
    *,
    norm: Norm,
    squares: jax.Array | None = None,
    delta: jax.Array | None = None,
    counts: jax.Array,
    implementation: str,
    how: Portions | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x + delta, of it silu(W norm(x)) * V norm(x), of x's dtype, and the counters.

    Args:
      weights: W and V.
      x_D, norm, squares, delta, counts, implementation, how: see `multiply`.
    """
    dtype, size = x_D.dtype, weights[0].codes.shape[1]

    def both(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = (half.astype(dtype).astype(jnp.float32) for half in (gate, up))
        return (gate / (1 + jnp.exp(-gate)) * up).astype(dtype)

    if implementation == "jnp":
        x_D, squares = whole(x_D, squares=squares, delta=delta)
        sums, counts = multiply(x_D, weights, norm=norm, squares=squares, counts=counts, implementation=implementation)
        return x_D, both(sums[:size], sums[size:]), counts

    def end(group: Any, columns: Any, sums: Callable, outs: Any) -> None:
        pltriton.store(outs[0].at[columns], both(sums(columns), sums(columns + size)))

    outs, x_D, counts = _run(
        x_D,
        weights,
        norm,
        squares,
        counts,
        end,
        [jax.ShapeDtypeStruct((size,), dtype)],
        implementation,
        delta=delta,
        is_joined=True,
        how=how,
    )
    return x_D, outs[0], counts


def project(
    x_D: jax.Array,
    weights: Sequence[Weight],
    keys: tuple[jax.Array, jax.Array],
    turn: jax.Array,
    slot: jax.Array,
    *,
    norm: Norm,
    squares: jax.Array | None = None,
    delta: jax.Array | None = None,
    counts: jax.Array,
    implementation: str,
    how: Portions | None = None,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
    """Returns x + delta, the token's turned queries [H C], the cache with its turned keys and its values, and the counters.

    Args:
      weights: of queries, keys and values.
      keys: the cache, keys and values [S, J, C].
      turn: float32[C], the cosines and then the sines of the token's angles.
      slot: int32[1], of the token; one beyond the last drops it.
      x_D, norm, squares, delta, counts, implementation, how: see `multiply`.
    """
    dtype, (slots, _, dims) = x_D.dtype, keys[0].shape
    sizes = [w.codes.shape[1] for w in weights]
    half = dims // 2
    if implementation == "jnp":
        x_D, squares = whole(x_D, squares=squares, delta=delta)
        found, counts = multiply(x_D, weights, norm=norm, squares=squares, counts=counts, implementation=implementation)
        q, k, v = jnp.split(found.astype(dtype), [sizes[0], sizes[0] + sizes[1]])

        def turned(flat: jax.Array) -> jax.Array:
            first, second = jnp.split(flat.reshape(-1, dims).astype(jnp.float32), 2, axis=1)
            cos, sin = turn[:half], turn[half:]
            return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1).astype(dtype)

        after = tuple(
            old.at[slot].set(new.astype(old.dtype)[None], mode="drop")
            for old, new in zip(keys, (turned(k), v.reshape(-1, dims)))
        )
        return x_D, turned(q).reshape(-1), (after[0], after[1]), counts
    if how is None:
        how = form(x_D.shape[0], sizes, weights[0].codes.dtype.itemsize, width=dims)
    assert how.columns == dims, f"a program has the {dims} columns of a head, not {how.columns}"
    heads, kv_heads = (size // dims for size in sizes[:2])

    def end(group: Any, columns: Any, sums: Callable, outs: Any, turn_ref: jax.Ref, slot_ref: jax.Ref) -> None:
        q_ref, k_ref, v_ref = outs
        at_F = jnp.arange(half)
        first, second = (sums(group * dims + part * half + at_F).astype(dtype).astype(jnp.float32) for part in range(2))
        cos, sin = (pltriton.load(turn_ref.at[part * half + at_F]) for part in range(2))
        turned = first * cos - second * sin, second * cos + first * sin
        slot = slot_ref[0]
        is_kept = (slot < slots) & (at_F >= 0)

        def queries() -> None:
            for part in range(2):
                pltriton.store(q_ref.at[group * dims + part * half + at_F], turned[part].astype(dtype))

        def key() -> None:
            at = (jnp.minimum(slot, slots - 1) * kv_heads + group - heads) * dims + at_F
            for part in range(2):
                pltriton.store(k_ref.at[at + part * half], turned[part].astype(keys[0].dtype), mask=is_kept)

        def value() -> None:
            at = (jnp.minimum(slot, slots - 1) * kv_heads + group - heads - kv_heads) * dims + at_F
            for part, own in enumerate((first, second)):
                pltriton.store(v_ref.at[at + part * half], own.astype(keys[1].dtype), mask=is_kept)

        jax.lax.cond(group < heads, queries, lambda: jax.lax.cond(group < heads + kv_heads, key, value))

    outs = [jax.ShapeDtypeStruct((sizes[0],), dtype), *(jax.ShapeDtypeStruct((old.size,), old.dtype) for old in keys)]
    (q, new_k, new_v), x_D, counts = _run(
        x_D,
        weights,
        norm,
        squares,
        counts,
        end,
        outs,
        implementation,
        delta=delta,
        beside=[turn, slot],
        over=[old.reshape(-1) for old in keys],
        how=how,
        reads_back=True,
    )
    return x_D, q, (new_k.reshape(keys[0].shape), new_v.reshape(keys[1].shape)), counts


def _run(
    x_K: jax.Array,
    weights: Sequence[Weight],
    norm: Norm | None,
    squares: jax.Array | None,
    counts: jax.Array,
    end: Callable[..., None],
    outs: list[jax.ShapeDtypeStruct],
    implementation: str,
    *,
    delta: jax.Array | None = None,
    beside: Sequence[jax.Array] = (),
    over: Sequence[jax.Array] = (),
    is_joined: bool = False,
    how: Portions | None = None,
    reads_back: bool = False,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Runs a kernel, and returns its outputs, x + delta and the counters.

    Args:
      x_K, weights, norm, squares, delta, counts, implementation, how: see `multiply`.
      end: f(group, its columns, sums, output refs, *refs of `beside`), run by the last program of a group. sums(columns) returns those of
        the products, float32 of the columns' shape.
      outs: the outputs.
      beside: arrays that `end` reads.
      over: arrays that the last outputs overwrite.
      is_joined: whether equal columns of all weights are one group.
      reads_back: whether `end` reads sums of other columns than its group's in its order, so that they go through memory.
    """
    inputs, kind = x_K.shape[0], weights[0].kind
    sizes = [w.codes.shape[1] for w in weights]
    how = form(inputs, sizes, weights[0].codes.dtype.itemsize) if how is None else how
    total, starts = sum(sizes), [sum(sizes[:n]) // how.columns for n in range(len(sizes))]
    assert all(n % how.columns == 0 for n in sizes) and inputs % (how.tile * how.ahead * how.parts) == 0, (how, sizes)
    groups, arrivals = total // how.columns, how.parts * (len(sizes) if is_joined else 1)
    by_memory = arrivals > 1 or reads_back
    assert not by_memory or groups <= COUNTERS, groups
    is_scaled = weights[0].scales is not None
    interpret = implementation == "interpret"
    if kind == "float8_e4m3fn" and not interpret:
        codes = [jax.lax.bitcast_convert_type(w.codes, jnp.int8) for w in weights]
    else:
        codes = [w.codes for w in weights]
    given = [x_K, *codes, *(w.scales for w in weights if w.scales is not None)]
    assert norm is not None or (squares is None and delta is None), "only a norm reads squares and a delta"
    assert squares is None or delta is None, "squares are of x alone, not of x + delta"
    named = {"scale": None if norm is None else norm.scale, "squares": squares, "delta": delta}
    of_norm = {name: array for name, array in named.items() if array is not None}
    given += of_norm.values()
    count = len(given)
    given += [*beside, counts, *over]
    shapes = [*outs, jax.ShapeDtypeStruct(counts.shape, counts.dtype)]
    shapes += [] if delta is None else [jax.ShapeDtypeStruct(x_K.shape, x_K.dtype)]
    shapes += [jax.ShapeDtypeStruct((how.parts * total,), jnp.float32)] if by_memory else []
    first = len(given) - len(over)
    aliases = {first - 1: len(outs)} | {first + n: len(outs) - len(over) + n for n in range(len(over))}

    def kernel(*refs: Any) -> None:
        own, after = refs[: len(given)], refs[len(given) :]
        x_ref, codes_refs, rest = own[0], own[1 : 1 + len(weights)], own[1 + len(weights) : count]
        scales_refs = rest[: len(weights)] if is_scaled else [None] * len(weights)
        norm_refs = dict(zip(of_norm, rest[len(rest) - len(of_norm) :]))
        beside_refs = own[count : count + len(beside)]
        out_refs, counts_ref = after[: len(outs)], after[len(outs)]
        group, part = pl.program_id(0), pl.program_id(1)
        whole_ref = None if delta is None else after[len(outs) + 1]
        eps = 0.0 if norm is None else norm.eps
        reader = functools.partial(_reader, x_ref, norm_refs, whole_ref, (group == 0) & (part == 0), eps)

        def of(number: int) -> jax.Array:
            """Returns the program's sums of one weight, float32[blocks, 64]."""
            return _sums(
                codes_refs[number],
                scales_refs[number],
                reader,
                (kind, inputs, sizes[number], weights[number].unit),
                how,
                (group - starts[number], part),
                interpret,
            )

        def chosen(number: int) -> jax.Array:
            if number + 1 == len(weights):
                return of(number)
            return jax.lax.cond(group < starts[number + 1], lambda: of(number), lambda: chosen(number + 1))

        sums_TC = jnp.sum(chosen(0).reshape(how.tile, how.blocks, BLOCK), axis=0)
        columns_C = jnp.arange(how.columns)
        at = (jnp.arange(how.blocks) * BLOCK)[:, None] + jnp.arange(BLOCK)[None, :]
        if not by_memory:
            end(group, group * how.columns + at, lambda columns: sums_TC, out_refs, *beside_refs)
            return
        parts_ref = after[-1]
        pltriton.store(parts_ref.at[part * total + group * how.columns + at], sums_TC)
        joined = group % (groups // len(sizes)) if is_joined else group
        arrived = cached_attention.arrived(counts_ref, joined, interpret)

        def sums(columns: jax.Array) -> jax.Array:
            load = functools.partial(pltriton.load, volatile=True)  # not from this multiprocessor's own cache
            parts = [load(parts_ref.at[part * total + columns]) for part in range(how.parts)]
            return functools.reduce(jnp.add, parts)

        @pl.when(arrived == arrivals - 1)
        def _finish() -> None:
            counts_ref[joined] = 0
            end(joined, joined * how.columns + columns_C, sums, out_refs, *beside_refs)

    found: Sequence[jax.Array] = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(groups, how.parts),
        input_output_aliases=aliases,
        compiler_params=pltriton.CompilerParams(num_warps=how.warps, num_stages=1),
        interpret=interpret,
        name="one_token_product",
    )(*(array.reshape(-1) for array in given))
    return list(found[: len(outs)]), x_K if delta is None else found[len(outs) + 1], found[len(outs)]


def _reader(
    x_ref: jax.Ref, norm_refs: Mapping[str, jax.Ref], whole_ref: jax.Ref | None, is_first: jax.Array, eps: float
) -> Callable[[jax.Array], jax.Array]:
    """Returns f(rows) -> x there, float32, normed if there is a norm. If there is a delta, the first program writes x + delta to
    `whole_ref`, and not over x, which others still read."""
    if not norm_refs:
        return lambda rows: pltriton.load(x_ref.at[rows]).astype(jnp.float32)
    inputs, dtype = x_ref.shape[0], x_ref.dtype

    def whole_at(rows: jax.Array) -> jax.Array:
        x = pltriton.load(x_ref.at[rows])
        return x if whole_ref is None else plus(x, pltriton.load(norm_refs["delta"].at[rows]))

    def stored_squares() -> jax.Array:
        size = norm_refs["squares"].shape[0]
        at = jnp.arange(pl.next_power_of_2(size))
        return pltriton.load(norm_refs["squares"].at[at], mask=at < size, other=0.0)

    def own_squares(begin: int, count: int) -> jax.Array:
        at = begin + jnp.arange(count)
        x = whole_at(at)
        if whole_ref is not None:
            pltriton.store(whole_ref.at[at], x, mask=is_first & (at >= 0))
        wide = x.astype(jnp.float32)
        return wide * wide

    if "squares" in norm_refs:
        squares = stored_squares()
    else:
        count = math.gcd(inputs, SQUARED)
        squares = functools.reduce(jnp.add, [own_squares(begin, count) for begin in range(0, inputs, count)])
    inverse = jax.lax.rsqrt(jnp.sum(squares) / inputs + eps)

    def read(rows: jax.Array) -> jax.Array:
        x = (whole_at(rows).astype(jnp.float32) * inverse).astype(dtype).astype(jnp.float32)
        return (x * pltriton.load(norm_refs["scale"].at[rows]).astype(jnp.float32)).astype(dtype).astype(jnp.float32)

    return read


def _sums(
    codes_ref: Any,
    scales_ref: Any,
    reader: Callable[[], Callable[[jax.Array], jax.Array]],
    weight: tuple[str, int, int, float],
    how: Portions,
    where: tuple[Any, Any],
    interpret: bool,
) -> jax.Array:
    """Returns the sums of a program over its tiles, float32[tile blocks, 64]: each row of the result is of every `tile`th row of the weight
    in one block of columns."""
    kind, inputs, outputs, unit = weight
    group, part = where
    count = inputs // (how.tile * how.ahead * how.parts)
    row_R = jnp.arange(how.tile * how.blocks)
    tile_R, block_R, at_C = row_R // how.blocks, row_R % how.blocks, jnp.arange(BLOCK)

    def rows(number: jax.Array | int) -> list[jax.Array]:
        begin = (part * count + number) * how.ahead
        return [(begin + ahead) * how.tile + tile_R for ahead in range(how.ahead)]

    def codes(number: jax.Array | int) -> list[jax.Array]:
        at = [k_R * outputs + (group * how.blocks + block_R) * BLOCK for k_R in rows(number)]
        return [pltriton.load(codes_ref.at[at_R[:, None] + at_C[None, :]]) for at_R in at]

    def factors(number: jax.Array | int) -> list[tuple[jax.Array, ...]]:
        found: list[tuple[jax.Array, ...]] = []
        for k_R in rows(number):
            x_R = read_x(k_R)
            if scales_ref is None:
                found.append((x_R,))
            else:
                at_R = k_R * (outputs // BLOCK) + group * how.blocks + block_R
                found.append((x_R, pltriton.load(scales_ref.at[at_R])))
        return found

    def use(sums_RC: jax.Array, codes: list[jax.Array], factors: list[tuple[jax.Array, ...]]) -> jax.Array:
        for codes_RC, (factor_R, *scales) in zip(codes, factors):
            if scales:
                factor_R = factor_R * scales[0].astype(jnp.float32)
            sums_RC = _fused(kind, codes_RC, factor_R[:, None], sums_RC, interpret)
        return sums_RC

    def step(number: jax.Array | int, carry: tuple) -> tuple:
        later = codes(number + 1), factors(number + 1)
        return use(*carry), *later

    first = codes(0)  # on its way while the norm is made
    read_x = reader()
    start = jnp.zeros((row_R.shape[0], BLOCK), jnp.float32), first, factors(0)
    return unit * use(*jax.lax.fori_loop(0, count - 1, step, start))


def _fused(kind: str, codes: jax.Array, factor: jax.Array, sums: jax.Array, interpret: bool) -> jax.Array:
    """Returns sums + factor codes, float32."""
    factor = jnp.broadcast_to(factor, sums.shape)
    if interpret or kind not in _CONVERSIONS:
        return sums + factor * codes.astype(jnp.float32)
    pack, convert = _CONVERSIONS[kind]
    adds = "".join(f"fma.rn.f32 ${n}, f{n}, ${pack + 1 + n}, ${2 * pack + 1 + n};" for n in range(pack))
    [found] = pltriton.elementwise_inline_asm(
        "{ .reg .f32 f0, f1, f2, f3;" + convert + adds + " }",
        args=[codes, factor, sums],
        constraints=",".join(["=f"] * pack + ["r"] + ["f"] * (2 * pack)),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(sums.shape, sums.dtype)],
    )
    return found
