"""Finds what a compiled train step sends and need not. This module holds the rules that look at the ledger's rows."""

import math
from collections.abc import Iterable

from zerojax import display, roles, tree
from zerojax.hlo import collectives, parameters, syntax
from zerojax.plan import attribution
from zerojax.plan import finding as finding_lib
from zerojax.plan import ledger as ledger_lib
from zerojax.plan.finding import Case, Finding

# Primitives of collectives that somebody wrote out; what the partitioner inserts bears the name of the operation that needed it.
_WRITTEN = frozenset(
    "all_gather all_to_all ppermute psum psum_scatter reduce_scatter ragged_all_to_all pbroadcast".split()
)


def gradients_all_reduced(case: Case) -> Iterable[Finding]:
    """Finds whole gradients summed on every device where the plan keeps a shard."""
    weights = case.ledger.weights
    rows = [
        row
        for row in case.rows
        if row.role == roles.GRADIENTS
        and row.kind == "all-reduce"
        and any(_is_whole(row, weights[path]) for path in row.weights)
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
    """Finds activations that the partitioner moves though nobody asked for it.

    Left out: those it gathers to form a weight's gradient shard by shard, where that moves less than reducing the gradient.
    """
    rows = [
        row
        for row in case.rows
        if row.role == roles.ACTIVATIONS
        and row.kind not in collectives.REDUCTIONS
        and row.op_name.rsplit("/", 1)[-1] not in _WRITTEN
        and not _spares_a_gradient(case.ledger, row)
    ]
    if rows and _is_worth(case, rows, share=finding_lib.SHARE / 10):
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
    """Finds gradients that are whole, and yet are summed over devices once a micro-batch."""
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


def split_along_another_dim(case: Case) -> Iterable[Finding]:
    """Finds weights and gradients that change the dim they are split on."""
    rows = [row for row in case.rows if row.role in roles.SENT_OF_WEIGHTS and "all-to-all" in row.kind]
    if rows and _is_worth(case, rows):
        yield _sent(
            "weights or gradients change the dim they are split on",
            rows,
            "split a weight, its gradient and its moments on one dim (zerojax.partition_state does), and constrain none of them to another",
        )


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


def _is_whole(row: ledger_lib.Row, weight: attribution.Weight) -> bool:
    """Says whether a reduction sums a gradient whole of which the plan keeps a part; over replicas, parts are summed rightly."""
    parts = weight.size // max(1, math.prod(weight.grad))
    return parts > 1 and math.prod(row.dims) == weight.size and row.ways % parts == 0


def _spares_a_gradient(ledger: ledger_lib.Ledger, row: ledger_lib.Row) -> bool:
    """Says whether gathered activations stand for the reduction of a larger gradient, as with an embedding of many entries."""
    reduced = {path for other in ledger.rows if other.role == roles.GRADIENTS for path in other.weights}
    through = {part for name in row.read_by for part in name.split("/")}
    spared = [
        w.size
        for path, w in ledger.weights.items()
        if path not in reduced and path.split("/")[-2:-1] and path.split("/")[-2] in through
    ]
    return attribution.is_backward(row.op_name) and row.elements <= max(spared, default=0)


def _is_worth(case: Case, rows: list[ledger_lib.Row], share: float = finding_lib.SHARE) -> bool:
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
    return finding_lib.listed(named)


def _nbytes(dims: tuple[int, ...], dtype: str) -> int:
    return syntax.Array(dtype, tuple(dims)).nbytes
