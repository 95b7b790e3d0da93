"""Finds what a collective moves: a weight, its gradient, activations or scalars. This module reads the compiled program, not the source.

It needs no named scopes, so it also reads steps written without this package. A gather moves a weight if its operand is a moved or cast
copy of a weight among the program's inputs. A reduction sums a gradient if it has the dims of a weight or of its shard. Autodiff's names,
`jvp(...)` and `transpose(jvp(...))`, tell the forward from the backward pass. Where they are missing, the position in the schedule does.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping

from zerojax import roles, tree
from zerojax.hlo import collectives, parameters, syntax
from zerojax.hlo import flow as hlo_flow

_SCALAR_SIZE = 4096  # elements; a smaller reduction that is not a gradient of a weight is a loss, a norm or a statistic


@dataclasses.dataclass(frozen=True)
class WeightDims:
    """The dims of one weight: `shape` is global; the others are those of one device's shard."""

    path: str  # the leaf's path
    shape: tuple[int, ...]  # of the global array
    used: tuple[int, ...]  # of the weight as the forward pass uses it
    stored: tuple[int, ...]  # of the weight as stored
    grad: tuple[int, ...]  # of its gradient
    moments: tuple[int, ...]  # of its moments
    trainable: bool = True  # whether it has a gradient and moments
    # the mesh axes over which the weight is sharded as used, such as those of tensor parallelism
    axes: frozenset[str] = frozenset()
    # the devices, of those that a batch is sharded over, that use other parts of it: those along which experts live
    apart: int = 1
    # the elements that its wire brings to a device in a pass, by role, where that is not what its dims say
    received: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        """Returns the elements used on one device."""
        return math.prod(self.used)


class Attribution:
    """Finds the weights that the collectives of one program move."""

    def __init__(self, flow: hlo_flow.Flow, weights: Mapping[str, WeightDims], devices: int):
        self._flow, self._weights, self._devices = flow, weights, devices
        self._paths = tree.suffix_index(weights)
        self._turns: dict[str, int] = {}  # where the backward pass of a computation begins; 0 if it has none
        self._by_dims: dict[tuple[int, ...], list[WeightDims]] = {}
        self._by_size: dict[int, list[WeightDims]] = {}
        self._both: dict[tuple[tuple[int, ...], tuple[int, ...]], list[WeightDims]] = {}  # those with both dims
        # Weights that may stack the weights of several layers.
        self._by_layer: dict[tuple[int, ...], list[WeightDims]] = {}
        for weight in weights.values():
            for dims in dict.fromkeys((weight.used, weight.grad, weight.moments, weight.stored)):
                self._by_dims.setdefault(_key(dims), []).append(weight)
                self._by_size.setdefault(math.prod(dims), []).append(weight)
                if len(dims) > 2:
                    self._by_layer.setdefault(_key(dims[1:]), []).append(weight)

    def role(self, found: collectives.Collective, part: collectives.Part) -> tuple[str, tuple[str, ...]]:
        """Returns one of `roles.SENT`, and the paths of the weights that it may belong to: several if they cannot be distinguished."""
        if scope := re.search(rf"\b({roles.PACKED_WEIGHT}|{roles.PACKED_GRADIENT})\b", part.op_name):
            path = self._scope(part.op_name[: scope.start()])
            role = roles.GRADIENTS if scope[1] == roles.PACKED_GRADIENT else self._phase(found, part.op_name)
            return role, (path,) if path else ()
        if not part.taken.dtype.startswith(("f", "bf")):
            codes = self._origin(found, part) if found.kind == "all-gather" else ()
            return (self._phase(found, part.op_name), codes) if codes else (roles.OTHER, ())
        if re.search(rf"\b{roles.TO_OWNERS}\b", part.op_name):
            return roles.MATRICES, ()
        if re.search(
            rf"\b({roles.BY_COLUMNS}|{roles.TENSOR_PARALLEL}|{roles.CONTEXT_PARALLEL}|{roles.EXPERT_PARALLEL})\b",
            part.op_name,
        ):
            return roles.ACTIVATIONS, ()
        phase = self._phase(found, part.op_name)
        if found.kind not in collectives.REDUCTIONS:
            paths = self._origin(found, part)
            if paths:
                return phase, paths
        sums = found.kind in collectives.REDUCTIONS or found.kind == "collective-permute"  # a ring of permutes sums too
        matched = (self._scattered(part) if sums else []) or self._matching(found, part)
        # A weight's gradient is never summed over an axis over which the weight is sharded. Activations are.
        matched = [weight for weight in matched if not (sums and found.axes and weight.axes.issuperset(found.axes))]
        is_vector = len(_key(part.taken.dims)) < 2
        is_statistic = is_vector and phase == roles.WEIGHTS_FORWARD and self._is_read_in_forward_pass(found, part)
        trained = [weight for weight in matched if weight.trainable]
        if trained and sums and not is_statistic:
            return roles.GRADIENTS, self._named(trained, part)
        if found.kind in collectives.REDUCTIONS and part.taken.elements <= _SCALAR_SIZE:
            return roles.SCALARS, ()
        if trained and found.kind == "all-gather" and phase == roles.UPDATED_WEIGHTS:
            return roles.UPDATED_WEIGHTS, self._named(trained, part)
        return roles.ACTIVATIONS, ()

    def readers(self, found: collectives.Collective, part: collectives.Part) -> tuple[syntax.Instruction, ...]:
        """Returns the instructions that compute with the output of a collective for one array."""
        users = [u for u in found.where.users.get(found.result, ()) if u.opcode == "get-tuple-element"]
        names = [user.name for user in users if user.number("index") == part.number] or [found.result]
        return tuple(reader for name in names for reader in hlo_flow.readers(self._flow, found.where, name))

    def _is_read_in_forward_pass(self, found: collectives.Collective, part: collectives.Part) -> bool:
        """Returns whether the forward pass reads a sum, as it does a batch's mean. Only clip and update read a gradient."""
        names = [reader.op_name for reader in self.readers(found, part)]
        return not names or any("jvp(" in name and not is_backward(name) for name in names)

    def is_kept(self, readers: tuple[syntax.Instruction, ...]) -> bool:
        """Returns whether a reader is in the backward pass, or stacks the value in a loop for later use."""
        return any(is_backward(reader.op_name) or hlo_flow.stacks(self._flow, reader) for reader in readers)

    def _phase(self, found: collectives.Collective, op_name: str) -> str:
        if is_backward(op_name):
            return roles.WEIGHTS_BACKWARD
        if "jvp(" in op_name:
            return roles.WEIGHTS_FORWARD
        order = found.computation
        if order.name not in self._turns:
            backward = (at for at, own in enumerate(order.instructions) if "transpose(jvp" in own.attributes)
            self._turns[order.name] = next(backward, 0)
        is_before = order.position[found.start.name] < self._turns[order.name]
        return roles.WEIGHTS_FORWARD if is_before else roles.UPDATED_WEIGHTS

    def _origin(self, found: collectives.Collective, part: collectives.Part) -> tuple[str, ...]:
        """Returns the weights that the operand is a copy of."""
        inputs = hlo_flow.origins(self._flow, found.computation, part.value)
        labels = {parameters.path_of(i.op_name) for i in inputs if part.taken.elements <= i.elements}
        owners = {tree.longest_suffix(self._paths, label) for label in labels}
        sizes = {part.given.elements, part.taken.elements}
        return tuple(sorted(path for path in owners if path is not None and _fits(self._weights[path], sizes)))

    def _scattered(self, part: collectives.Part) -> list[WeightDims]:
        """Returns the weight that an explicit reduce-scatter is named by. In several stages its dims are those of no shard."""
        scope, _, primitive = part.op_name.rpartition("/")
        path = self._scope(scope) if primitive in ("reduce_scatter", "psum_scatter") else None
        return [self._weights[path]] if path is not None else []

    def _scope(self, text: str) -> str | None:
        """Returns the weight whose path a scope ends with."""
        scope = re.sub("[()]+", "/", text).strip("/")  # as in transpose(jvp(embed/embedding))
        path = tree.longest_suffix(self._paths, scope)
        return path if path is not None and f"/{scope}".endswith(f"/{tree.below_params(path)}") else None

    def _matching(self, found: collectives.Collective, part: collectives.Part) -> list[WeightDims]:
        """Returns the weights with these dims, global or of a shard: in any order, with dims merged or split, or one layer's dims.

        A model may store a weight with two dims and use it with three, (embed, heads * width) as (embed, heads, width), or the other way
        round. Its gradient is summed in either form. A reduce-scatter's two arrays tell a weight from a larger one whose shard has
        the smaller one's dims. A sum over all devices is of no shard.
        """
        taken, given = _key(part.taken.dims), _key(part.given.dims)
        if taken != given:
            if (taken, given) not in self._both:
                others = {weight.path for weight in self._by_dims.get(given, ())}
                self._both[taken, given] = [own for own in self._by_dims.get(taken, ()) if own.path in others]
            if both := self._both[taken, given]:
                return both
        for dims in (part.taken.dims, part.given.dims):
            regrouped = [w for w in self._by_size.get(math.prod(dims), ()) if _regroups(dims, w)]
            matched = [*self._by_dims.get(_key(dims), ()), *regrouped, *self._by_layer.get(_key(dims), ())]
            summed = [w for w in matched if math.prod(dims) * self._devices >= w.size * found.ways]
            if matched:
                return summed if found.kind in collectives.REDUCTIONS and summed else matched
        return []

    def _named(self, matched: list[WeightDims], part: collectives.Part) -> tuple[str, ...]:
        """Returns the paths that share most modules with the op_name. If several do, dims decide: the same ones, then in the same order."""
        modules = {*re.split(r"[/():.]", part.op_name)}  # "embed.attend" is a method of the module embed
        arrays = part.taken.dims, part.given.dims

        def likeness(weight: WeightDims) -> tuple[int, bool, bool]:
            through = sum(module in modules for module in weight.path.split("/")[:-1])
            return through, *_have_dims((weight.used, weight.grad, weight.moments, weight.stored), arrays)

        likenesses = {weight.path: likeness(weight) for weight in matched}
        most = max(likenesses.values())
        return tuple(path for path, value in likenesses.items() if value == most)


@functools.cache
def _have_dims(known: tuple[tuple[int, ...], ...], arrays: tuple[tuple[int, ...], ...]) -> tuple[bool, bool]:
    """Returns whether any array has known dims, and whether it has them in the same order."""
    in_any_order, in_order = ({*map(own, known)} & {*map(own, arrays)} for own in (_key, _squeezed))
    return bool(in_any_order), bool(in_order)


def is_backward(op_name: str) -> bool:
    """Returns whether autodiff traced this operation for the backward pass."""
    return "transpose(" in op_name or "rematted_computation" in op_name


def _fits(weight: WeightDims, sizes: set[int]) -> bool:
    """Returns whether an array of one of these sizes can be this weight, or one layer of a stacked weight."""
    known = {weight.size, math.prod(weight.stored), math.prod(weight.moments)}
    layers = weight.used[0] if len(weight.used) > 1 else 1
    return bool(sizes & (known | {n // layers for n in known}))


def _regroups(dims: tuple[int, ...], weight: WeightDims) -> bool:
    """Returns whether an array has a weight's dims, or those of a shard, with some merged or some split."""
    known = (weight.used, weight.grad, weight.moments, weight.stored)
    return len(_key(dims)) > 0 and any(
        _merges(_key(dims), _key(other)) or _merges(_key(other), _key(dims))
        for other in dict.fromkeys(known)
        if math.prod(other) == math.prod(dims)
    )


def _merges(coarse: tuple[int, ...], fine: tuple[int, ...]) -> bool:
    """Returns whether each of the coarse dims is a product of some of the fine ones, and all of these are used."""
    if not coarse:
        return not fine
    first, *rest = coarse
    for count in range(1, len(fine) - len(rest) + 1):
        for chosen in itertools.combinations(range(len(fine)), count):
            if math.prod(fine[n] for n in chosen) == first:
                left = tuple(size for n, size in enumerate(fine) if n not in chosen)
                if _merges(tuple(rest), left):
                    return True
    return False


def _key(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(_squeezed(dims)))


def _squeezed(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in dims if n != 1)
