"""Computes a function of each token tile by tile. This module keeps what it makes inside from growing with the number of tokens.

A block's MLP makes several arrays of tokens x width in each pass. With a long text they take most of a device's memory. In tiles they
have a tile's size: the forward pass keeps the function's argument alone, and the backward pass computes each tile again before it
differentiates it,

    y[i] = f(w, x[i])        dx[i] = df/dx(w, x[i])^T dy[i]        dw = sum over tiles of df/dw(w, x[i])^T dy[i]

so only the sums over tokens differ from those of the function on all tokens: a tile's own gradient of a weight has the dtype that JAX
gives it, and tiles add up in float32.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax import precision, traces
from zerojax.errors import UserError

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


def over_tiles(function: Callable[[jax.Array], jax.Array], x: jax.Array, tile: int) -> jax.Array:
    """Returns `function(x)`, computed for about `tile` tokens at a time, forward and backward.

    No array inside is kept for the backward pass, whatever the policy of rematerialisation, and none has more than a tile's tokens.
    `function` may read weights from outside, also as a Flax module does; their gradients add up over tiles in float32.

    Args:
      function: float[..., tile, width] -> float[..., tile, any width], each token on its own: an MLP with its norm and its residual.
      x: float[..., tokens, width].
      tile: tokens of a tile, the leading dims of `x` included; 0, or at least as many as there are: all at once. Tiles have equal
        sizes, so they may be smaller; the last one is filled up with copies of the last token.

    Raises:
      UserError: `tile` is no number of tokens, or `function` draws random numbers, returns another number of tokens or several arrays.

    >>> y = over_tiles(lambda x: x + mlp(norm(x)), x, 8192)
    """
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 0:
        raise UserError(f"over_tiles: tile must be a number of tokens, or 0 for all at once, and is {tile!r}")
    tokens = math.prod(x.shape[:-1])
    if not 0 < tile < tokens or _inside.get():
        return function(x)
    ways = mesh_lib.ways_of_rest()
    cut = _Cut.of(x.shape, tile, ways if x.ndim > 1 and x.shape[-2] % ways == 0 else 1)
    like = jax.ShapeDtypeStruct(cut.tile_shape, x.dtype)
    with _marked():
        closed, made = jax.make_jaxpr(function, return_shape=True)(like)
    _check(closed, made, like)
    body, consts = _Body(closed, made), tuple(traces.opened(closed)[1])
    return cut.joined(_tiled(body, consts, cut.tiles(x)))


def is_inside() -> bool:
    """Returns whether the function of `over_tiles` is traced: nothing in it is kept, and it runs once for each tile."""
    return _inside.get()


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def _check(closed: Any, made: Any, like: jax.ShapeDtypeStruct) -> None:
    if not isinstance(made, jax.ShapeDtypeStruct) or made.shape[:-1] != like.shape[:-1]:
        raise UserError(
            f"over_tiles: the function must return one array of {like.shape[:-1]} and a width, and returns {made}; it must treat each "
            "token on its own"
        )
    if any(eqn.primitive.name.startswith(("random_", "threefry")) for eqn in traces.equations(closed)):
        raise UserError(
            "over_tiles: the function draws random numbers, which would be the same in all tiles; draw them outside of it"
        )


class _Cut(NamedTuple):
    """How tokens are cut. Where the compiler shards tokens over devices, each tile has as many of each device.

    Attributes:
      shape: of all tokens.
      ways: the devices that tokens are sharded over.
      number: of tiles.
      size: tokens of a tile on each device.
    """

    shape: tuple[int, ...]
    ways: int
    number: int
    size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], tile: int, ways: int) -> "_Cut":
        own = math.prod(shape[:-1]) // ways
        number = -(-own // max(1, tile // ways))
        return cls(shape, ways, number, -(-own // number))

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Returns the shape of a tile."""
        return (*(1,) * (len(self.shape) - 2), self.ways * self.size, self.shape[-1])

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
        """Returns float[..., tokens, width] from what `tiles` are turned into."""
        width, tokens = y.shape[-1], math.prod(self.shape[:-1]) // self.ways
        y = jnp.moveaxis(y.reshape(self.number, self.ways, self.size, width), 0, 1)
        y = y.reshape(self.ways, -1, width)[:, :tokens]
        if self.ways > 1:
            y = jnp.moveaxis(y.reshape(self.ways, -1, self.shape[-2] // self.ways, width), 0, 1)
        return y.reshape(*self.shape[:-1], width)


class _Body:
    """The function of a tile as a trace; what it read from outside are arguments."""

    def __init__(self, closed: Any, made: Any):
        self._closed, self._made = closed, made

    def __call__(self, consts: Mapping[int, Any], tile: jax.Array) -> jax.Array:
        given = [consts[number] for number in range(len(consts))]
        (result,) = jex.jaxpr_as_fun(jex.ClosedJaxpr(traces.opened(self._closed)[0], given))(tile)
        return result

    def fits(self, tiles: jax.Array) -> bool:
        """Returns whether a tile's result has the place of the tile. A loop that begins with zeros would hold these from the start."""
        return (self._made.shape, self._made.dtype) == (tiles.shape[1:], tiles.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(body: _Body, consts: tuple[Any, ...], tiles: jax.Array) -> jax.Array:
    known = dict(enumerate(consts))
    if body.fits(tiles):

        def in_place(tiles: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.dynamic_update_index_in_dim(tiles, body(known, tiles[number]), number, 0), None

        return jax.lax.scan(in_place, tiles, jnp.arange(len(tiles)))[0]
    return jax.lax.scan(lambda _, tile: (None, body(known, tile)), None, tiles)[1]


def _forward(body: _Body, consts: tuple[Any, ...], tiles: Any) -> tuple[jax.Array, Any]:
    """Its arguments say whether they are differentiated: the gradients of frozen weights are not computed."""
    known = {number: const.value for number, const in enumerate(consts)}
    is_trained = [const.perturbed and jnp.issubdtype(const.value.dtype, jnp.inexact) for const in consts]
    trained, frozen = ({n: w for n, w in known.items() if is_trained[n] == kind} for kind in (True, False))
    return _tiled(body, tuple(known.values()), tiles.value), (trained, frozen, tiles.value)


def _backward(body: _Body, residuals: tuple[dict, dict, jax.Array], grads: jax.Array) -> tuple:
    trained, frozen, tiles = residuals

    def of_tile(sums: dict[int, jax.Array], tile: jax.Array, grad: jax.Array) -> tuple[dict[int, jax.Array], jax.Array]:
        _, pull = jax.vjp(lambda trained, tile: body({**trained, **frozen}, tile), trained, tile)
        of_weights, d_tile = pull(grad)
        return {number: sums[number] + own.astype(sums[number].dtype) for number, own in of_weights.items()}, d_tile

    def in_place(carry: tuple[Any, jax.Array], inputs: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        sums, grads = carry
        number, tile = inputs
        sums, d_tile = of_tile(sums, tile, grads[number])
        return (sums, jax.lax.dynamic_update_index_in_dim(grads, d_tile, number, 0)), None

    zeros = {n: jnp.zeros(weight.shape, precision.at_least_float32(weight.dtype)) for n, weight in trained.items()}
    if body.fits(tiles):
        (sums, d_tiles), _ = jax.lax.scan(in_place, (zeros, grads), (jnp.arange(len(tiles)), tiles))
    else:
        sums, d_tiles = jax.lax.scan(lambda sums, inputs: of_tile(sums, *inputs), zeros, (tiles, grads))
    of_consts = [sums[n].astype(trained[n].dtype) if n in sums else None for n in range(len(trained) + len(frozen))]
    return tuple(of_consts), d_tiles


_tiled.defvjp(_forward, _backward, symbolic_zeros=True)
