"""Runs the forward and backward passes of a step as programs, and hands over each gradient as it becomes final. This module adds up passes.

No tree of all gradients is made here. What receives the gradients decides how long they live.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import tree
from zerojax.optim import rounded
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.gradients import accumulate
from zerojax.zero.sharded_batch import inputs, outputs
from zerojax.zero.step_programs import arrivals, programs, schedule
from zerojax.zero.weights import placement

# ready(index of the program, gradients that became final, params that arrived and no later program reads), both by path;
# called after each program of the last pass.
Ready = Callable[[int, dict[str, jax.Array], dict[str, jax.Array]], None]


@dataclasses.dataclass(frozen=True, eq=False)
class PassPrograms:
    """One pass as programs."""

    schedule: schedule.Schedule  # the programs
    # where each leaf of the arguments comes from ("state/params/kernel", "batch/x", "pass"), by number
    paths: Mapping[int, str]
    # the number of each weight's gradient, by the weight's path, or an array if it is a constant; weights may have one in common
    grads: Mapping[str, Any]
    weights: Mapping[int, str]  # the path of the param that arrives and that a value is, by number
    weight: int | None  # the number of the weight of the pass among passes; None if they count alike
    params: Mapping[int, str]  # the path of the param that a value is, by number

    @functools.cached_property
    def position(self) -> dict[str, int]:
        """Returns the number of each weight among those that have a gradient, by path."""
        return {path: number for number, path in enumerate(sorted(self.grads))}

    @functools.cached_property
    def elements(self) -> dict[str, int]:
        """Returns the elements of each gradient on one device, by path."""
        cut = self.schedule.cut
        size = lambda n: cut.nbytes(n) // cut.values[n].dtype.itemsize if isinstance(n, int) else n.size  # noqa: E731
        return {path: size(n) for path, n in self.grads.items()}

    @functools.cached_property
    def ready_at(self) -> dict[str, int]:
        """Returns the program after which each gradient is final, by path."""
        return {path: index for index, handed in enumerate(self.handed) for _, path in handed}

    @functools.cached_property
    def handed(self) -> list[list[tuple[Any, str]]]:
        """Returns the gradients that each program writes, as in `grads`, with their paths; the last has also those that none writes."""
        of_number: dict[Any, list[tuple[Any, str]]] = {}
        for path, number in self.grads.items():
            of_number.setdefault(number if isinstance(number, int) else path, []).append((number, path))
        programs = self.schedule.cut.programs
        handed = [[pair for n in own.writes for pair in of_number.pop(n, ())] for own in programs]
        handed[-1].extend(pair for pairs in of_number.values() for pair in pairs)
        return handed

    @functools.cached_property
    def copied(self) -> frozenset[str]:
        """Returns the weights whose gradient is a constant, an argument, that of another weight too, or read by a program: it stays."""
        programs = self.schedule.cut.programs
        free = {n for own in programs for n in own.writes}.difference(n for own in programs for n in own.reads)
        first = {n: path for path, n in reversed([*self.grads.items()]) if isinstance(n, int)}
        return frozenset(self.grads).difference(first[n] for n in free & first.keys())

    @functools.cached_property
    def over(self) -> list[list[tuple[int, str]]]:
        """Returns the numbers and paths of the params that arrive and that each program is the last to read."""
        numbered = enumerate(self.schedule.cut.programs)
        return [
            [(n, self.weights[n]) for n in own.reads if n in self.weights and self.schedule.is_last(n, index)]
            for index, own in numbered
        ]

    @property
    def results(self) -> set[int]:
        """Returns the numbers of the values that are results."""
        return {number for number in self.schedule.cut.results if isinstance(number, int)}

    @functools.cached_property
    def room(self) -> list[int]:
        """Returns, for each program, the bytes below the peak of a pass that are free on a device from its end to the end of the pass."""
        used, most, found = self.schedule.used(taken=self.results, follows=arrivals.STEP), 0, []
        for nbytes in reversed(used):
            found.append(max(used) - most)
            most = max(most, nbytes)
        return found[::-1]

    @functools.cached_property
    def over_at(self) -> dict[str, int]:
        """Returns the program after which a weight's gradient is final and the weight is read no more, by path."""
        numbered = enumerate(self.schedule.cut.programs)
        read = {self.params[n]: index for index, program in numbered for n in program.reads if n in self.params}
        return {path: max(index, read.get(path, 0)) for path, index in self.ready_at.items()}


class Totals:
    """What the passes of a step add up beside their gradients.

    Attributes:
      metrics: the sum of their `outputs.terms`; None before the first.
      weights: how much each pass counts; none if they count alike.
    """

    def __init__(self) -> None:
        self.metrics: Any = None
        self.weights: list[jax.Array] = []

    def add(self, metrics: PyTree) -> None:
        """Adds the metrics of a pass."""
        self.metrics = metrics if self.metrics is None else _added_metrics(self.metrics, metrics)

    @property
    def weight(self) -> jax.Array | None:
        """Returns how much the passes count together; None if they count alike."""
        return sum(self.weights[1:], self.weights[0]) if self.weights else None


class Passes:
    """The passes of a step.

    Args:
      one_pass: `one_pass.one_pass` with `blocks.NestedBlocks`.
      batch: how the batch is sharded; its `passes` is the number of passes.
      compute_dtype: the dtype that the batch is cast to; None keeps its own.
      in_16_bits: whether gradients add up in bf16, except for the last sum.
      source: stores params, which arrive while programs are sent.
      compiler_options: XLA's, for each program.
    """

    def __init__(
        self,
        one_pass: Callable[..., Any],
        batch: inputs.Layout,
        compute_dtype: DTypeLike | None,
        *,
        in_16_bits: bool = False,
        source: arrivals.ArgumentSource | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        in_order: Callable[..., Any] = list,
    ):
        self._one_pass, self._batch, self.count, self._in_order = one_pass, batch, batch.passes, in_order
        self.in_16_bits, self.source, self._options = in_16_bits, source or arrivals.ArgumentSource(), compiler_options
        self._prepare = jax.jit(lambda batch: self._batch.place(batch, compute_dtype))
        self._take = jax.jit(batch.micro_batch)
        self._cuts: dict[Any, PassPrograms] = {}
        self._given: dict[Any, jax.Array] = {}

    def one_pass(self, state: State, batch: PyTree, compiler_options: Mapping[str, Any] | None = None) -> PassPrograms:
        """Returns the programs of one pass, for a state and a batch that may be abstract. They are cut and compiled once.

        `compiler_options` are XLA's, in addition to the passes' own.
        """
        leaves, structure = jax.tree.flatten(batch)
        key = (structure, *((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves))
        if key not in self._cuts:
            micro = jax.eval_shape(lambda batch: self._take(self._prepare(batch), 0), batch)
            micro = self._batch.of_one_pass.abstract(micro)
            number = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
            state = jax.tree.map(self.source.used, tree.abstract(state))
            args = state.params, micro, state, number
            leaves = tree.flatten(args)
            froms = {"0": "state/params", "1": "batch", "2": "state", "3": "pass"}
            paths = [path.replace(path[0], froms[path[0]], 1) for path, _ in leaves]
            names = [path.removeprefix("state/") for path in paths]
            late = {n: name for n, name in enumerate(names) if name in self.source.paths}
            options = {**(self._options or {}), **(compiler_options or {})}
            how: dict[str, Any] = {"late": late, "source": self.source, "compiler_options": options}
            cut = programs.cut(self._one_pass, *args, in_order=self._in_order, **how)
            (_, aux), grads = jax.tree.unflatten(cut.structure, cut.results)
            self._cuts[key] = PassPrograms(
                schedule.Schedule(cut),
                dict(enumerate(paths)),
                {f"params/{path}": result for path, result in tree.flatten(grads)},
                {n: name for n, name in late.items() if leaves[n][0].startswith("0/")},
                aux.get("weight") if self.count > 1 else None,
                {n: names[n] for n, (path, _) in enumerate(leaves) if path.startswith(("0/", "2/params/"))},
            )
        return self._cuts[key]

    def __call__(
        self, state: State, batch: PyTree, ready: Ready, sent: Callable[[int], None] = lambda index: None
    ) -> Any:
        """Runs the passes. Returns their aux: the values of the metrics, and the state's fields after the last.

        Args:
          state: without an optimizer state.
          batch: of all passes.
          ready: see `Ready`.
          sent: called with the index of each program of the passes before the last.
        """
        found, prepared, params = self.one_pass(state, batch), self._prepare(batch), state.params
        sums: dict[str, jax.Array] = {}
        totals = Totals()
        fields: dict[str, Any] = {}
        for number in range(self.count):
            is_last = number == self.count - 1
            index = self._on_device(number)
            micro = prepared if self.count == 1 else self._take(prepared, index)
            rounding = seed(getattr(state, "step", 0), index) if self.in_16_bits and not is_last else None
            done = functools.partial(self._done, found, sums, totals, ready if is_last else None, sent, rounding)
            follows = arrivals.STEP if is_last else arrivals.PASS
            (_, aux), _ = found.schedule(params, micro, state, index, done=done, follows=follows)
            fields, metrics = aux.get("state", {}), aux["metrics"]
            state = state.replace(**fields)
            totals.add(metrics)
        return {"metrics": metric_values(totals.metrics, self.count), "state": fields}

    def _done(
        self,
        found: PassPrograms,
        sums: dict[str, jax.Array],
        totals: Totals,
        ready: Ready | None,
        sent: Callable[[int], None],
        seed: jax.Array | None,
        index: int,
        written: Sequence[int],
        values: dict[int, Any],
    ) -> None:
        """Adds the gradients that a program wrote to the sums. The last pass hands them over, with the params that are read no more."""
        if found.weight is not None and found.weight in written:
            totals.weights.append(values[found.weight])
        grads: dict[str, jax.Array] = {}
        for number, path in found.handed[index]:
            value = values[number] if isinstance(number, int) else number
            grads[path] = value.copy() if path in found.copied else value
        values.update({number: None for number, path in found.handed[index] if path not in found.copied})
        if grads and self.count > 1:
            grads = self._summed(found, sums, totals, grads, seed, is_last=ready is not None)
        if ready is None:
            sums.update(grads)
            sent(index)
            return
        ready(index, grads, {path: values.pop(number) for number, path in found.over[index] if number in values})

    def _summed(
        self,
        found: PassPrograms,
        sums: dict[str, jax.Array],
        totals: Totals,
        grads: dict[str, jax.Array],
        seed: jax.Array | None,
        *,
        is_last: bool,
    ) -> dict[str, jax.Array]:
        """Returns gradients with the sums of the passes before, which are taken from `sums`; of the last pass, their mean."""
        paths, weight = list(grads), totals.weights[-1] if totals.weights else None
        numbers = self._on_device([found.position[path] for path in paths])
        new = by_number(grads)
        grads.clear()
        if paths[0] in sums:
            is_wider = is_last and self.in_16_bits  # the last sum is float32, which the memory of bf16 has no room for
            has_room = all(grad.dtype == np.float32 for grad in new.values())
            add = (_added_to_grads if has_room else _added_apart) if is_wider else _added
            new = add(by_number({path: sums.pop(path) for path in paths}), new, weight, seed, numbers)
        else:
            new = _begun(new, weight, seed, numbers)
        if is_last:
            new = _divided(new, self.count) if weight is None else _averaged(new, totals.weight)
        return dict(zip(paths, new.values()))

    def _on_device(self, given: int | Sequence[int]) -> jax.Array:
        """Returns integers as an array that is made once: in each pass its copy would wait behind those of weights."""
        key = given if isinstance(given, int) else tuple(given)
        if key not in self._given:
            value = np.asarray(given, np.int32 if isinstance(given, int) else np.uint32)
            self._given[key] = jax.make_array_from_callback(value.shape, self._replicated, value.__getitem__)
        return self._given[key]

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self._batch.mesh, P())


def by_number(grads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns gradients by their number, in the same order: equal blocks then have equal trees, and share a compiled program."""

    def name(number: int, path: str) -> str:
        return f"{number:06}/{placement.OVERWRITE_WITH_GRADIENT}" if placement.is_overwritten(path) else f"{number:06}"

    return {name(number, path): grad for number, (path, grad) in enumerate(grads.items())}


@jax.jit
def _begun(grads: PyTree, weight: jax.Array | None, seed: jax.Array | None, numbers: jax.Array | None) -> PyTree:
    sums = accumulate.zeros(grads, in_16_bits=seed is not None)
    return accumulate.added(sums, grads, weight, seed, numbers)


# The result takes the memory of the sums, that of the gradients, or its own.
_added = jax.jit(accumulate.added, donate_argnums=0)
_added_to_grads = jax.jit(accumulate.added, donate_argnums=1)
_added_apart = jax.jit(accumulate.added)

_added_metrics = jax.jit(accumulate.added_terms)
seed = jax.jit(rounded.seed)
_averaged = jax.jit(accumulate.averaged, donate_argnums=0)  # by a weight that is an array
_divided = jax.jit(accumulate.averaged, donate_argnums=0, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def metric_values(metrics: PyTree, count: int) -> PyTree:
    """Returns the values of metrics from the sum of their terms over several passes."""
    return outputs.values(accumulate.divided_terms(metrics, count) if count > 1 else metrics)
