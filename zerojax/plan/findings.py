"""Says what is wrong with a compiled train step, and what to do about it. This module holds the rules, and the table of them.

Each rule compares what the program does with what the plan says, never with what the source says: a defect counts only if it reached the
compiled program. A new one is a function of a `Case` and a line of RULES.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from zerojax import display, roles, tree
from zerojax.hlo import collectives, parameters, syntax
from zerojax.plan import attribution
from zerojax.plan import ledger as ledger_lib

SHARE = 0.01  # of the parameters, or of the state's bytes: less is not worth a line
_NAMED = 3  # leaves a finding names before it counts the rest
# Primitives of collectives that somebody wrote out; what the partitioner inserts bears the name of the operation that needed it.
_WRITTEN = frozenset(
    "all_gather all_to_all ppermute psum psum_scatter reduce_scatter ragged_all_to_all pbroadcast".split()
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One defect: the rule it breaks, where, how much it costs a device (bytes a step sent, or bytes held), and the way out."""

    rule: str
    where: str
    amount: str
    remedy: str
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """What the rules look at."""

    ledger: ledger_lib.Ledger
    planned: Mapping[str, Any]
    is_16_bit: bool
    passes: int

    @property
    def rows(self) -> tuple[ledger_lib.Row, ...]:
        return self.ledger.rows

    @property
    def is_cpu(self) -> bool:
        return self.ledger.mesh.devices.flat[0].platform == "cpu"


def findings(
    ledger: ledger_lib.Ledger, *, planned: Any = None, compute_dtype: Any = None, passes: int = 1
) -> tuple[Finding, ...]:
    """Returns what is wrong, the costliest first.

    Args:
      ledger: the compiled step's.
      planned: the state that the plan means the step to take, a pytree of ShapeDtypeStructs with shardings
        (`Partition.abstract_state`); without it the rules about placement find nothing.
      compute_dtype: the dtype of the forward pass; where None, that of most of the program's matmuls.
      passes: forward and backward passes a step.
    """
    is_16_bit = (
        _computes_in_16_bits(ledger.flow.module) if compute_dtype is None else jnp.dtype(compute_dtype).itemsize == 2
    )
    case = Case(ledger, dict(tree.flatten(planned)), is_16_bit, passes)
    found = [finding for rule in RULES for finding in rule(case)]
    return tuple(sorted(found, key=lambda finding: -finding.nbytes))


def gradients_all_reduced(case: Case) -> Iterable[Finding]:
    """Finds gradients that are all-reduced where the plan shards them."""
    weights = case.ledger.weights
    rows = [
        row
        for row in case.rows
        if row.role == roles.GRADIENTS
        and row.kind == "all-reduce"
        and any(_is_unsharded(row, weights[path]) for path in row.weights)
    ]
    if rows and not case.is_cpu and _is_worth(case, rows):  # the CPU backend knows no reduce-scatter
        yield _sent(
            "gradients are all-reduced where the plan scatters them",
            rows,
            "reduce each gradient into its shard: gather weights with zerojax.where_used, whose backward pass does. "
            "A with_sharding_constraint that makes a weight whole makes its gradient whole too",
        )


def weights_gathered_in_float32(case: Case) -> Iterable[Finding]:
    """Finds weights that travel in 32 bits and are used in 16."""
    narrow = _stored_in_16_bits(case)
    rows = [
        row
        for row in case.rows
        if row.kind == "all-gather"
        and row.dtype == "f32"
        and (
            row.role in (roles.WEIGHTS_FORWARD, roles.WEIGHTS_BACKWARD)
            or (row.role == roles.UPDATED_WEIGHTS and narrow & set(row.weights))
        )
    ]
    if rows and case.is_16_bit and not case.is_cpu and _is_worth(case, rows):  # the CPU backend computes in 32 bits
        yield _sent(
            "weights are gathered in float32 where the arithmetic is 16-bit",
            rows,
            "cast before the gather, under the stored sharding: zerojax.where_used(..., compute_dtype='bfloat16')",
        )


def activations_resharded(case: Case) -> Iterable[Finding]:
    """Finds activations that the partitioner moves and nobody asked to move.

    Activations that it gathers to form shards of a weight's gradient do not count where that moves less than reducing the gradient.
    """
    rows = [
        row
        for row in case.rows
        if row.role == roles.ACTIVATIONS
        and row.kind not in collectives.REDUCTIONS
        and row.op_name.rsplit("/", 1)[-1] not in _WRITTEN
        and not _spares_a_gradient(case.ledger, row)
    ]
    if rows and _is_worth(case, rows, share=SHARE / 10):
        yield _sent(
            "activations are resharded",
            rows,
            "keep the batch split on the first dim: gather the weight where it is used (zerojax.where_used), or constrain the "
            "activation with zerojax.batch_sharding(mesh) before and after this operation",
        )


def gathered_weights_kept(case: Case) -> Iterable[Finding]:
    """Finds gathered weights that stay in memory until the backward pass reads them."""
    rows = [row for row in case.rows if row.is_kept]
    if rows and _is_worth(case, rows):
        held = sum(_nbytes(row.dims, row.dtype) * row.times for row in rows)
        yield Finding(
            "gathered weights are kept for the backward pass",
            _where(rows),
            f"{display.human(held)} held from the forward pass to the backward pass",
            "gather again in the backward pass: zerojax.where_used does, or jax.checkpoint around the block, the gather inside it, "
            "with a policy that saves no weight (jax.checkpoint_policies.nothing_saveable)",
            held,
        )


def reduced_in_every_pass(case: Case) -> Iterable[Finding]:
    """Finds replicated gradients that are summed over devices in every micro-batch."""
    weights = case.ledger.weights
    rows = [
        row
        for row in case.rows
        if row.role == roles.GRADIENTS
        and row.times >= case.passes > 1
        and all(math.prod(weights[p].grad) == weights[p].size for p in row.weights)
    ]
    if rows and _is_worth(case, rows):
        yield _sent(
            f"gradients are summed over devices in each of {case.passes} passes",
            rows,
            "accumulate each device's own gradients in shard_map and reduce once, or take fewer and larger passes "
            "(a smaller grad_accum)",
        )


def sharded_on_another_dim(case: Case) -> Iterable[Finding]:
    """Finds weights and gradients that change the dim they are sharded on."""
    rows = [row for row in case.rows if row.role in roles.SENT_OF_WEIGHTS and "all-to-all" in row.kind]
    if rows and _is_worth(case, rows):
        yield _sent(
            "weights or gradients change the dim they are split on",
            rows,
            "split a weight, its gradient and its moments on one dim (zerojax.partition_state does), and constrain none of them to another",
        )


def replicated_leaves(case: Case) -> Iterable[Finding]:
    """Finds leaves that the program takes replicated, or in larger shards than the plan says."""
    wrong = {}
    for path, (parameter, leaf) in _arguments(case).items():
        planned = leaf.sharding.shard_shape(leaf.shape)
        if parameter.elements > math.prod(planned):
            wrong[path] = parameter.arrays[0].nbytes - syntax.Array(parameter.arrays[0].dtype, planned).nbytes
    if wrong:
        yield Finding(
            "the step takes leaves less split than the plan says",
            _listed(wrong),
            f"{display.human(sum(wrong.values()))} more on each device",
            "compile the step with the plan's shardings: jax.jit(..., in_shardings=(partition.shardings, None), "
            "out_shardings=(partition.shardings, None)), and place the state with zerojax.shard_train_state",
            sum(wrong.values()),
        )


def state_not_donated(case: Case) -> Iterable[Finding]:
    """Finds arguments that are returned in new memory, so that the old and the new state are held together."""
    module = case.ledger.flow.module
    arguments = module.entry.parameters
    given = set(module.aliases.values())
    root = module.entry.root
    fresh = [array for place, array in enumerate(root.arrays) if place not in module.aliases]
    held = {}
    for number, parameter in arguments.items():
        array = parameter.arrays[0] if parameter.arrays else None
        if array is not None and number not in given and array in fresh:
            fresh.remove(array)
            held[parameters.path_of(parameter.op_name) or parameter.name] = array.nbytes
    total = sum(array.nbytes for p in arguments.values() for array in p.arrays)
    if sum(held.values()) > SHARE * total:
        yield Finding(
            "the state is not donated",
            _listed(held),
            f"{display.human(sum(held.values()))} held twice",
            "let the new state reuse the old one's memory: jax.jit(train_step, donate_argnums=0)",
            sum(held.values()),
        )


def offloaded_state_on_device(case: Case) -> Iterable[Finding]:
    """Finds leaves that the plan keeps in host memory and the program in the device's."""
    wrong = {
        path: parameter.arrays[0].nbytes
        for path, (parameter, leaf) in _arguments(case).items()
        if leaf.sharding.memory_kind not in (None, "device") and not parameter.arrays[0].is_on_host
    }
    if wrong and not case.is_cpu:  # on the CPU both memories are one
        yield Finding(
            "offloaded state stays on the device",
            _listed(wrong),
            f"{display.human(sum(wrong.values()))} of device memory",
            "give jax.jit the shardings with their memory kinds, for what goes in and for what comes out",
            sum(wrong.values()),
        )


RULES: tuple[Callable[[Case], Iterable[Finding]], ...] = (
    gradients_all_reduced,
    weights_gathered_in_float32,
    activations_resharded,
    gathered_weights_kept,
    reduced_in_every_pass,
    sharded_on_another_dim,
    replicated_leaves,
    state_not_donated,
    offloaded_state_on_device,
)


def _computes_in_16_bits(module: syntax.Module) -> bool:
    """Says whether most matmuls and convolutions work on 16-bit floats."""
    counted = {True: 0, False: 0}
    for name in module.spans:
        if not module.mentions(name, "dot", "convolution", "custom-call"):
            continue
        computation = module.computation(name)
        for product in computation.instructions:
            known = computation.by_name.get(product.operands[0]) if product.operands else None
            is_product = product.opcode in ("dot", "convolution", "custom-call")
            if known is not None and is_product and collectives.work_kind(module, product) == "matmul":
                counted[syntax.bits(known.arrays[0].dtype) <= 16] += 1
    return counted[True] > counted[False]


def _arguments(case: Case) -> dict[str, tuple[syntax.Instruction, Any]]:
    """Returns the program's parameters that the plan knows, by the plan's path, with the planned leaf."""
    index = tree.suffix_index(case.planned)
    found: dict[str, tuple[syntax.Instruction, Any]] = {}
    for parameter in case.ledger.flow.module.entry.parameters.values():
        label = parameters.path_of(parameter.op_name)
        path = tree.longest_suffix(index, label)
        if path is None or not label.endswith(path) or len(parameter.arrays) != 1:
            continue
        leaf = case.planned[path]
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            found[path] = (parameter, leaf)
    return found


def _stored_in_16_bits(case: Case) -> set[str]:
    """Returns the weights that the program takes in 16 bits: beside these, what is gathered in 32 is the master copy."""
    index = tree.suffix_index(case.ledger.weights)
    found: dict[
        str, tuple[int, int]
    ] = {}  # by weight, of the argument with the shortest label: moments have longer ones
    for parameter in case.ledger.flow.module.entry.parameters.values():
        label = parameters.path_of(parameter.op_name)
        path = tree.longest_suffix(index, label)
        if path is not None and parameter.arrays:
            known = len(label), syntax.bits(parameter.arrays[0].dtype)
            found[path] = min(known, found.get(path, known))
    return {path for path, (_, bits) in found.items() if bits <= 16}


def _is_unsharded(row: ledger_lib.Row, weight: attribution.WeightDims) -> bool:
    """Says whether a reduction sums an unsharded gradient that the plan shards; sums of shards over replicas are right."""
    parts = weight.size // max(1, math.prod(weight.grad))
    return parts > 1 and math.prod(row.dims) == weight.size and row.ways % parts == 0


def _spares_a_gradient(ledger: ledger_lib.Ledger, row: ledger_lib.Row) -> bool:
    """Says whether gathering these activations spares the reduction of a larger gradient, as with a large embedding."""
    reduced = {path for other in ledger.rows if other.role == roles.GRADIENTS for path in other.weights}
    through = {part for name in row.read_by for part in name.split("/")}
    spared = [
        w.size
        for path, w in ledger.weights.items()
        if w.trainable and path not in reduced and path.split("/")[-2:-1] and path.split("/")[-2] in through
    ]
    return attribution.is_backward(row.op_name) and row.elements <= max(spared, default=0)


def _is_worth(case: Case, rows: list[ledger_lib.Row], share: float = SHARE) -> bool:
    return sum(math.prod(row.dims) * row.times for row in rows) > share * case.ledger.params


def _sent(rule: str, rows: list[ledger_lib.Row], remedy: str) -> Finding:
    nbytes = sum(row.nbytes for row in rows)
    return Finding(rule, _where(rows), f"{display.human(nbytes)} sent by each device a step", remedy, nbytes)


def _where(rows: list[ledger_lib.Row]) -> str:
    """Names the weights, or else the operations and lines, behind the rows."""
    named: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: -row.nbytes):
        source = f" ({row.source})" if row.source else ""
        read_by = f", read by {row.read_by[0]}" if row.read_by else ""
        name = row.weights[0] if row.weights else f"{row.op_name}{source}{read_by}"
        named[name] = named.get(name, 0) + row.nbytes
    return _listed(named)


def _nbytes(dims: tuple[int, ...], dtype: str) -> int:
    return syntax.Array(dtype, tuple(dims)).nbytes


def _listed(named: Mapping[str, int]) -> str:
    """Returns the names that cost most, and how many more there are."""
    first = sorted(named, key=lambda name: -named[name])[:_NAMED]
    rest = len(named) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")
