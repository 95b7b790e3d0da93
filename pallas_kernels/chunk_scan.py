"""The gated delta rule and Mamba-2's scan over chunks of tokens. This module holds the kernels of Hopper GPUs, for Triton.

`zerojax.ops.recurrence` states the equations, and is the twin. With r = beta (v - exp(a) k S), of the state S before a chunk, with
D[i, j] = exp(a_i - a_j) for tokens j <= i of one text, and A the part of beta D (k k') below its diagonal,

    u = T r,  T = (1 + A)^-1        y = exp(a) q S + (D q k') u        S after = exp(a_C) S + (exp(a_C - a) k)' u

and the gradients dr of r and dA of A are, with P = D q k' and dS of the state after the chunk,

    du = P' dy + exp(a_C - a) k dS        dr = T' du        dA = -dr u'
    dS before = exp(a_C) dS + (exp(a) q)' dy - (beta exp(a) k)' dr

In Mamba-2's scan u = r = v. Kernels take turns: one computes what chunks do, all at once (`_prepare`, `_recall`); one passes states from
chunk to chunk, for some columns of V (`_pass_on`, `_pass_back`); and one computes the results or the gradients of chunks, all at once
(`_finish`, `_differentiate`). With U = T beta v and W = T (beta exp(a) k), u is U - W S: two matmuls of a chunk wait for the one before.

T is computed in blocks of 16 rows, row after row, in float32. Then two blocks at a time become one, whose T is -T22 A21 T11 below them.
The backward pass keeps the states before chunks, u and T.

Shapes: B batch, T tokens, H heads, G groups, K width of keys, V of values, N chunks of C tokens.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

CHUNK = 64
ROWS = 16  # of the blocks of T that are computed row after row
COLUMNS = 64  # of V that are read at a time
WIDTHS = (16, 32, 64, 128)
PROGRAMS = 128  # that pass states on: about as many as a Hopper GPU has processors
MOST_ELEMENTS = 2**31 - 2**20  # kernels count elements in int32
# Triton's warps and stages, of operands in float32 and in bfloat16.
LAUNCHES: tuple[dict[str, tuple[int, int]], ...] = (
    {"prepare": (4, 1), "on": (4, 3), "finish": (4, 1), "recall": (4, 1), "back": (4, 2)}
    | dict.fromkeys(("pairs", "queries", "keys"), (4, 1)),
    {"prepare": (4, 1), "on": (4, 4), "finish": (4, 1), "recall": (4, 1), "back": (4, 3)}
    | dict.fromkeys(("pairs", "queries", "keys"), (4, 1)),
)
TF32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
TF32_3 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


class ScanInputs(NamedTuple):
    """What the kernels read.

    Attributes:
      q, k: float[B, T, G, K].
      v: float[B, T, H, V].
      g, beta: float32[B, H, T]; None for beta: Mamba-2's scan.
      segments: int32[B, T]; None: a row has one text.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any = None
    segments: Any = None


@dataclasses.dataclass(frozen=True)
class ScanForm:
    """The sizes, and how they are computed.

    Attributes:
      batch, length, groups, heads, width, value_width: B, T, G, H, K, V.
      is_delta: whether there is beta.
      dtype: of matmuls' operands, and of what kernels tell each other: bfloat16, or float32, which matmuls round to TF32.
      interpret: whether the kernels are interpreted, in which float32 is not rounded.
    """

    batch: int
    length: int
    groups: int
    heads: int
    width: int
    value_width: int
    is_delta: bool
    dtype: Any
    interpret: bool = False

    @property
    def chunks(self) -> int:
        """Returns N."""
        return self.length // CHUNK

    @property
    def columns(self) -> int:
        """Returns the columns of V of a program that passes states on."""
        most = 64 if self.dtype == jnp.bfloat16 else 32
        return min(self.value_width, most if self.batch * self.heads * self.value_width >= most * PROGRAMS else 32)

    @property
    def is_turned(self) -> bool:
        """Returns whether keys and queries are transposed before states are passed on: matmuls in TF32 contract the last dim alone."""
        return self.dtype == jnp.float32

    def dot(self, a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
        """Returns a product in float32 of operands of `dtype`."""
        return self.dot_of(a.astype(self.dtype), b.astype(self.dtype), contracted)

    def solved(self, a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
        """Returns a product with T: of float32 by three matmuls, since the twin, which solves the system, rounds nothing there."""
        return self.dot_of(a.astype(self.dtype), b.astype(self.dtype), contracted, TF32_3)

    def dot_of(
        self, a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0), of_float32: Any = TF32
    ) -> jax.Array:
        """Returns a product in float32 of operands of their own dtype; float32 is rounded to TF32 unless it is interpreted."""
        dims = (((contracted[0],), (contracted[1],)), ((), ()))
        is_float32 = a.dtype == jnp.float32
        precision = None if not is_float32 else jax.lax.Precision.HIGHEST if self.interpret else of_float32
        return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


class ScanKept(NamedTuple):
    """What the backward pass reads, of the form's dtype.

    Attributes:
      before: [N, B, H, K, V], the states before chunks.
      u: [B, T, H, V]; None: the values.
      t: [B, T, H, C]; None in Mamba-2's scan.
    """

    before: Any
    u: Any = None
    t: Any = None


def form_of(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], *, dtype: Any, is_delta: bool, interpret: bool = False
) -> ScanForm | None:
    """Returns the sizes of arguments of these shapes, of which the tokens are yet to be filled up to chunks; None: no kernel takes them."""
    (batch, length, groups, width), (heads, value_width) = q_shape, v_shape[2:]
    length += -length % CHUNK
    form = ScanForm(batch, length, groups, heads, width, value_width, is_delta, dtype, interpret)
    largest = batch * heads * max(length * max(width, value_width, CHUNK), length // CHUNK * width * value_width)
    is_taken = width in WIDTHS and value_width in (*WIDTHS, 2 * WIDTHS[-1]) and largest < MOST_ELEMENTS
    return form if is_taken else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan(form: ScanForm, given: ScanInputs, state_BHKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the results float32[B, T, H, V], and the state after the tokens; see `forward`."""
    return forward(form, given, state_BHKV, keeps=False)[:2]


def _scan_forward(form: ScanForm, given: ScanInputs, state_BHKV: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
    y_BTHV, last_BHKV, kept = forward(form, given, state_BHKV, keeps=True)
    return (y_BTHV, last_BHKV), (given, kept)


def _scan_backward(form: ScanForm, kept: Any, grads: tuple[jax.Array, jax.Array]) -> tuple[ScanInputs, jax.Array]:
    return backward(form, *kept, *grads)


scan.defvjp(_scan_forward, _scan_backward)


# As programs of their own both are traced once for each shape, however many layers call them.
@functools.partial(jax.jit, static_argnums=0, static_argnames="keeps")
def forward(
    form: ScanForm, given: ScanInputs, state_BHKV: jax.Array, *, keeps: bool
) -> tuple[jax.Array, jax.Array, ScanKept]:
    """Returns the results float32[B, T, H, V], the last state, and what the backward pass reads, if the form `keeps` it.

    Args:
      form: the sizes.
      given: the arguments; T is a multiple of C.
      state_BHKV: float32, before the tokens.
      keeps: whether there is a backward pass.
    """
    given = _with_keys(form, given)
    w, u, *t = _prepare(form, given._replace(q=None), keeps) if form.is_delta else (None, given.v)
    before, last, *found = _pass_on(form, given._replace(q=None, v=u, beta=None), w, state_BHKV)
    u = found[0] if form.is_delta else given.v
    y_BTHV = _finish(form, given._replace(v=u, beta=None), before)
    return y_BTHV, last, ScanKept(before, *found, *t)


@functools.partial(jax.jit, static_argnums=0)
def backward(
    form: ScanForm, given: ScanInputs, kept: ScanKept, dy_BTHV: jax.Array, d_last_BHKV: jax.Array
) -> tuple[ScanInputs, jax.Array]:
    """Returns the gradients of the arguments, and that of the state before them, float32.

    Args:
      form, given, kept: of `forward`.
      dy_BTHV, d_last_BHKV: the gradients of its results, float32.
    """
    dtype, given = given.q.dtype, _with_keys(form, given)
    found: list[Any] = _recall(form, given._replace(v=None), kept.t)
    p, w = found if form.is_delta else (*found, None)
    of_results = given._replace(v=dy_BTHV, beta=None)
    d_after, du, d_first = _pass_back(form, of_results, w, p, d_last_BHKV, given.v.dtype)
    dscores, dsums, *of_delta = _pairs(form, given, kept, dy_BTHV, du)
    dq_BTHK, read = _queries(form, given._replace(v=None, beta=None), kept.before, dy_BTHV, dscores)
    dk_BTHK, dg, *dbeta = _keys(form, given, kept, d_after, dscores, dsums, read, *of_delta[1:])

    def of_groups(each: jax.Array) -> jax.Array:
        each = each.reshape(form.batch, form.length, form.groups, -1, form.width)
        return jnp.sum(each, axis=3, dtype=jnp.float32).astype(dtype)

    dv = of_delta[0] if form.is_delta else du
    return ScanInputs(of_groups(dq_BTHK), of_groups(dk_BTHK), dv, dg, *dbeta), d_first


def _with_keys(form: ScanForm, given: ScanInputs) -> ScanInputs:
    """Returns the arguments with queries and keys of the form's dtype, in which they fit into shared memory."""
    return given._replace(q=given.q.astype(form.dtype), k=given.k.astype(form.dtype))


class _Specs(NamedTuple):
    """How programs see arrays: a chunk of one head, or all chunks of a head and some columns of V."""

    inputs: ScanInputs
    head_keys: pl.BlockSpec  # [B, T, H, K]
    values: pl.BlockSpec  # [B, T, H, V]
    squares: pl.BlockSpec  # [B, T, H, C]
    turned: pl.BlockSpec  # [B, H, N, K, C]
    turned_keys: pl.BlockSpec  # [B, G, N, K, C]
    states: pl.BlockSpec  # [N, B, H, K, V]
    state: pl.BlockSpec  # [B, H, K, V]
    grid: tuple[int, ...]


def _specs(form: ScanForm, is_whole: bool) -> _Specs:
    tokens, chunks = (form.length, form.chunks) if is_whole else (CHUNK, None)
    size = form.columns if is_whole else form.value_width
    share = form.heads // form.groups

    def spec(shape: tuple[int | None, ...], place: Any) -> pl.BlockSpec:
        """`place` is of (chunk, column, head, row)."""

        def index(first: Any, head: Any, row: Any) -> tuple[Any, ...]:
            return place(0, first, head, row) if is_whole else place(first, 0, head, row)

        # Programs that run side by side read the keys of a group.
        swapped = index if is_whole else lambda head, first, row: index(first, head, row)
        return pl.BlockSpec(shape, swapped)

    keys = spec((None, tokens, None, form.width), lambda n, c, h, b: (b, n, h // share, 0))
    values = spec((None, tokens, None, size), lambda n, c, h, b: (b, n, h, c))
    scalars = spec((None, None, tokens), lambda n, c, h, b: (b, h, n))
    inputs = ScanInputs(keys, keys, values, scalars, scalars, spec((None, form.length), lambda n, c, h, b: (b, 0)))
    first = (form.value_width // size, form.heads) if is_whole else (form.heads, form.chunks)
    return _Specs(
        inputs,
        spec((None, tokens, None, form.width), lambda n, c, h, b: (b, n, h, 0)),
        values,
        spec((None, tokens, None, CHUNK), lambda n, c, h, b: (b, n, h, 0)),
        spec((None, None, chunks, form.width, CHUNK), lambda n, c, h, b: (b, h, n, 0, 0)),
        spec((None, None, chunks, form.width, CHUNK), lambda n, c, h, b: (b, h // share, n, 0, 0)),
        spec((chunks, None, None, form.width, size), lambda n, c, h, b: (n, b, h, 0, c)),
        spec((None, None, form.width, size), lambda n, c, h, b: (b, h, 0, c)),
        (*first, form.batch),
    )


def _launch(
    form: ScanForm,
    specs: _Specs,
    kernel: Any,
    name: str,
    given: ScanInputs,
    others: tuple[tuple[Any, Any], ...],
    outs: list[tuple[tuple[int, ...], Any, pl.BlockSpec]],
) -> list[jax.Array]:
    def present(array: Any, spec: Any) -> Any:
        if isinstance(array, tuple):
            return type(array)(*map(present, array, spec))
        return None if array is None else spec

    num_warps, num_stages = LAUNCHES[form.dtype == jnp.bfloat16][name]
    call = pl.pallas_call(
        functools.partial(kernel, form),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outs],
        grid=specs.grid,
        in_specs=[present(given, specs.inputs), *(present(*other) for other in others)],
        out_specs=[spec for _, _, spec in outs],
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=form.interpret,
        name=f"chunk_scan_{name}",
    )
    return call(given, *(array for array, _ in others))


def _shapes(form: ScanForm) -> tuple[Any, ...]:
    """Returns the shapes of arrays [B, T, H, X], [N, B, H, K, V] and [B, H, K, V]."""
    matrix = (form.batch, form.heads, form.width, form.value_width)
    return lambda x: (form.batch, form.length, form.heads, x), (form.chunks, *matrix), matrix


def _prepare(form: ScanForm, given: ScanInputs, keeps: bool) -> list[jax.Array]:
    specs, (tokens, _, _) = _specs(form, False), _shapes(form)
    outs = [
        (tokens(form.width), form.dtype, specs.head_keys),
        (tokens(form.value_width), form.dtype, specs.values),
        (tokens(CHUNK), form.dtype, specs.squares),
    ]
    return _launch(form, specs, _prepare_kernel, "prepare", given, (), outs[: 3 if keeps else 2])


def _recall(form: ScanForm, given: ScanInputs, t: Any) -> list[jax.Array]:
    specs, (tokens, _, _) = _specs(form, False), _shapes(form)
    outs = [(tokens(CHUNK), form.dtype, specs.squares)]
    if form.is_delta:
        shape = (form.batch, form.heads, form.chunks, form.width, CHUNK)
        outs.append((shape, form.dtype, specs.turned))
    return _launch(form, specs, _recall_kernel, "recall", given, ((t, specs.squares),), outs)


def _turned(form: ScanForm, specs: _Specs, given: ScanInputs, name: str) -> tuple[_Specs, ScanInputs]:
    """Returns the arguments with queries or keys as matmuls in TF32 read them, [B, G, N, K, C]; see `ScanForm.is_turned`."""
    if not form.is_turned:
        return specs, given
    shape = (form.batch, form.chunks, CHUNK, form.groups, form.width)
    turned = getattr(given, name).reshape(shape).transpose(0, 3, 1, 4, 2)
    inputs = specs.inputs._replace(**{name: specs.turned_keys})
    return specs._replace(inputs=inputs), given._replace(**{name: turned})


def _pass_on(form: ScanForm, given: ScanInputs, w: Any, state: jax.Array) -> list[jax.Array]:
    specs, (tokens, states, matrix) = _specs(form, True), _shapes(form)
    specs, given = _turned(form, specs, given, "k")
    outs = [(states, form.dtype, specs.states), (matrix, jnp.float32, specs.state)]
    if form.is_delta:
        outs.append((tokens(form.value_width), form.dtype, specs.values))
    others = (w, specs.head_keys), (state, specs.state)
    return _launch(form, specs, _pass_on_kernel, "on", given, others, outs)


def _finish(form: ScanForm, given: ScanInputs, before: jax.Array) -> jax.Array:
    specs, (tokens, _, _) = _specs(form, False), _shapes(form)
    outs = [(tokens(form.value_width), jnp.float32, specs.values)]
    return _launch(form, specs, _finish_kernel, "finish", given, ((before, specs.states),), outs)[0]


def _pass_back(
    form: ScanForm, given: ScanInputs, w: Any, p: jax.Array, d_last: jax.Array, values_dtype: Any
) -> list[jax.Array]:
    specs, (tokens, states, matrix) = _specs(form, True), _shapes(form)
    specs, given = _turned(form, specs, given, "q")
    outs = [
        (states, form.dtype, specs.states),
        (tokens(form.value_width), form.dtype if form.is_delta else values_dtype, specs.values),
        (matrix, jnp.float32, specs.state),
    ]
    others = (w, specs.turned), (p, specs.squares), (d_last, specs.state)
    return _launch(form, specs, _pass_back_kernel, "back", given, others, outs)


def _pairs(form: ScanForm, given: ScanInputs, kept: ScanKept, dy: jax.Array, du: jax.Array) -> list[jax.Array]:
    specs, (tokens, _, _) = _specs(form, False), _shapes(form)
    squares, scalars = (tokens(CHUNK), form.dtype, specs.squares), _scalars(form, specs)
    outs = [squares, scalars]
    if form.is_delta:
        values = tokens(form.value_width)
        outs += [(values, given.v.dtype, specs.values), (values, form.dtype, specs.values), squares, scalars]
    of_kept = kept._replace(before=None), ScanKept(specs.states, specs.values, specs.squares)
    others = of_kept, (dy, specs.values), (du if form.is_delta else None, specs.values)
    return _launch(form, specs, _pairs_kernel, "pairs", given, others, outs)


def _queries(
    form: ScanForm, given: ScanInputs, before: jax.Array, dy: jax.Array, dscores: jax.Array
) -> list[jax.Array]:
    specs, (tokens, _, _) = _specs(form, False), _shapes(form)
    outs = [(tokens(form.width), form.dtype, specs.head_keys), _scalars(form, specs)]
    others = (before, specs.states), (dy, specs.values), (dscores, specs.squares)
    return _launch(form, specs, _queries_kernel, "queries", given, others, outs)


def _keys(
    form: ScanForm,
    given: ScanInputs,
    kept: ScanKept,
    d_after: jax.Array,
    dscores: jax.Array,
    dsums: jax.Array,
    read: jax.Array,
    dr: Any = None,
    dsystem: Any = None,
    dbeta: Any = None,
) -> list[jax.Array]:
    specs, (tokens, _, _) = _specs(form, False), _shapes(form)
    scalars = _scalars(form, specs)
    outs = [(tokens(form.width), form.dtype, specs.head_keys), *[scalars] * (1 + form.is_delta)]
    others = (
        (kept._replace(t=None), ScanKept(specs.states, specs.values, specs.squares)),
        (d_after, specs.states),
        (dscores, specs.squares),
        (dsums, scalars[-1]),
        (read, scalars[-1]),
        (dr, specs.values),
        (dsystem, specs.squares),
        (dbeta, scalars[-1]),
    )
    if form.is_delta:
        given = given._replace(v=None)
    return _launch(form, specs, _keys_kernel, "keys", given, others, outs)


def _scalars(form: ScanForm, specs: _Specs) -> tuple[tuple[int, ...], Any, pl.BlockSpec]:
    return (form.batch, form.heads, form.length), jnp.float32, specs.inputs.g


class _Decays(NamedTuple):
    """The decays of a chunk."""

    among: jax.Array  # [C, C], D
    since: jax.Array  # [C], exp(a); 0 for tokens of texts that begin in the chunk
    until: jax.Array  # [C], exp(a_C - a); 0 for tokens of texts that end in it
    keeps: jax.Array  # [], exp(a_C); 0 if a text begins in it


def _decays(g_C: jax.Array, segments: tuple[jax.Array, jax.Array, jax.Array] | None) -> _Decays:
    """Returns the decays; `segments` are the texts of the chunk's tokens, of the token before it, and of its last."""
    row, column = _iota(0), _iota(1)
    sums = jnp.sum(jnp.where(column <= row, g_C[None, :], 0.0), axis=1)
    sums_of_columns = jnp.sum(jnp.where(row <= column, g_C[:, None], 0.0), axis=0)
    total = jnp.sum(g_C)
    is_seen = column <= row
    since, until, keeps = sums, total - sums, total
    if segments is not None:
        own, before, last = segments
        is_seen = is_seen & (own[:, None] == own[None, :])
        since = jnp.where(own == before, since, -jnp.inf)
        until = jnp.where(own == last, until, -jnp.inf)
        keeps = jnp.where(last == before, keeps, -jnp.inf)
    among = jnp.where(is_seen, sums[:, None] - sums_of_columns[None, :], -jnp.inf)
    return _Decays(jnp.exp(among), jnp.exp(since), jnp.exp(until), jnp.exp(keeps))


def _iota(axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis)


def _segments(given: ScanInputs, number: Any) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    if given.segments is None:
        return None
    start = number * CHUNK
    before, last = given.segments[jnp.maximum(start - 1, 0)], given.segments[start + CHUNK - 1]
    return given.segments[pl.ds(start, CHUNK)], before, last


def _system(form: ScanForm, k: jax.Array, beta_C: jax.Array, decays: _Decays) -> jax.Array:
    """Returns A."""
    return jnp.where(_iota(1) < _iota(0), beta_C[:, None] * decays.among * form.dot(k, k, (1, 1)), 0.0)


def _inverse(form: ScanForm, system: jax.Array) -> jax.Array:
    """Returns T."""
    parts = CHUNK // ROWS
    shape = (parts, ROWS, parts, ROWS)
    is_own = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    blocks = jnp.sum(jnp.where(is_own, system.reshape(shape), 0.0), axis=2)
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, blocks.shape, axis) for axis in (1, 2))

    def eliminate(j: Any, found: jax.Array) -> jax.Array:
        """Takes column j of A times row j of T from the rows below; blocks of A have nothing above their diagonal."""
        column = jnp.sum(jnp.where(columns == j, blocks, 0.0), axis=2)
        row = jnp.sum(jnp.where(rows == j, found, 0.0), axis=1)
        return found - column[:, :, None] * row[:, None, :]

    found = jax.lax.fori_loop(0, ROWS - 1, eliminate, (rows == columns).astype(jnp.float32))
    inverse = jnp.where(is_own, found[:, :, None, :], 0.0).reshape(CHUNK, CHUNK)
    size = ROWS
    while size < CHUNK:
        row, column = _iota(0) // size, _iota(1) // size
        below = jnp.where((row == column + 1) & (row % 2 == 1), system, 0.0)
        inverse = inverse - form.dot_of(form.dot_of(inverse, below), inverse)
        size *= 2
    return inverse


def _prepare_kernel(form: ScanForm, given: ScanInputs, w_ref: Any, u_ref: Any, *t_ref: Any) -> None:
    """W, U and T of a chunk."""
    decays = _decays(given.g[...], _segments(given, pl.program_id(1)))
    k, beta_C = given.k[...], given.beta[...]
    inverse = _inverse(form, _system(form, k, beta_C, decays)).astype(form.dtype)
    for ref in t_ref:
        ref[...] = inverse
    w_ref[...] = form.solved(inverse, (beta_C * decays.since)[:, None] * k).astype(form.dtype)
    for own in _columns(form):
        values = beta_C[:, None] * given.v[:, own].astype(jnp.float32)
        u_ref[:, own] = form.solved(inverse, values).astype(form.dtype)


def _recall_kernel(form: ScanForm, given: ScanInputs, t_ref: Any, p_ref: Any, *w_ref: Any) -> None:
    """P and W of a chunk, transposed."""
    decays = _decays(given.g[...], _segments(given, pl.program_id(1)))
    k = given.k[...]
    p_ref[...] = (decays.among.T * form.dot(k, given.q[...], (1, 1))).astype(form.dtype)
    if form.is_delta:
        of_keys = (given.beta[...] * decays.since)[:, None] * k
        w_ref[0][...] = form.solved(of_keys, t_ref[...], (0, 1)).astype(form.dtype)


def _pass_on_kernel(
    form: ScanForm, given: ScanInputs, w_ref: Any, state_ref: Any, before_ref: Any, last_ref: Any, *u_ref: Any
) -> None:
    """States before chunks, the last state, and u of chunks, for some columns of V. `v` is U, or the values."""

    def step(n: Any, state: jax.Array) -> jax.Array:
        at = pl.ds(n * CHUNK, CHUNK)
        rounded = state.astype(form.dtype)
        before_ref[n] = rounded
        decays = _decays(given.g[at], _segments(given, n))
        u = given.v[at, :].astype(jnp.float32)
        if form.is_delta:
            u = u - form.dot_of(w_ref[at, :], rounded)
            u_ref[0][at, :] = u.astype(form.dtype)
        return decays.keeps * state + form.dot(_turned_of(form, given.k, n), decays.until[:, None] * u)

    last_ref[...] = jax.lax.fori_loop(0, form.chunks, step, state_ref[...])


def _turned_of(form: ScanForm, ref: Any, number: Any) -> jax.Array:
    """Returns queries or keys of a chunk, [K, C]."""
    return ref[number] if form.is_turned else ref[pl.ds(number * CHUNK, CHUNK), :].T


def _finish_kernel(form: ScanForm, given: ScanInputs, before_ref: Any, y_ref: Any) -> None:
    """Results of a chunk. `v` is u."""
    decays = _decays(given.g[...], _segments(given, pl.program_id(1)))
    q = given.q[...]
    scores = decays.among * form.dot(q, given.k[...], (1, 1))
    for own in _columns(form):
        y_ref[:, own] = decays.since[:, None] * form.dot(q, before_ref[:, own]) + form.dot(scores, given.v[:, own])


def _columns(form: ScanForm) -> list[Any]:
    """Returns which columns of V are computed at a time."""
    size = min(form.value_width, WIDTHS[-1])
    return [pl.ds(first, size) for first in range(0, form.value_width, size)]


def _pass_back_kernel(
    form: ScanForm,
    given: ScanInputs,
    w_ref: Any,
    p_ref: Any,
    d_last_ref: Any,
    d_after_ref: Any,
    du_ref: Any,
    d_first_ref: Any,
) -> None:
    """Gradients of the states after chunks, of u, and of the first state, for some columns of V. `v` is dy."""

    def step(i: Any, d_state: jax.Array) -> jax.Array:
        n = form.chunks - 1 - i
        at = pl.ds(n * CHUNK, CHUNK)
        rounded = d_state.astype(form.dtype)
        d_after_ref[n] = rounded
        decays = _decays(given.g[at], _segments(given, n))
        dy = given.v[at, :].astype(jnp.float32)
        written = form.dot_of(given.k[at, :], rounded)
        du = form.dot(p_ref[at, :], dy) + decays.until[:, None] * written
        du_ref[at, :] = du.astype(du_ref.dtype)
        d_state = decays.keeps * d_state
        d_state += form.dot(_turned_of(form, given.q, n), decays.since[:, None] * dy)
        return d_state - form.dot(w_ref[n], du) if form.is_delta else d_state

    d_first_ref[...] = jax.lax.fori_loop(0, form.chunks, step, d_last_ref[...])


def _pairs_kernel(form: ScanForm, given: ScanInputs, kept: ScanKept, dy_ref: Any, du_ref: Any, *outs: Any) -> None:
    """What pairs of a chunk's tokens have: the gradients of q k', of (k k') and of the sums of decays; and the gradients of r, v, beta."""
    dscores_ref, dsums_ref, *of_delta = outs
    decays = _decays(given.g[...], _segments(given, pl.program_id(1)))
    beta_C: Any = given.beta[...] if form.is_delta else None
    u_ref = kept.u if form.is_delta else given.v

    def add(n: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        dp, dsystem, dbeta_C = sums
        own = pl.ds(n * size, size)
        u = u_ref[:, own].astype(form.dtype)
        dp += form.dot_of(dy_ref[:, own].astype(form.dtype), u, (1, 1))
        if form.is_delta:
            dr = form.solved(kept.t[...], du_ref[:, own], (0, 0))
            rounded = dr.astype(form.dtype)
            dsystem -= form.dot_of(rounded, u, (1, 1))
            of_delta[0][:, own] = (beta_C[:, None] * dr).astype(of_delta[0].dtype)
            of_delta[1][:, own] = rounded
            dbeta_C += jnp.sum(dr * given.v[:, own].astype(jnp.float32), axis=1)
        return dp, dsystem, dbeta_C

    size = min(form.value_width, COLUMNS)
    of_pairs = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    sums = of_pairs, of_pairs, jnp.zeros((CHUNK,), jnp.float32)
    dp, dsystem, dbeta_C = jax.lax.fori_loop(0, form.value_width // size, add, sums)
    k = given.k[...]
    dscores = dp * decays.among
    dscores_ref[...] = dscores.astype(form.dtype)
    dsums = dscores * form.dot(k, given.q[...], (1, 1)).T
    if form.is_delta:
        dsystem = jnp.where(_iota(1) < _iota(0), dsystem * decays.among, 0.0)
        of_keys = dsystem * form.dot_of(k, k, (1, 1))
        of_delta[2][...] = (beta_C[:, None] * dsystem).astype(form.dtype)
        of_delta[3][...] = dbeta_C + jnp.sum(of_keys, axis=1)
        dsums += beta_C[:, None] * of_keys
    dsums_ref[...] = jnp.sum(dsums, axis=1) - jnp.sum(dsums, axis=0)


def _queries_kernel(
    form: ScanForm, given: ScanInputs, before_ref: Any, dy_ref: Any, dscores_ref: Any, dq_ref: Any, read_ref: Any
) -> None:
    """Gradients of a chunk's queries, of one head, and what they have of the sums of decays."""
    decays = _decays(given.g[...], _segments(given, pl.program_id(1)))

    def add(n: Any, dq: jax.Array) -> jax.Array:
        own = pl.ds(n * size, size)
        return dq + form.dot(decays.since[:, None] * dy_ref[:, own], before_ref[:, own], (1, 1))

    size = min(form.value_width, COLUMNS)
    dq = jnp.zeros((CHUNK, form.width), jnp.float32)
    dq = jax.lax.fori_loop(0, form.value_width // size, add, dq)
    read_ref[...] = jnp.sum(dq * given.q[...].astype(jnp.float32), axis=1)
    dq_ref[...] = (dq + form.dot(dscores_ref[...], given.k[...])).astype(dq_ref.dtype)


def _keys_kernel(
    form: ScanForm,
    given: ScanInputs,
    kept: ScanKept,
    d_after_ref: Any,
    dscores_ref: Any,
    dsums_ref: Any,
    read_ref: Any,
    dr_ref: Any,
    dsystem_ref: Any,
    dbeta_ref: Any,
    dk_ref: Any,
    dg_ref: Any,
    *of_delta: Any,
) -> None:
    """Gradients of a chunk's keys, of one head, and those of decays and betas."""
    decays = _decays(given.g[...], _segments(given, pl.program_id(1)))
    size = min(form.value_width, COLUMNS)
    steps = form.value_width // size
    dk = jnp.zeros((CHUNK, form.width), jnp.float32)
    u_ref, of_before_C = given.v, jnp.zeros((CHUNK,), jnp.float32)

    def of_keys() -> jax.Array:
        return jnp.sum(dk * given.k[...].astype(jnp.float32), axis=1)

    if form.is_delta:

        def read(n: Any, dk: jax.Array) -> jax.Array:
            own = pl.ds(n * size, size)
            return dk - form.dot(dr_ref[:, own], kept.before[:, own], (1, 1))

        beta_C, u_ref = given.beta[...], kept.u
        dk = decays.since[:, None] * jax.lax.fori_loop(0, steps, read, dk)
        of_before_C = of_keys()
        of_delta[0][...] = dbeta_ref[...] + of_before_C
        of_before_C, dk = beta_C * of_before_C, beta_C[:, None] * dk

    def write(n: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        dk, dkeeps = sums
        own = pl.ds(n * size, size)
        d_after = d_after_ref[:, own]
        dkeeps += jnp.sum(kept.before[:, own].astype(jnp.float32) * d_after.astype(jnp.float32))
        return dk + form.dot(decays.until[:, None] * u_ref[:, own], d_after, (1, 1)), dkeeps

    dk, dkeeps = jax.lax.fori_loop(0, steps, write, (dk, jnp.float32(0)))
    written_C = of_keys() - of_before_C
    dk += form.dot(dscores_ref[...], given.q[...], (0, 0))
    if form.is_delta:
        k, dsystem = given.k[...], dsystem_ref[...]
        dk += form.dot_of(dsystem, k)
        dk += form.dot_of(dsystem, k, (0, 0))
    dk_ref[...] = dk.astype(dk_ref.dtype)
    # The sum of a token has the decays up to it.
    dsums_C = dsums_ref[...] + read_ref[...] + of_before_C - written_C
    dg_C = jnp.sum(jnp.where(_iota(0) >= _iota(1), dsums_C[:, None], 0.0), axis=0)
    dg_ref[...] = dg_C + (jnp.sum(written_C) + decays.keeps * dkeeps)
