"""Computes a function of each token tile by tile. This module keeps what it makes inside from growing with the number of tokens.

A block's MLP makes several arrays of tokens x width in each pass. With a long text they take most of a device's memory. In tiles they
have a tile's size: the forward pass keeps the function's argument alone, and the backward pass computes each tile again before it
differentiates it,

    y[i] = f(w, x[i])        dx[i] = df/dx(w, x[i])^T dy[i]        dw = sum over tiles of df/dw(w, x[i])^T dy[i]

so only the sums over tokens differ from those of the function on all tokens: a tile's own gradient of a weight has the dtype that JAX
gives it, and tiles add up in float32.
"""

import contextvars
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax import precision, traces
from zerojax.errors import UserError
from zerojax.tree import PyTree

USUAL = 8192  # tokens of a tile: enough for matmuls at their full rate
MANY = 4 * USUAL  # tokens of a pass from which tiles pay
_DRAWS = frozenset("random_bits rng_bit_generator rng_uniform".split())
_tokens: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("tokens", default=None)


def over_tiles(function: Callable[[jax.Array], Any], x: jax.Array, tile: int) -> Any:
    """Returns `function(x)`, computed for about `tile` tokens at a time, forward and backward.

    No array inside is kept for the backward pass, whatever the policy of rematerialisation, and none has more than a tile's tokens.
    `function` may read weights from outside, also as a Flax module does; their gradients add up over tiles in float32.

    Args:
      function: float[..., tile, width] -> arrays [..., tile, any widths], each token on its own: an MLP with its norm and its residual.
      x: float[..., tokens, width].
      tile: tokens of a tile, the leading dims of `x` included; 0, or at least as many as there are: all at once. Tiles have equal
        sizes, so they may be smaller; the last one is filled up with copies of the last token.

    Raises:
      UserError: `tile` is no number of tokens, or `function` draws random numbers or returns another number of tokens.

    >>> y = over_tiles(lambda x: x + mlp(norm(x)), x, 8192)
    """
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 0:
        raise UserError(f"over_tiles: tile must be a number of tokens, or 0 for all at once, and is {tile!r}")
    tokens = math.prod(x.shape[:-1])
    if not 0 < tile < tokens or is_inside() or traces.is_read():
        return function(x)
    ways = mesh_lib.ways_of_rest()
    cut = _Cut.of(x.shape, tile, ways if x.ndim > 1 and x.shape[-2] % ways == 0 else 1)
    like = jax.ShapeDtypeStruct(cut.tile_shape, x.dtype)

    def of_tile(number: jax.Array, x: jax.Array) -> Any:
        with traces.held(_tokens, cut.tokens(number)):
            return function(x)

    closed, made = jax.make_jaxpr(of_tile, return_shape=True)(jax.ShapeDtypeStruct((), jnp.int32), like)
    _check(closed, made, like)
    results = _tiled(_Body(closed), tuple(traces.opened(closed)[1]), cut.tiles(x))
    return jax.tree.unflatten(jax.tree.structure(made), map(cut.joined, results))


def over_own_tiles(function: Callable[[jax.Array], Any], x: jax.Array, tile: int) -> Any:
    """Returns `over_tiles(function, x, tile)`, but all at once where the compiler shards activations, so that it gathers `x` once."""
    return over_tiles(function, x, 0 if mesh_lib.rest() else tile)


def is_inside() -> bool:
    """Returns whether the function of `over_tiles` is traced: nothing in it is kept, and it runs once for each tile."""
    return _tokens.get() is not None


def tokens() -> jax.Array | None:
    """Returns the numbers of a tile's tokens among all, uint32[tile], where the function of `over_tiles` is traced; None elsewhere."""
    return _tokens.get()


def _check(closed: jex.ClosedJaxpr, made: PyTree, like: jax.ShapeDtypeStruct) -> None:
    dims = like.ndim - 1
    if odd := [leaf for leaf in jax.tree.leaves(made) if leaf.ndim <= dims or leaf.shape[:dims] != like.shape[:dims]]:
        raise UserError(
            f"over_tiles: the function must treat each token on its own and return arrays of {like.shape[:-1]} and widths, and returns "
            f"{odd[0].dtype}{list(odd[0].shape)} for {like.dtype}{list(like.shape)}"
        )
    if any(eqn.primitive.name in _DRAWS for eqn in traces.equations(closed)):
        raise UserError(
            "over_tiles: the function draws random numbers, which would be the same in all tiles; draw them outside of it"
        )


class _Cut(NamedTuple):
    """How tokens are cut. Where the compiler shards tokens over devices, each tile has as many of each device."""

    shape: tuple[int, ...]  # of all tokens
    ways: int  # the devices that tokens are sharded over
    number: int  # of tiles
    size: int  # tokens of a tile on each device

    @classmethod
    def of(cls, shape: tuple[int, ...], tile: int, ways: int) -> "_Cut":
        own = math.prod(shape[:-1]) // ways
        number = -(-own // max(1, tile // ways))
        return cls(shape, ways, number, -(-own // number))

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Returns the shape of a tile."""
        return (*(1,) * (len(self.shape) - 2), self.ways * self.size, self.shape[-1])

    def tokens(self, number: jax.Array) -> jax.Array:
        """Returns the numbers of the tokens of a tile, in the order of all tokens: uint32[tokens of a tile]."""
        length = self.shape[-2] // self.ways if self.ways > 1 else math.prod(self.shape[:-1])
        own = number.astype(jnp.uint32) * self.size + jnp.arange(self.size, dtype=jnp.uint32)
        way = jnp.arange(self.ways, dtype=jnp.uint32)[:, None]
        return (own // length * (length * self.ways) + way * length + own % length).reshape(-1)

    def tiles(self, x: jax.Array) -> jax.Array:
        """Returns float[number, *tile_shape]."""
        width, tokens = x.shape[-1], math.prod(x.shape[:-1]) // self.ways
        if self.ways > 1:
            x = jnp.moveaxis(x.reshape(-1, self.ways, x.shape[-2] // self.ways, width), 1, 0)
        x = x.reshape(self.ways, tokens, width)
        if extra := self.number * self.size - tokens:
            x = jnp.pad(x, ((0, 0), (0, extra), (0, 0)), mode="edge")
        x = jnp.moveaxis(x.reshape(self.ways, self.number, self.size, width), 1, 0)
        return x.reshape(self.number, *self.tile_shape[:-1], width)

    def joined(self, y: jax.Array) -> jax.Array:
        """Returns [..., tokens, widths] from [number, *a tile's shape with other widths]."""
        widths, tokens = y.shape[len(self.shape) :], math.prod(self.shape[:-1]) // self.ways
        y = jnp.moveaxis(y.reshape(self.number, self.ways, self.size, *widths), 0, 1)
        y = y.reshape(self.ways, self.number * self.size, *widths)[:, :tokens]
        if self.ways > 1:
            y = jnp.moveaxis(y.reshape(self.ways, -1, self.shape[-2] // self.ways, *widths), 0, 1)
        return y.reshape(*self.shape[:-1], *widths)


class _Body:
    """The function of a tile as a trace; what it read from outside are arguments."""

    def __init__(self, closed: jex.ClosedJaxpr):
        self._closed = closed

    def __call__(self, consts: Mapping[int, Any], number: jax.Array, tile: jax.Array) -> list[jax.Array]:
        given = [consts[number] for number in range(len(consts))]
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(traces.opened(self._closed)[0], given))(number, tile)

    def over(self, step: Callable[..., tuple[Any, list]], carry: Any, tiles: jax.Array, inputs: Any) -> Any:
        """Returns the last carry and the results of `step(carry, number, tile, input) -> (carry, results)` for all tiles.

        One result takes the place of the tiles if it has their size.
        """
        likes = jax.eval_shape(
            lambda: step(carry, jnp.int32(0), *jax.tree.map(lambda leaf: leaf[0], (tiles, inputs)))[1]
        )
        count, form = len(tiles), (tiles[0].size, tiles.dtype)
        taken = next((number for number, like in enumerate(likes) if (like.size, like.dtype) == form), None)
        zeros = _zeros(tiles)
        places = [zeros((count, *like.shape), like.dtype) for like in likes]
        if taken is not None:
            places[taken] = tiles

        def one(carry: tuple[Any, list], numbered: tuple[jax.Array, Any, Any]) -> tuple[tuple, None]:
            own, places = carry
            number, tile, given = numbered
            own, results = step(own, number, tile if taken is None else places[taken][number], given)
            return (own, [_written(place, result, number) for place, result in zip(places, results)]), None

        (carry, places), _ = jax.lax.scan(
            one, (carry, places), (jnp.arange(count), tiles if taken is None else None, inputs)
        )
        return carry, [place.reshape(count, *like.shape) for place, like in zip(places, likes)]


def _zeros(after: jax.Array) -> Callable[[tuple[int, ...], Any], jax.Array]:
    """Returns f(shape, dtype) -> zeros that XLA cannot make before an array. It makes and holds those of all layers at once otherwise."""
    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), after.dtype), after))
    return lambda shape, dtype: jnp.broadcast_to(zero.astype(dtype), shape)


def _written(place: jax.Array, result: jax.Array, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(place, result.reshape(place.shape[1:]), number, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(body: _Body, consts: tuple[Any, ...], tiles: jax.Array) -> list[jax.Array]:
    known = dict(enumerate(consts))
    return body.over(lambda _, number, tile, __: (None, body(known, number, tile)), None, tiles, None)[1]


def _forward(body: _Body, consts: tuple[Any, ...], tiles: PyTree) -> tuple[list[jax.Array], Any]:
    """Its arguments say whether they are differentiated: the gradients of frozen weights are not computed."""
    known = {number: const.value for number, const in enumerate(consts)}
    is_trained = [const.perturbed and jnp.issubdtype(const.value.dtype, jnp.inexact) for const in consts]
    trained, frozen = ({n: w for n, w in known.items() if is_trained[n] == kind} for kind in (True, False))
    return _tiled(body, tuple(known.values()), tiles.value), (trained, frozen, tiles.value)


def _backward(body: _Body, residuals: tuple[dict, dict, jax.Array], grads: list[jax.Array]) -> tuple:
    trained, frozen, tiles = residuals

    def step(
        sums: dict, number: jax.Array, grad: jax.Array, rest: tuple[jax.Array, Any]
    ) -> tuple[dict, list[jax.Array]]:
        tile, others = rest
        _, pull = jax.vjp(lambda trained, tile: body({**trained, **frozen}, number, tile), trained, tile)
        of_weights, d_tile = pull([grad, *others])
        return {n: sums[n] + own.astype(sums[n].dtype) for n, own in of_weights.items()}, [d_tile]

    first, *others = grads
    zeros = _zeros(first)
    sums = {n: zeros(weight.shape, precision.at_least_float32(weight.dtype)) for n, weight in trained.items()}
    sums, (d_tiles,) = body.over(step, sums, first, (tiles, others))
    of_consts = [sums[n].astype(trained[n].dtype) if n in sums else None for n in range(len(trained) + len(frozen))]
    return tuple(of_consts), d_tiles


_tiled.defvjp(_forward, _backward, symbolic_zeros=True)
