"""Counts the floating-point operations of a traced step. This module walks the step's jaxpr, which includes recomputation.

A loop counts times its length. The count is of matmuls, convolutions and attention: elementwise operations are bound by memory. It is of
all devices together, as if they shared the work evenly: work that several devices repeat counts once. XLA's own count omits loops and
calls of cuDNN, and compile-only devices have none.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import partial_eval

from zerojax import roles, traces

# Matmuls of cuDNN's attention. Forward: scores and output. Backward: scores again, and four gradients.
_FORWARD_MATMULS, _BACKWARD_MATMULS = 2, 5
_GROUPED = ("grouped_rows", "grouped_matrices")  # of `pallas_kernels.grouped_mosaic`


def count(traced: jax.stages.Traced | Any) -> dict[str, float]:
    """Returns the operations of one step on all devices together, by the dtype of the matmuls.

    "bf16" is any 16-bit dtype, "fp8" any 8-bit dtype and "fp32" any other. A `while` loop of unknown length counts once, and
    further rounds of tokens to their experts (`roles.FURTHER_ROUNDS`) not at all.

    Args:
      traced: `jax.jit(step).trace(state, batch)`, or a jaxpr.

    >>> count(jax.jit(lambda a, b: a @ b).trace(jnp.ones((2, 3)), jnp.ones((3, 4))))
    {'fp32': 48.0}
    """
    found: dict[str, float] = {}
    jaxpr: Any = traces.opened(traces.opened(traced)[0])[0]
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # XLA drops unused values too
    _walk(used, 1.0, found)
    return found


def _walk(jaxpr: traces.Program, times: float, found: dict[str, float], room: float = 1.0) -> None:
    """Adds the operations of a jaxpr; `room` is what its products have room for, over the rows of a balanced router (`roles.ROOM`)."""
    for eqn in traces.opened(jaxpr)[0].eqns:
        own = max(room, roles.room(str(eqn.source_info.name_stack)))
        if is_counted(eqn):
            share = 1 / own if _is_stated(eqn) else 1.0
            for kind, operations in of_equation(eqn).items():
                found[kind] = found.get(kind, 0.0) + times * share * operations
        elif eqn.primitive.name == "cond":
            _walk_longest(eqn.params["branches"], times, found, own)
        elif not is_further(eqn):
            for inner in traces.programs(eqn):
                _walk(inner, times * repeats(eqn), found, own)


def is_further(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation is a loop of further rounds of tokens to their experts, which a plan counts as none."""
    return eqn.primitive.name == "while" and roles.FURTHER_ROUNDS in str(eqn.source_info.name_stack)


def is_counted(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation's own operations are counted, not those of programs inside it."""
    return _is_stated(eqn) or eqn.primitive.name in _COUNTS


def of_equation(eqn: Any) -> dict[str, float]:
    """Returns the operations of such an equation, by the dtype of its matmul; {} if it has none."""
    if eqn.primitive.name == "pallas_call":
        return {_kind(*[v.aval.dtype for v in eqn.invars[-2:]]): eqn.params["cost_estimate"].flops}
    if _is_grouped(eqn):
        rows, columns = eqn.invars[0].aval, eqn.outvars[0].aval.shape[-1]
        return {_kind(*[v.aval.dtype for v in eqn.invars[:2]]): 2.0 * rows.size * columns}
    operations = _COUNTS[eqn.primitive.name](eqn)
    return {_kind(*[v.aval.dtype for v in eqn.invars[:2]]): operations} if operations else {}


def attention(eqn: jex.JaxprEqn) -> str:
    """Returns "forward" or "backward" for cuDNN's attention; "" for other equations."""
    name = eqn.params["target_name"] if eqn.primitive.name == "ffi_call" else eqn.primitive.name
    if not name.startswith(("__cudnn$fmha", "dot_product_attention")):
        return ""
    return "backward" if "bwd" in name or name.endswith("Backward") else "forward"


def _is_stated(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation is a kernel that says how many operations it has."""
    return _is_grouped(eqn) or (eqn.primitive.name == "pallas_call" and eqn.params.get("cost_estimate") is not None)


def _is_grouped(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation is a product of groups of rows, whose kernel cannot say how many operations it has."""
    return eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] in _GROUPED


def _walk_longest(branches: Any, times: float, found: dict[str, float], room: float) -> None:
    """Counts the branch with the most operations, or with a kernel that states them: another is its twin for other devices."""
    stated = [branch for branch in branches if any(map(_is_stated, traces.equations(branch)))]
    counted = []
    for branch in stated or branches:
        inside: dict[str, float] = {}
        _walk(branch, times, inside, room)
        counted.append(inside)
    for kind, flops in max(counted, key=lambda inside: sum(inside.values())).items():
        found[kind] = found.get(kind, 0.0) + flops


def repeats(eqn: jex.JaxprEqn) -> float:
    """Returns how often an equation's inner jaxprs run, on all devices together."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    if eqn.primitive.name == "shard_map":
        mesh = eqn.params["mesh"].shape
        return math.prod(mesh[axis] for axis in eqn.params.get("newly_manual_axes", mesh))
    if eqn.primitive.name == "pallas_call":
        return math.prod(size for size in eqn.params["grid_mapping"].grid if isinstance(size, int))
    return 1


def _kind(*dtypes: Any) -> str:
    width = max(jnp.dtype(dtype).itemsize for dtype in dtypes)
    return {1: "fp8", 2: "bf16"}.get(width, "fp32")


def _dot(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2.0 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)


def _convolution(eqn: Any) -> float:
    # Each output element sums over the kernel elements of one output feature.
    kernel = eqn.invars[1].aval
    features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * eqn.outvars[0].aval.size * kernel.size / features


def _ragged_dot(eqn: Any) -> float:
    # [m, k] rows in groups. Each group has its own [k, n], so each row is multiplied by one.
    rows, groups = eqn.invars[0].aval, eqn.invars[1].aval
    return 2.0 * rows.size * groups.shape[-1]


def _attention(matmuls: int) -> Callable[[Any], float]:
    def counted(eqn: Any) -> float:
        query, key = eqn.invars[0].aval, eqn.invars[1].aval
        keys = key.shape[2 if eqn.params["layout"] else 1]  # [batch, heads, length, dim] or [batch, length, heads, dim]
        window = eqn.params.get("sliding_window_length") or keys
        share = 0.5 if "CAUSAL" in str(eqn.params["mask_type"]) else 1.0  # blocks above the diagonal are skipped
        return matmuls * 2.0 * query.size * min(keys * share, window)

    return counted


def _foreign(eqn: Any) -> float:
    """Counts cuDNN's attention where `ops.attention_blocks` calls it."""
    target = eqn.params["target_name"]
    if not target.startswith("__cudnn$fmha"):
        return 0.0
    config = json.loads(eqn.params["legacy_backend_config"])["cudnn_fmha_backend_config"]
    keys = int(config["intermediate_tensor_shape"]["dimensions"][-1])
    share = 0.5 if "CAUSAL" in config["mask_type"] else 1.0
    matmuls = _BACKWARD_MATMULS if target.endswith("Backward") else _FORWARD_MATMULS
    return matmuls * 2.0 * eqn.invars[0].aval.size * keys * share


# Operations of an equation, by its primitive.
_COUNTS: dict[str, Callable[[Any], float]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "dot_product_attention_fwd_wrapper": _attention(_FORWARD_MATMULS),
    "dot_product_attention_bwd_wrapper": _attention(_BACKWARD_MATMULS),
    "ffi_call": _foreign,
}
