"""The programs of an engine whose weights are in host memory. This module runs the model block by block (`inference.by_block`).

    first     the prompts, block by block; then one program puts their keys and values into slots, and draws
    further   the next part of one prompt, after the keys and values of a slot; then the same
    decode    a token of every row, block by block; then one program draws

Each call reads all weights that are in host memory over its link, so a token costs the least with many slots, and a prompt with many that
are read together. On the device are the caches, the weights that stay there, and those of about three blocks. A block returns its keys
and values anew: the old ones are freed when it has been sent.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.errors import UserError
from zerojax.inference.engine import programs
from zerojax.inference.engine import row_sampling as draws_lib
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.tree import PyTree
from zerojax.zero.host import selection
from zerojax.zero.offload import fetched_params
from zerojax.zero.step_programs import forward as forward_lib
from zerojax.zero.weights import partition as partition_lib


def check(partition: partition_lib.Partition, mesh: Mesh, others: Mapping[str, bool]) -> None:
    """Raises UserError for what an engine of weights in host memory does not go with.

    Args:
      partition: of the weights.
      mesh: the devices.
      others: arguments of the engine, and whether they are given.
    """
    if selection.are_params_on_disk(partition):
        raise UserError(
            "params: are on a disk, and an engine streams from host memory; load them with offload.params='host'"
        )
    if mesh.size > 1:
        raise UserError(
            f"params: are in host memory, from where an engine streams them to one device, and the mesh has {mesh.size}; choose a mesh of "
            "one, or load them on the devices"
        )
    if wrong := next((name for name, is_given in others.items() if is_given), ""):
        raise UserError(
            f"{wrong}: is for weights on the devices, and these are in host memory and streamed as they are; "
            "omit it, or load all weights on the devices"
        )


class StreamedPrograms(programs.Programs):
    """`programs.Programs` with weights in host memory, on one device; `partition` says which."""

    def __init__(
        self,
        family: family_lib.Family,
        config: ModelConfig,
        mesh: Mesh,
        shape: programs.Shape,
        special: family_lib.SpecialTokens,
        partition: partition_lib.Partition,
    ):
        super().__init__(family, config, mesh, shape, special, None)

        def start(params: PyTree, inputs: Any, tokens_RT: jax.Array, lengths_R: jax.Array) -> Any:
            return family.start(config, params, inputs, tokens_RT, lengths_R, tokens_RT.shape[1])

        how = family_lib.gathering(family, config, None)
        self._start_by_block = fetched_params.by_row(start, partition, **how)
        self._extend_by_block = fetched_params.by_row(functools.partial(family.extend, config), partition, **how)
        self._put_first, self._put_further = (
            jax.jit(function, donate_argnums=(0, 1)) for function in (self._after_first, self._after_further)
        )
        self._own, self._step = jax.jit(self._before_further), jax.jit(self._before_decode)
        self._drawn = jax.jit(self._after_decode, donate_argnums=0, static_argnames="is_plain")
        self.first, self.further, self.decode = self._first_by_block, self._further_by_block, self._decode_by_block

    def _first_by_block(
        self,
        params: PyTree,
        caches: PyTree,
        rows: programs.SlotRows,
        draws: draws_lib.Draws,
        inputs: Mapping[str, jax.Array],
        tokens_RT: jax.Array,
        lengths_R: jax.Array,
        slots_R: jax.Array,
    ) -> tuple[Any, programs.SlotRows, programs.Told]:
        scores_RV, new = self._start_by_block(params, (inputs, tokens_RT, lengths_R))
        return self._put_first(caches, rows, draws, scores_RV, new, lengths_R, slots_R)

    def _further_by_block(
        self,
        params: PyTree,
        caches: PyTree,
        rows: programs.SlotRows,
        draws: draws_lib.Draws,
        tokens_1T: jax.Array,
        begin: jax.Array,
        count: jax.Array,
        source: jax.Array,
        slot: jax.Array,
    ) -> tuple[Any, programs.SlotRows, programs.Told]:
        own, step = self._own(caches, tokens_1T, begin, count, source)
        scores_1V, own = _consuming(self._extend_by_block, params, own, step, tokens_1T)
        return self._put_further(caches, rows, draws, scores_1V, own, begin + count, slot)

    def _decode_by_block(
        self, params: PyTree, caches: PyTree, rows: programs.SlotRows, draws: draws_lib.Draws, *, is_plain: bool
    ) -> tuple[Any, programs.SlotRows, programs.Told]:
        scores_BV, caches = _consuming(self._extend_by_block, params, caches, self._step(rows, draws), rows.token)
        return caches, *self._drawn(rows, draws, scores_BV, is_plain=is_plain)

    def compiled(self, params: PyTree, tokens: int = 0) -> programs.CompiledPrograms:
        """Compiles the blocks' programs, without the small ones before and after them; see `programs.Programs.compiled`."""
        _, caches, rows, draws, *prompt = self._given(params, tokens)
        if tokens:
            forward, arrays = self._start_by_block, tuple(prompt[:3])
        else:
            step = self._replicated(jax.eval_shape(self._before_decode, rows, draws))
            forward, arrays = self._extend_by_block, (caches, step, rows.token)
        schedule = forward.schedule(params, arrays)
        cut, places = schedule.cut, range(-1, len(schedule.cut.programs))
        arriving = sum(cut.nbytes(number) for place in places for number in cut.arrivals.sent(place))
        return programs.CompiledPrograms([one.run for one in cut.programs], schedule.peak(), arriving)


def _consuming(forward: forward_lib.Forward, params: PyTree, caches: PyTree, *others: Any) -> Any:
    """Returns `forward(params, (caches, *others))`. Each array of the caches is freed when the last program that reads it has been sent."""
    arrays = (caches, *others)
    schedule = forward.schedule(params, arrays)
    begin = len(jax.tree.leaves(params))
    own = range(begin, begin + len(jax.tree.leaves(caches)))

    def free(index: int, _: Any, values: dict[int, Any]) -> None:
        for number in schedule.cut.programs[index].reads:
            if number in own and schedule.is_last(number, index):
                values[number].delete()

    return schedule(params, arrays, done=free)
