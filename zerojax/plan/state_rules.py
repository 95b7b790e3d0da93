"""Finds state that a compiled train step holds and need not. This module holds the rules that look at the program's arguments."""

import math
from collections.abc import Iterable
from typing import Any

from jax.sharding import NamedSharding

from zerojax import display, tree
from zerojax.hlo import parameters, syntax
from zerojax.plan import finding as finding_lib
from zerojax.plan.finding import Case, Finding


def replicated_leaves(case: Case) -> Iterable[Finding]:
    """Finds leaves that the program takes whole, or less split, than the plan says."""
    wrong = {}
    for path, (parameter, leaf) in _arguments(case).items():
        planned = leaf.sharding.shard_shape(leaf.shape)
        if parameter.elements > math.prod(planned):
            wrong[path] = parameter.arrays[0].nbytes - syntax.Array(parameter.arrays[0].dtype, planned).nbytes
    if wrong:
        yield Finding(
            "the step takes leaves less split than the plan says",
            finding_lib.listed(wrong),
            f"{display.human(sum(wrong.values()))} more on each device",
            "compile the step with the plan's shardings: jax.jit(..., in_shardings=(partition.shardings, None), "
            "out_shardings=(partition.shardings, None)), and place the state with zerojax.shard_train_state",
            sum(wrong.values()),
        )


def state_not_donated(case: Case) -> Iterable[Finding]:
    """Finds arguments that come back in new memory, so that old and new state lie side by side."""
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
    if sum(held.values()) > finding_lib.SHARE * total:
        yield Finding(
            "the state is not donated",
            finding_lib.listed(held),
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
            finding_lib.listed(wrong),
            f"{display.human(sum(wrong.values()))} of device memory",
            "give jax.jit the shardings with their memory kinds, for what goes in and for what comes out",
            sum(wrong.values()),
        )


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
