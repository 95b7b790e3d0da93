"""Says what is wrong with a compiled train step, and what to do about it. This module runs the rules.

Each rule compares what the program does with what the plan says, never with what the source says: a defect counts only if it reached the
compiled program.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from zerojax import tree
from zerojax.hlo import collectives, syntax
from zerojax.plan import ledger as ledger_lib
from zerojax.plan import state_rules, traffic_rules
from zerojax.plan.finding import Case, Finding

RULES: tuple[Callable[[Case], Iterable[Finding]], ...] = (
    traffic_rules.gradients_all_reduced,
    traffic_rules.weights_gathered_in_float32,
    traffic_rules.activations_resharded,
    traffic_rules.gathered_weights_kept,
    traffic_rules.reduced_in_every_pass,
    traffic_rules.split_along_another_dim,
    state_rules.replicated_leaves,
    state_rules.state_not_donated,
    state_rules.offloaded_state_on_device,
)


def findings(
    ledger: ledger_lib.Ledger, *, planned: Any = None, compute_dtype: Any = None, passes: int = 1
) -> tuple[Finding, ...]:
    """Returns what is wrong, the costliest first.

    Args:
      ledger: the compiled step's.
      planned: the state that the plan means the step to take, a pytree of ShapeDtypeStructs with shardings
        (`Partition.abstract_state`); without it the rules about placement are left out.
      compute_dtype: the dtype of the forward pass; where None, that of most of the program's matrix products.
      passes: forward and backward passes a step.
    """
    is_16_bit = (
        _computes_in_16_bits(ledger.flow.module) if compute_dtype is None else jnp.dtype(compute_dtype).itemsize == 2
    )
    case = Case(ledger, dict(tree.flatten(planned)), is_16_bit, passes)
    found = [finding for rule in RULES for finding in rule(case)]
    return tuple(sorted(found, key=lambda finding: -finding.nbytes))


def _computes_in_16_bits(module: syntax.Module) -> bool:
    """Says whether most matrix products and convolutions work on 16-bit floats."""
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
