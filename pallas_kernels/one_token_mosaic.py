"""The products of a token in int8 for Hopper GPUs. This module runs several of them in one launch, in Mosaic and PTX.

A product is what `one_token` computes in one kernel: matmuls of one row with weights, and what comes before and after them (`Product`).

Between two kernels the memory is idle: the first adds up its sums and ends, and the second starts and waits for its first weights. Here one
block of threads stays on each processor (SM) for all products of the launch. One of its three warpgroups copies their weights into a ring
in shared memory, and never waits for a sum. The other two multiply. A product reads what all blocks wrote in the one before it, so the two
wait at a counter before they begin it. Meanwhile the next weights arrive.

A piece of work (`works`) is `WIDE` columns (a strip) times a part of the rows, and a block has every `processors`-th one. After "add" the
next norm adds up the parts. After "gate" and "project" the last block to arrive adds up those of its strip, always in their order, so
results do not depend on which block is last.

How a warp multiplies integers is in `one_token_ptx`.

Shapes: K contracted, N columns, D embed, F of the gated layer, H query heads, J key and value heads, C dims of a head, S slots, P parts.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import one_token, one_token_ptx
from pallas_kernels.one_token_ptx import ROWS, THREADS, WIDE, ProductShape

STAGES = 4  # copies in the ring
# Copies in flight at once, enough to keep the memory busy. Behind more of them a block's reads of other blocks' sums would wait longer.
WINDOW = 2
MOST_PARTS = 4  # of the rows; every block that norms the sum of the parts reads all of them
MOST_NORMED = 8192  # elements of x; a thread holds its share of them and of the parts in registers
SHARED = 56 * 1024  # the most bytes of x in shared memory, beside the ring and the sums

_BARRIERS = 16  # the first counters: two for each product. Those of strips follow


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Product:
    """One of the products of a launch.

    Attributes:
      kind: "add": W y, which the next norm adds to x; y is given, or is the result of "gate". "gate": silu(W norm(x)) * V norm(x).
        "project": queries, keys and values of norm(x).
      weights: int8 codes [K, N] with transposed scales (`Weight.transposed`): one weight to "add", W and V to "gate", three to "project".
      norm: of x; None for "add".
    """

    kind: str = dataclasses.field(metadata={"static": True})
    weights: tuple[one_token.Weight, ...]
    norm: one_token.Norm | None = None


Place = tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]  # of the token; see `run`


class AfterProducts(NamedTuple):
    """What the products of a launch return.

    Attributes:
      x_D: bfloat16, the residual, without `sums_PD`.
      sums_PD: float32, what a last "add" still has to add to x, in parts of the rows; None if the last product is none.
      q: bfloat16[H * C], the rotated queries; None without "project".
      keys: keys and values [S, J, C] with the token's; None without "project".
      counts: the counters, all 0 again.
    """

    x_D: jax.Array
    sums_PD: jax.Array | None
    q: jax.Array | None
    keys: tuple[jax.Array, jax.Array] | None
    counts: jax.Array


def takes(embed: int, mlp: int, heads: int, kv_heads: int, dims: int) -> bool:
    """Returns whether `run` computes the products of a layer with these sizes: D, F, H, J and C."""
    q, kv = heads * dims, kv_heads * dims
    return (
        all(size % ROWS == 0 for size in (embed, mlp, q))
        and embed <= MOST_NORMED
        and kv % WIDE == 0
        and dims in (64, 128)
        and all(2 * size <= SHARED for size in (embed, q, mlp))
        and _BARRIERS + (mlp + q + 2 * kv) // WIDE <= one_token.COUNTERS
    )


def run(
    products: Sequence[Product],
    x_D: jax.Array,
    counts: jax.Array,
    *,
    y_K: jax.Array | None = None,
    place: Place | None = None,
    processors: int,
    implementation: str = "pallas",
) -> AfterProducts:
    """Returns what products give that run one after the other, in one launch.

    Args:
      products: in their order. "add" multiplies the result of the last "gate" before it, or y_K if there is none. "gate" and "project"
        read x plus the result of the "add" before them, if there is one. Two "add" do not follow each other.
      x_D: bfloat16, the residual.
      counts: `one_token.counters()`, or those that the last kernel returned.
      y_K: bfloat16, what an "add" before any "gate" multiplies.
      place: what "project" needs: the cache, bfloat16 keys and values [S, J, C]; float32[C], the cosines and then the sines of the token's
        angles; and int32[1], its slot. A slot of S or more drops the token.
      processors: the number of the GPU's processors (SMs). One block runs on each.
      implementation: "pallas" or "jnp".

    Raises:
      AssertionError: no processors, 9 products or more, other dtypes, or weights without transposed scales.
    """
    if implementation == "jnp":
        return _twin(products, x_D, counts, y_K, place)
    assert processors and 2 * len(products) <= _BARRIERS, (processors, len(products))
    assert all(array.dtype == jnp.bfloat16 for array in (x_D, *(place[0] if place else ()))), (
        "x and the cache are bfloat16"
    )
    return _launch(products, x_D, counts, y_K, place, processors=processors)


def _twin(
    products: Sequence[Product], x_D: jax.Array, counts: jax.Array, y_K: jax.Array | None, place: Place | None
) -> AfterProducts:
    sums_PD, q, keys = None, None, None
    how: dict[str, Any] = {"counts": counts, "implementation": "jnp"}
    for product in products:
        if product.kind == "add":
            assert y_K is not None and sums_PD is None
            sums_PD = one_token.multiply(y_K, product.weights, **how)[0][None]
            continue
        delta = None if sums_PD is None else jnp.sum(sums_PD, axis=0)
        how_normed = {"norm": product.norm, "delta": delta, **how}
        if product.kind == "gate":
            x_D, y_K, _ = one_token.gate(x_D, product.weights, **how_normed)
        else:
            assert place is not None
            x_D, q, keys, _ = one_token.project(x_D, product.weights, *place, **how_normed)
        sums_PD = None
    return AfterProducts(x_D, sums_PD, q, keys, counts)


def _shape(product: Product, processors: int) -> ProductShape:
    sizes = [w.codes.shape[1] for w in product.weights]
    inputs = product.weights[0].codes.shape[0]
    columns, weights = (sizes[0], 2) if product.kind == "gate" else (sum(sizes), 1)
    parts = 1
    while parts < MOST_PARTS and columns // WIDE * parts * 2 <= processors and inputs % (ROWS * parts * 2) == 0:
        parts *= 2
    return ProductShape(inputs, columns, weights, parts)


# As a program of its own it is traced and compiled once, however many layers call it.
@functools.partial(jax.jit, static_argnames="processors")
def _launch(
    products: Sequence[Product],
    x_D: jax.Array,
    counts: jax.Array,
    y_K: jax.Array | None,
    place: Place | None,
    *,
    processors: int,
) -> AfterProducts:
    """Runs the kernel; see `run`."""
    shapes = [_shape(product, processors) for product in products]
    embed = x_D.shape[0]
    given: dict[Any, jax.Array] = {"x": x_D}
    if y_K is not None:
        given["y"] = y_K
    outs: dict[Any, jax.ShapeDtypeStruct] = {}
    pending = None  # the parts of what is still to be added to x
    for n, (product, shape) in enumerate(zip(products, shapes)):
        for m, weight in enumerate(product.weights):
            assert weight.transposed is not None and weight.kind == "int8", (
                "these products read int8 and transposed scales"
            )
            given |= {("codes", n, m): weight.codes, ("scales", n, m): weight.transposed}
        if product.kind == "add":
            assert pending is None, "what is added is summed with x by a norm before more is added"
            outs[("sums", n)] = jax.ShapeDtypeStruct((shape.parts, embed), jnp.float32)
            pending = shape.parts
            continue
        assert product.norm is not None
        given[("norm", n)] = product.norm.scale
        if pending is not None:
            outs[("x", n)] = jax.ShapeDtypeStruct((embed,), x_D.dtype)
        pending = None
        if shape.parts > 1:
            outs[("parts", n)] = jax.ShapeDtypeStruct((shape.weights, shape.parts, shape.columns), jnp.float32)
        if product.kind == "gate":
            outs[("h", n)] = jax.ShapeDtypeStruct((shape.columns,), x_D.dtype)
        else:
            outs[("q", n)] = jax.ShapeDtypeStruct((product.weights[0].codes.shape[1],), x_D.dtype)
    changed = {"counts": counts}
    if any(product.kind == "project" for product in products):
        assert place is not None
        (k, v), given["turn"], given["slot"] = place
        changed |= {"k": k, "v": v}

    def body(*refs: Any) -> None:
        names = [*given, *changed, *outs]
        _body(products, shapes, dict(zip(names, refs, strict=True)), processors)

    # Not `plgpu.kernel`: before JAX 0.11 it cannot write to references that it is given, as `counts` and the cache are.
    kernel = pl.kernel(
        body,
        out_type=[*outs.values()],
        mesh=plgpu.Mesh(
            grid=(processors,),
            grid_names=("block",),
            num_threads=THREADS // 128 + 1,
            thread_name="warpgroup",
            kernel_name="one_token_products",
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        name="one_token_products",
    )
    held = {name: jax.new_ref(array) for name, array in changed.items()}
    found = dict(zip(outs, kernel(*given.values(), *held.values()), strict=True))
    after = {name: jax.freeze(ref) for name, ref in held.items()}
    residuals = [found[name] for name in found if name[0] == "x"]
    left = found[("sums", len(products) - 1)] if products[-1].kind == "add" else None
    q = next((found[name] for name in found if name[0] == "q"), None)
    keys = (after["k"], after["v"]) if "k" in after else None
    return AfterProducts(residuals[-1] if residuals else x_D, left, q, keys, after["counts"])


def _body(products: Sequence[Product], shapes: Sequence[ProductShape], refs: dict[Any, Any], processors: int) -> None:
    """The kernel. `refs` are its arrays by name, as `_launch` names them."""

    def scope(ring: Any, scales: Any, x_s: Any, sums: Any, full: Any, free: Any) -> None:
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")

        def mine(shape: ProductShape) -> jax.Array:
            """Returns how many pieces of a product's work are this block's."""
            return lax.div(shape.works - block + (processors - 1), processors)

        def find(shape: ProductShape, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Returns the numbers of the strip and of the part of the rows, of this block's i-th piece of work."""
            work = block + i * processors
            return lax.div(work, shape.parts), lax.rem(work, shape.parts)

        def copy() -> None:
            """The warpgroup that copies: codes and scales of all pieces of work, in the order in which they are multiplied."""
            copied = jnp.int32(0)
            for n, shape in enumerate(shapes):

                def work(i: jax.Array, copied: jax.Array, n: int = n, shape: ProductShape = shape) -> jax.Array:
                    strip, part = find(shape, i)
                    # The columns of q, k and v follow each other, and a strip is of one of them. Of gate and up it has the same columns.
                    ends = np.cumsum([w.codes.shape[1] // WIDE for w in products[n].weights])
                    for second in range(shape.weights):

                        def step(k: jax.Array, copied: jax.Array, second: int = second) -> jax.Array:
                            slot, row = lax.rem(copied, STAGES), part * shape.rows + k * ROWS
                            pl.when(copied >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
                            # The copy `WINDOW` before this one: it has to have arrived before another one leaves.
                            arrives = lax.rem(copied + (STAGES - WINDOW), STAGES)
                            pl.when(copied >= WINDOW)(lambda: plgpu.barrier_wait(full.at[arrives]))

                            def one(m: int, strip: jax.Array) -> None:
                                codes_ref, scales_ref = refs[("codes", n, m)], refs[("scales", n, m)]
                                rows, at = pl.ds(row, ROWS), full.at[slot]
                                plgpu.copy_gmem_to_smem(
                                    codes_ref.at[rows, pl.ds(strip * WIDE, WIDE)], ring.at[slot], at
                                )
                                plgpu.copy_gmem_to_smem(scales_ref.at[pl.ds(strip * 2, 2), rows], scales.at[slot], at)

                            if shape.weights > 1 or len(ends) == 1:
                                one(second, strip)
                            else:
                                for m, end in enumerate(ends):
                                    begin = 0 if m == 0 else ends[m - 1]
                                    pl.when((strip >= begin) & (strip < end))(functools.partial(one, m, strip - begin))
                            return copied + 1

                        copied = lax.fori_loop(0, shape.steps, step, copied)
                    return copied

                copied = lax.fori_loop(0, mine(shape), work, copied)

            def drain(i: jax.Array, _: None) -> None:
                plgpu.barrier_wait(free.at[lax.rem(i, STAGES)])

            lax.fori_loop(jnp.maximum(copied - STAGES, 0), copied, drain, None)

        def multiply() -> None:
            """The warpgroups that multiply, and write what follows from the sums."""
            used = jnp.int32(0)
            x_ref, added, gated = refs["x"], None, refs.get("y")
            groups = _BARRIERS
            for n, (product, shape) in enumerate(zip(products, shapes)):
                count, norm = mine(shape), product.norm

                @pl.when(count > 0)
                def _begin(
                    n: int = n, shape: ProductShape = shape, norm: Any = norm, x_ref: Any = x_ref, added: Any = added
                ) -> None:
                    if n:
                        arrivals, waiters = (min(s.works, processors) for s in shapes[n - 1 : n + 1])
                        one_token_ptx.wait(refs["counts"], n - 1, arrivals, waiters)
                    if norm is not None:
                        new = refs.get(("x", n))
                        one_token_ptx.read_normed(
                            x_ref, added, refs[("norm", n)], new, x_s, sums.at[0], block, norm.eps
                        )

                if norm is not None:
                    x_ref, added = refs.get(("x", n), x_ref), None

                def work(
                    i: jax.Array,
                    used: jax.Array,
                    n: int = n,
                    shape: ProductShape = shape,
                    norm: Any = norm,
                    gated: Any = gated,
                    groups: int = groups,
                ) -> jax.Array:
                    strip, part = find(shape, i)
                    first: Any = part * shape.rows
                    if norm is None:
                        one_token_ptx.read_plain(gated, first, shape.rows, x_s)
                        first = 0
                    for second in range(shape.weights):

                        def step(k: jax.Array, carry: tuple) -> tuple:
                            used, sums_C = carry
                            slot = lax.rem(used, STAGES)
                            plgpu.barrier_wait(full.at[slot])
                            x_R = x_s.at[pl.ds(first + k * ROWS, ROWS)]
                            sums_C = one_token_ptx.multiplied(ring.at[slot], scales.at[slot], x_R, sums_C)
                            plgpu.barrier_arrive(free.at[slot])
                            return used + 1, sums_C

                        used, sums_C = lax.fori_loop(0, shape.steps, step, (used, one_token_ptx.zeros()))
                        one_token_ptx.write_sums(sums_C, sums.at[second])
                    _finish(products[n], n, shape, refs, sums, strip, part, groups)
                    return used

                used = lax.fori_loop(0, count, work, used)
                gated = refs.get(("h", n), gated)
                added = refs.get(("sums", n), added)
                groups += shape.strips if product.kind != "add" and shape.parts > 1 else 0
                if n + 1 < len(products):
                    pl.when(count > 0)(functools.partial(one_token_ptx.arrive, refs["counts"], n))

        pl.when(warpgroup == THREADS // 128)(copy)
        pl.when(warpgroup < THREADS // 128)(multiply)

    most = max(shape.rows if product.norm is None else shape.inputs for product, shape in zip(products, shapes))
    pl.run_scoped(
        scope,
        plgpu.SMEM((STAGES, ROWS, WIDE), jnp.int8, transforms=one_token_ptx.IN_ROWS),
        plgpu.SMEM((STAGES, 2, ROWS), jnp.bfloat16),
        plgpu.SMEM((most,), jnp.bfloat16),
        plgpu.SMEM((2, one_token_ptx.WARPS * WIDE), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),  # codes and scales
        plgpu.Barrier(num_arrivals=THREADS // 128, num_barriers=STAGES),
        collective_axes="warpgroup",
    )


def _finish(
    product: Product, n: int, shape: ProductShape, refs: dict[Any, Any], sums: Any, strip: Any, part: Any, groups: int
) -> None:
    """Writes what follows from the sums of a piece of work. `groups`: the counter of the product's first strip."""
    if product.kind == "add":
        one_token_ptx.write_parts(sums, refs[("sums", n)], shape, product.weights[0].unit, strip, part)
        return
    more: list[Any] = []
    if shape.parts > 1:
        more = [refs[("parts", n)], refs["counts"]]
    if product.kind == "gate":
        one_token_ptx.write_gated(sums, refs[("h", n)], more, shape, product.weights[0].unit, strip, part, groups)
    else:
        outs = [refs[("q", n)], refs["k"], refs["v"], refs["turn"], refs["slot"]]
        q_columns, unit = product.weights[0].codes.shape[1], product.weights[0].unit
        one_token_ptx.write_projected(sums, outs, more, q_columns, shape, unit, refs["k"].shape, strip, part, groups)
