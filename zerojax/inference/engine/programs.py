"""The programs of an engine. This module makes them; each runs on all devices and changes the caches in place.

    first     reads the beginnings of some prompts into empty slots, and draws a token for each
    further   reads the next part of one prompt, after the part of it that a slot holds, and draws a token
    decode    adds one token to every row, or, to the only row of an engine of one slot, several one after the other

Tokens, positions and counts of the rows stay on the devices, so the host sends the next program before it reads the last one's tokens.
The host takes some microseconds for each array that it gives to a program, and a model has hundreds. For one row that may be as long as
the devices take for a token, so a program adds several.

Shapes: B slots, R rows of a call, T tokens of a call, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import jitted as jitted_lib
from zerojax import mesh as mesh_lib
from zerojax import specs, tree
from zerojax.inference.engine import adapters, requests, weights
from zerojax.inference.engine import row_sampling as draws_lib
from zerojax.models import decoding
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.tree import Leaf, PyTree
from zerojax.zero.blocks import where_used
from zerojax.zero.weights import placement

# Tokens that a program adds to the only row, at most.
GROUP = 8
# Bytes of weights that such a program reads, at most: some 20 ms of an H200 or of a CPU, for which the tokens wait for each other.
GROUP_BYTES, OF_CPU = 64e9, 0.5e9


class SlotRows(NamedTuple):
    """Where each slot's text is.

    Attributes:
      token: int32[B], the last one, which no cache holds yet.
      position: int32[B], of that token.
      number: int32[B], of new tokens.
      seen: bool[B, V], the tokens of the text before the last one; kept only for rows with a repetition penalty.
    """

    token: jax.Array
    position: jax.Array
    number: jax.Array
    seen: jax.Array


class Told(NamedTuple):
    """What the host reads of a call: the rows' tokens int32[B], the logarithms of their probabilities, and the likeliest tokens'. A call
    that adds several tokens to a row has these for each, [S, B]."""

    token: jax.Array
    own: jax.Array | None = None
    likeliest: jax.Array | None = None
    of_likeliest: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of an engine: `slots` requests at once, `length` tokens of a text, `inputs` tokens for an encoder (0: a decoder)."""

    slots: int
    length: int
    inputs: int


class CompiledPrograms(NamedTuple):
    """Programs that run one after the other.

    Attributes:
      runs: the programs; equal ones are one object.
      peak: the most bytes that they take of a device, with weights and caches.
      arriving: bytes of weights that arrive from host memory beside them.
      steps: how often they run, one after the other, each time that the host sends them; see `steps_of`.
      has_graphs: whether CUDA graphs launch their kernels.
    """

    runs: Sequence[jax.stages.Compiled]
    peak: int
    arriving: int = 0
    steps: int = 1
    has_graphs: bool = True


class Programs:
    """The compiled programs.

    Args:
      family, config: the model.
      mesh: the devices.
      shape: the sizes.
      special: the tokens that begin and end texts.
      placements: those of the weights, by path, where a program gathers them; {}: they are used as they are stored.
      dtype: of gathered floating weights; None: as they are.
      kernels: the implementation of kernels; None for none. On several devices those of one row alone run, which know their shards
        (`Family.one_row`): the compiler does not shard a kernel.
      rows_axes: mesh axes over which slots are sharded.
      has_adapters: whether the weights have adapters beside them (`adapters.added`).
      has_transposed: whether they have transposed scales (`weights.for_one_row`).
      steps: tokens that `decode` adds to a row; see `steps_of`.
    """

    def __init__(
        self,
        family: family_lib.Family,
        config: ModelConfig,
        mesh: Mesh,
        shape: Shape,
        special: family_lib.SpecialTokens,
        kernels: str | None,
        rows_axes: tuple[str, ...] = (),
        has_adapters: bool = False,
        has_transposed: bool = False,
        steps: int = 1,
        placements: Mapping[str, placement.Placement] = types.MappingProxyType({}),
        dtype: DTypeLike | None = None,
    ):
        self._has_adapters, self.steps = has_adapters, steps
        self._config, self._mesh, self._shape, self._special = config, mesh, shape, special
        self._kernels, self._axes = kernels if mesh.size == 1 else None, rows_axes
        self._row_kernels, self._family, self._held = kernels, family, family.caches(config)
        self._reader = weights.reader_of(mesh, rows_axes)
        self._shardings = jax.tree.map(lambda held: NamedSharding(mesh, self._spec(held)), self._held)
        # Only gathered weights tell a head from other modules. Kernels may run in its place, and then none is called.
        how = {"blocks": family.blocks, "heads": family_lib.heads(family, config) if placements else ""}
        self._start, self._extend = (
            where_used.forward_only(functools.partial(function, config), placements, compute_dtype=dtype, **how)
            for function in (family.start, family.extend)
        )
        jitted = functools.partial(jax.jit, donate_argnums=(1, 2))
        self.first: Any = jitted(self._first)
        self.further: Any = jitted(self._further)
        # The host takes longer to bring graphs of CUDA up to date than to launch kernels: many short ones, since a graph ends at each
        # all-reduce, or one with Mosaic's kernels (docs/benchmarks/gpu.md).
        is_sharded = mesh_lib.size(mesh, mesh_lib.COMPILER) > 1 and mesh_lib.platform(mesh) == "gpu"
        self._has_graphs = not (is_sharded or (kernels == "pallas" and shape.slots == 1 and has_transposed))
        options = None if self._has_graphs else {"xla_gpu_graph_min_graph_size": 2**30}
        jitted = functools.partial(jitted, static_argnames="is_plain", compiler_options=options)
        self.step: Any = jitted(self._decode)
        self.decode: Any = self.step if steps == 1 else jitted(self._decode_group)

    def empty(self, params: PyTree) -> tuple[Any, SlotRows]:
        """Returns caches and rows without text, on the devices."""
        make = functools.partial(self._empty, _without_shardings(params))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract(params))
        return jax.jit(make, out_shardings=shardings)()

    def abstract(self, params: PyTree) -> tuple[Any, SlotRows]:
        """Returns what `empty` does, as ShapeDtypeStructs with shardings. Allocates nothing."""
        empty = jax.eval_shape(functools.partial(self._empty, _without_shardings(params)))
        shardings = self._shardings, jax.tree.map(self._row_sharding, empty[1])
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), empty, shardings
        )

    def compiled(self, params: PyTree, tokens: int = 0) -> CompiledPrograms:
        """Compiles what adds the likeliest token to each row, or reads the first `tokens` of a prompt into a slot. Devices may be absent.

        Of several steps of one program, what runs is one, the body of their loop. The bytes are those of the loop, before which XLA may
        bring weights into another layout.

        Args:
          params: abstract, with shardings.
          tokens: of the prompt; 0 for what adds a token.
        """
        given = self._given(params, tokens)
        steps = 1 if tokens else self.steps
        lowered = self.first.lower(*given) if tokens else self.step.lower(*given, is_plain=True)
        run = lowered.compile()
        sent = run if steps == 1 else self.decode.lower(*given, is_plain=True).compile()
        # A program has no argument that it does not read, such as scales in another form, and they are there all the same.
        taken = max(sent.memory_analysis().argument_size_in_bytes, sum(map(tree.shard_bytes, jax.tree.leaves(given))))
        peak = taken + jitted_lib.bytes_beside(sent)
        return CompiledPrograms((run,), peak, steps=steps, has_graphs=bool(tokens) or self._has_graphs)

    def _given(self, params: PyTree, tokens: int) -> tuple[Any, ...]:
        """Returns the arguments of `step`, or of `first` for a prompt of `tokens`, as ShapeDtypeStructs."""
        given = params, *self.abstract(params), self._replicated(draws_lib.Draws.of_rows(self._shape.slots))
        if not tokens:
            return given
        prompt = self._replicated([jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, tokens), (1,), (1,))])
        return *given, {}, *prompt

    def _replicated(self, arrays: PyTree) -> PyTree:
        """Returns arrays, as ShapeDtypeStructs that are the same on all devices."""
        same = NamedSharding(self._mesh, P())
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=same), arrays)

    def _empty(self, params: PyTree) -> tuple[Any, SlotRows]:
        shape = self._shape
        inputs = {}
        if shape.inputs:
            inputs = {"inputs": jnp.zeros((shape.slots, shape.inputs), jnp.int32)}
            inputs["mask"] = jnp.zeros((shape.slots, shape.inputs), bool)
        tokens, lengths = jnp.zeros((shape.slots, 1), jnp.int32), jnp.ones(shape.slots, jnp.int32)
        abstract = jax.eval_shape(
            lambda *given: self._traced(tokens[:, 0], self._start, *given, shape.length)[1],
            params,
            inputs,
            tokens,
            lengths,
        )
        caches = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
        zeros = jnp.zeros(shape.slots, jnp.int32)
        return caches, SlotRows(zeros, zeros, zeros, jnp.zeros((shape.slots, self._config.vocab_size), bool))

    def _traced(self, adapter_R: jax.Array, function: Callable[..., Any], *given: Any) -> Any:
        """Returns what a function of the weights returns, for rows with these adapters."""
        applied = adapters.applied(adapter_R) if self._has_adapters else contextlib.nullcontext()
        on_shards = weights.experts_on_shards(self._family, given[0], self._mesh)
        is_sharded = mesh_lib.size(self._mesh, mesh_lib.COMPILER) > 1
        with applied, weights.matmuls(self._kernels, is_sharded), on_shards:
            return function(*given)

    def _first(
        self,
        params: PyTree,
        caches: PyTree,
        rows: SlotRows,
        draws: draws_lib.Draws,
        inputs: Mapping[str, jax.Array],
        tokens_RT: jax.Array,
        lengths_R: jax.Array,
        slots_R: jax.Array,
    ) -> tuple[Any, SlotRows, Told]:
        """Reads the first `lengths_R` tokens of prompts into slots; a slot of `B` drops its row."""
        adapter_R = draws.adapter[jnp.minimum(slots_R, self._shape.slots - 1)]
        scores_RV, new = self._traced(adapter_R, self._start, params, inputs, tokens_RT, lengths_R, tokens_RT.shape[1])
        return self._after_first(caches, rows, draws, scores_RV, new, lengths_R, slots_R)

    def _after_first(
        self,
        caches: PyTree,
        rows: SlotRows,
        draws: draws_lib.Draws,
        scores_RV: jax.Array,
        new: PyTree,
        lengths_R: jax.Array,
        slots_R: jax.Array,
    ) -> tuple[Any, SlotRows, Told]:
        """Puts what is remembered of prompts into slots, and draws."""

        def put(held: decoding.Held, old: jax.Array, own: jax.Array) -> jax.Array:
            if held.dtype == bool:  # what a shorter mask leaves out holds nothing
                own = jnp.pad(own, ((0, 0), (0, old.shape[1] - own.shape[1])))
            at = slots_R if held.positions is None else (slots_R, slice(own.shape[1]))
            return old.at[at].set(own.astype(old.dtype), mode="drop")

        caches = self._placed(jax.tree.map(put, self._held, caches, new))
        return caches, *self._begun(scores_RV, rows, draws, lengths_R, slots_R)

    def _further(
        self,
        params: PyTree,
        caches: PyTree,
        rows: SlotRows,
        draws: draws_lib.Draws,
        tokens_1T: jax.Array,
        begin: jax.Array,
        count: jax.Array,
        source: jax.Array,
        slot: jax.Array,
    ) -> tuple[Any, SlotRows, Told]:
        """Reads `count` tokens of one prompt, which begin at position `begin`, after those of slot `source`, into a slot. All int32[1]."""
        own, step = self._before_further(caches, tokens_1T, begin, count, source)
        scores_1V, own = self._traced(draws.adapter[slot], self._extend, params, own, step, tokens_1T)
        return self._after_further(caches, rows, draws, scores_1V, own, begin + count, slot)

    def _before_further(
        self, caches: PyTree, tokens_1T: jax.Array, begin: jax.Array, count: jax.Array, source: jax.Array
    ) -> tuple[Any, decoding.Step]:
        """Returns the keys and values of a slot, and the step that adds to them."""
        own = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, source[0], 1), caches)
        step = decoding.row_step(begin, count, tokens_1T.shape[1], self._shape.length)
        return own, step

    def _after_further(
        self,
        caches: PyTree,
        rows: SlotRows,
        draws: draws_lib.Draws,
        scores_1V: jax.Array,
        own: PyTree,
        lengths: jax.Array,
        slot: jax.Array,
    ) -> tuple[Any, SlotRows, Told]:
        """Puts the keys and values of one prompt into a slot, and draws."""
        caches = self._placed(
            jax.tree.map(
                lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), slot[0], 0),
                caches,
                own,
            )
        )
        return caches, *self._begun(scores_1V, rows, draws, lengths, slot)

    def _begun(
        self, scores_RV: jax.Array, rows: SlotRows, draws: draws_lib.Draws, lengths_R: jax.Array, slots_R: jax.Array
    ) -> tuple[SlotRows, Told]:
        """Draws the next token of rows whose texts end at `lengths_R`: the first, unless a text is read anew."""
        own = jax.tree.map(lambda values: values[jnp.minimum(slots_R, self._shape.slots - 1)], draws)
        seen_RV = rows.seen[jnp.minimum(slots_R, self._shape.slots - 1)]
        counts_R = own.begun
        told = self._told(scores_RV, own, counts_R, seen_RV, lengths_R == 1, is_plain=False)
        put = functools.partial(jax.tree.map, lambda old, new: old.at[slots_R].set(new, mode="drop"))
        token, position, number = put((rows.token, rows.position, rows.number), (told.token, lengths_R, counts_R + 1))
        return self._placed_rows(SlotRows(token, position, number, rows.seen)), told

    def _decode(
        self, params: PyTree, caches: PyTree, rows: SlotRows, draws: draws_lib.Draws, *, is_plain: bool
    ) -> tuple[Any, SlotRows, Told]:
        """Adds one token to every row that is live and has fewer than it may have."""
        draws = draws._replace(is_live=draws.is_live & (rows.number < draws.until))
        extend = self._extend
        if self._row_kernels is not None and not self._has_adapters and self._shape.slots == 1:
            by_kernels = self._family.one_row(self._config, params, self._mesh.size)
            extend = self._on_shards(by_kernels, params) if by_kernels else extend
        step = self._before_decode(rows, draws)
        scores_BV, caches = self._traced(draws.adapter, extend, params, caches, step, rows.token)
        return self._placed(caches), *self._after_decode(rows, draws, scores_BV, is_plain=is_plain)

    def _decode_group(
        self, params: PyTree, caches: PyTree, rows: SlotRows, draws: draws_lib.Draws, *, is_plain: bool
    ) -> tuple[Any, SlotRows, Told]:
        """Adds `steps` tokens, one after the other, to every row that is live; to none more than its most."""

        def step(state: tuple[Any, SlotRows], _: None) -> tuple[tuple[Any, SlotRows], Told]:
            caches, rows, told = self._decode(params, *state, draws, is_plain=is_plain)
            return (caches, rows), told

        (caches, rows), told = jax.lax.scan(step, (caches, rows), length=self.steps)
        return caches, rows, self._same(told)

    def _on_shards(self, by_kernels: Callable[..., Any], params: PyTree) -> Callable[..., Any]:
        """Returns `by_kernels` (`Family.one_row`), run on each device's shards of weights and caches."""
        by_kernels = functools.partial(by_kernels, self._config, implementation=self._row_kernels)
        if self._mesh.size == 1:
            device = self._mesh.abstract_mesh.abstract_device
            return functools.partial(by_kernels, processors=getattr(device, "num_cores", None) or 0)
        axes, spec = mesh_lib.COMPILER, weights.spec_of(self._family, params, self._mesh)

        def on_device(*given: Any) -> Any:
            return by_kernels(
                *given, summed=functools.partial(jax.lax.psum, axis_name=axes), number=jax.lax.axis_index(axes)
            )

        held = jax.tree.map(self._spec, self._held)
        return jax.shard_map(
            on_device,
            mesh=self._mesh,
            in_specs=(tree.map_with_path(lambda path, _: spec(path), params), held, P(), P()),
            out_specs=(P(None, axes), held),
            check_vma=False,
        )

    def _before_decode(self, rows: SlotRows, draws: draws_lib.Draws) -> decoding.Step:
        """Returns the step that adds the last token of every row that is live."""
        live = draws.is_live.astype(jnp.int32)
        return decoding.row_step(rows.position, live, 1, self._shape.length, self._reader)

    def _after_decode(
        self, rows: SlotRows, draws: draws_lib.Draws, scores_BV: jax.Array, *, is_plain: bool
    ) -> tuple[SlotRows, Told]:
        """Draws the next token of every row that is live."""
        next_B, seen_BV = draws.is_live.astype(jnp.int32), rows.seen
        if not is_plain:  # a row that is not live has no last token: its prompt may be read in parts
            seen_BV = seen_BV.at[jnp.arange(seen_BV.shape[0]), rows.token].max(draws.is_live)
        told = self._told(scores_BV, draws, rows.number, seen_BV, jnp.zeros_like(draws.is_live), is_plain=is_plain)
        token_B = jnp.where(draws.is_live, told.token, rows.token)
        rows = SlotRows(token_B, rows.position + next_B, rows.number + next_B, seen_BV)
        return self._placed_rows(rows), told

    def _told(
        self,
        scores_RV: jax.Array,
        draws: draws_lib.Draws,
        counts_R: jax.Array,
        seen_RV: jax.Array,
        is_after_one_R: jax.Array,
        *,
        is_plain: bool,
    ) -> Told:
        """Returns the next token of each row, and unless all rows are plain the logarithms that may be asked for."""
        special = self._special
        bound_RV = draws_lib.bound(scores_RV, draws)
        token_R = jnp.argmax(bound_RV, axis=-1).astype(jnp.int32)
        if not is_plain:
            token_R = draws_lib.draw(bound_RV, draws, counts_R, seen_RV)
        if special.forced_last is not None:
            token_R = jnp.where(counts_R == draws.most - 1, special.forced_last, token_R)
        if special.forced_first is not None:
            token_R = jnp.where(is_after_one_R, special.forced_first, token_R)
        if is_plain:
            return self._same(Told(token_R))
        logs_RV = jax.nn.log_softmax(scores_RV, axis=-1)
        own_R = jnp.take_along_axis(logs_RV, token_R[:, None], axis=1)[:, 0]
        most, which = jax.lax.top_k(logs_RV, min(requests.MOST_LOGPROBS, logs_RV.shape[1]))
        return self._same(Told(token_R, own_R, which, most))

    def _spec(self, held: decoding.Held) -> P:
        """Returns the spec of one array of the caches: rows, and heads that divide."""
        rows = specs.entry(self._axes) if self._axes else None
        dim = held.heads_dim(mesh_lib.size(self._mesh, mesh_lib.COMPILER))
        return P(rows) if dim is None else P(rows, *[None] * (dim - 1), specs.entry(mesh_lib.COMPILER))

    def _placed(self, caches: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(caches, self._shardings)

    def _row_sharding(self, leaf: Leaf) -> NamedSharding:
        """Returns the sharding of one array of the rows: `seen` is sharded as the scores are, and the others are the same on all devices.

        It never changes, since a program is compiled for one sharding of what it gets.
        """
        ways = mesh_lib.size(self._mesh, mesh_lib.COMPILER)
        rows = specs.entry(self._axes) if self._axes else None
        vocab = specs.entry(mesh_lib.COMPILER) if self._config.vocab_size % ways == 0 else None
        return NamedSharding(self._mesh, P(rows, vocab) if leaf.ndim == 2 else P())

    def _placed_rows(self, rows: SlotRows) -> SlotRows:
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, self._row_sharding(leaf)), rows)

    def _same(self, told: Told) -> Told:
        """Returns what every process can read."""
        return jax.lax.with_sharding_constraint(told, NamedSharding(self._mesh, P()))


def steps_of(params: PyTree, slots: int, mesh: Mesh) -> int:
    """Returns the tokens that a program adds to a row: 1 if there are several rows, since a prompt may wait for the next step, and if
    the devices take long for a token."""
    if slots > 1:
        return 1
    read = sum(map(tree.shard_bytes, jax.tree.leaves(params)))
    most = OF_CPU if mesh_lib.platform(mesh) == "cpu" else GROUP_BYTES
    return max(1, min(GROUP, int(most // max(1, read))))


def _without_shardings(arrays: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
