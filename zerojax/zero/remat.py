"""Chooses which residuals the backward pass keeps. This module chooses by primitive, so that models need no `checkpoint_name`. Ours name
some arrays that "dots" keeps in place of matmuls (`ops.residuals`).

Gathered weights are never kept, nor are values derived from a weight by a cast, a transpose or a slice.

A policy sees a primitive and its parameters, but not its module. `not_kept` therefore rewrites the matmuls of a traced function. It
replaces their precision, a pair, by an equal pair of a class of this module. JAX reads the values and the policy reads the class, so the
arithmetic and the compiled program do not change. Models cannot set this mark. It requires that JAX passes the pair on unchanged; tests of
this module fail if it does not. Arrays for host memory have a name, and so have the results of matmuls in fp8 (`ops.fp8`), because these
are scaled after the matmul, and what is kept is the scaled result.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.core
import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zerojax import traces
from zerojax.errors import UserError
from zerojax.ops import fp8, residuals
from zerojax.tree import PyTree

# Their results may be a gathered weight, moved or cast, and are cheap to recompute.
_MAY_BE_WEIGHTS = traces.MOVES | frozenset(
    {traces.CAST, "sharding_constraint", "custom_vjp_call", "optimization_barrier", "all_gather"}
)

Policy = Callable[..., bool] | None  # of `jax.checkpoint`; None for no rematerialisation
_HOST = "zerojax: in the host's memory"
_FP8_NOT_KEPT = "zerojax: an fp8 matmul that is not kept"
_to_host = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[_HOST],
    offload_src="device",
    offload_dst="pinned_host",
)


@dataclasses.dataclass(frozen=True)
class _Offloads:
    """Keeps arrays named by `for_host` in host memory, and applies another policy to the rest."""

    rest: Callable[..., Any]

    def __call__(self, primitive: jex.Primitive, *args: Any, **params: Any) -> Any:
        is_for_host = primitive.name == "name" and params["name"] == _HOST
        return (_to_host if is_for_host else self.rest)(primitive, *args, **params)


def policy(name: str, *, offloads: bool = False, in_place: bool = True, moves: bool = True) -> Policy:
    """Returns the policy of a name in REMAT, or None where everything is kept.

    Args:
      name: of the policy.
      offloads: arrays named by `for_host` are kept in host memory.
      in_place: "dots" keeps arrays named by `residuals.in_place`. False where `recompute` or `offload` name modules whose results are not
        kept on the device: arrays kept in place of these results would take their memory.
      moves: whether any weight is gathered; gathered weights are never kept.
    """
    if name == "none" and not moves:
        return None
    found = REMAT[name] if in_place or name != "dots" else _keep_only_matmuls
    return _Offloads(found) if offloads else found


def without_offload(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a policy that keeps nothing in host memory, because JAX cannot differentiate offloaded arrays twice."""
    return policy.rest if isinstance(policy, _Offloads) else policy


def for_host(value: PyTree) -> PyTree:
    """Names a module's arrays, so that a policy that offloads keeps them in host memory until the backward pass reads them."""
    if isinstance(value, jax.Array):
        return checkpoint_name(value, _HOST)
    if isinstance(value, (dict, flax.core.FrozenDict)):  # JAX does not keep their order
        named = {key: for_host(part) for key, part in value.items()}
        if isinstance(value, flax.core.FrozenDict):
            return flax.core.FrozenDict(named)
        same = copy.copy(value)
        same.update(named)
        return same

    def is_part(node: PyTree) -> bool:
        return node is not value

    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(value, is_leaf=is_part))
    return value if is_leaf else jax.tree.map(for_host, value, is_leaf=is_part)


class _NotKept(tuple):
    """The precision of a matmul's two operands; "dots" does not keep a matmul with a precision of this class."""


def not_kept(function: Callable[[], list[jax.Array]]) -> list[jax.Array]:
    """Returns the result of `function`, with its matmuls marked so that "dots" does not keep them.

    Raises:
      UserError: a matmul has a dot algorithm instead of a precision, and cannot be marked.
    """
    closed = jax.make_jaxpr(function)()
    return jex.jaxpr_as_fun(_marked(closed))()


def _marked(program: traces.Program) -> traces.Program:
    return traces.replaced(program, lambda eqn: eqn.replace(params=_marked_params(eqn)))


def _marked_params(eqn: jex.JaxprEqn) -> dict[str, Any]:
    """Returns an equation's parameters with the mark."""
    params = dict(eqn.params)
    if eqn.primitive.name in traces.MATMULS:
        precision = params["precision"] or (jax.lax.Precision.DEFAULT,) * 2
        if not isinstance(precision, tuple) or not all(isinstance(part, jax.lax.Precision) for part in precision):
            raise UserError(
                f"recompute: a matmul of a module that it matches has the dot algorithm {precision}, and only a matmul with a precision "
                "can be marked; give a jax.lax.Precision or none, set recompute to '', or remat to 'full'"
            )
        params["precision"] = _NotKept(precision)
    if eqn.primitive.name == "name" and params["name"] == fp8.PRODUCT:
        params["name"] = _FP8_NOT_KEPT
    return params


def _keep_all_but_weights(primitive: jex.Primitive, *_: Any, **params: Any) -> bool:
    return primitive.name not in _MAY_BE_WEIGHTS


def _keep_matmuls(primitive: jex.Primitive, *operands: Any, **params: Any) -> bool:
    is_in_place = primitive.name == "name" and params["name"] == residuals.IN_PLACE
    return is_in_place or _keep_only_matmuls(primitive, *operands, **params)


def _keep_only_matmuls(primitive: jex.Primitive, *operands: Any, **params: Any) -> bool:
    # Attention's forward, cuDNN's or a Pallas kernel, also returns the softmax statistics, so the backward pass does not run it again.
    name = primitive.name
    if name == "name":
        return params["name"] in (fp8.PRODUCT, fp8.SCALE, residuals.ATTENTION)
    if name in traces.MATMULS and operands[0].dtype.itemsize == 1 and jnp.issubdtype(operands[0].dtype, jnp.floating):
        return False  # its scaled result has a name
    is_matmul = name in traces.MATMULS and not isinstance(params.get("precision"), _NotKept)
    return is_matmul or _keep_attention(primitive)


def _keep_attention(primitive: jex.Primitive, *_: Any, **params: Any) -> bool:
    name = params["name"] if primitive.name == "name" else primitive.name
    return name in ("pallas_call", residuals.ATTENTION) or "dot_product_attention_fwd" in name


# The rest is recomputed.
REMAT: dict[str, Callable[..., bool]] = {
    "none": _keep_all_but_weights,
    "dots": _keep_matmuls,
    "attention": _keep_attention,
    "full": jax.checkpoint_policies.nothing_saveable,
}
