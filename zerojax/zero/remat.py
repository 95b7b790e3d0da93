"""Says what the backward pass keeps of the forward pass. This module chooses by primitive, so that models need no names placed in them.

Gathered weights are never kept, nor are values that are a weight in another dress: a cast, a transpose, a slice.

A policy sees a primitive and its parameters, not the place in the model. Products made under `not_kept` are told apart by their
precision: it says DEFAULT where others leave it unsaid, which is the same arithmetic. Arrays for the host's memory have a name.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.core
import jax
from jax.ad_checkpoint import checkpoint_name

# Values that are a weight moved or cast, or are cheap to move again: keeping one would keep a gathered weight.
_MOVES = frozenset(
    "sharding_constraint convert_element_type transpose reshape broadcast_in_dim squeeze slice copy copy_p "
    "expand_dims rev custom_vjp_call optimization_barrier all_gather".split()
)
_PRODUCTS = frozenset("dot_general conv_general_dilated ragged_dot ragged_dot_general".split())


_SAID = jax.lax.Precision.DEFAULT
_HOST = "zerojax: in the host's memory"
_to_host = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[_HOST],
    offload_src="device",
    offload_dst="pinned_host",
)


@dataclasses.dataclass(frozen=True)
class _Offloads:
    """Keeps what `for_host` named in the host's memory, and of the rest what another policy keeps."""

    rest: Callable[..., Any]

    def __call__(self, primitive: Any, *args: Any, **params: Any) -> Any:
        is_for_host = primitive.name == "name" and params["name"] == _HOST
        return (_to_host if is_for_host else self.rest)(primitive, *args, **params)


def policy(name: str, *, offloads: bool = False) -> Callable[..., Any]:
    """Returns the policy of a name in REMAT; `offloads` keeps what `for_host` named, in the host's memory."""
    return _Offloads(REMAT[name]) if offloads else REMAT[name]


def without_offload(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a policy that keeps nothing in the host's memory: JAX does not differentiate twice what is there."""
    return policy.rest if isinstance(policy, _Offloads) else policy


def for_host(value: Any) -> Any:
    """Names a module's arrays, so that a policy that offloads keeps them in the host's memory until the backward pass reads them."""
    if isinstance(value, jax.Array):
        return checkpoint_name(value, _HOST)
    if isinstance(value, (dict, flax.core.FrozenDict)):  # whose order JAX does not keep
        named = {key: for_host(part) for key, part in value.items()}
        if isinstance(value, flax.core.FrozenDict):
            return flax.core.FrozenDict(named)
        same = copy.copy(value)
        same.update(named)
        return same

    def is_part(node: Any) -> bool:
        return node is not value

    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(value, is_leaf=is_part))
    return value if is_leaf else jax.tree.map(for_host, value, is_leaf=is_part)


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """Marks the matrix products made inside, so that "dots" does not keep them; no mark where a precision is set for all."""
    if precision_of_all() is not None:
        yield
        return
    with jax.default_matmul_precision("default"):
        yield


def precision_of_all() -> Any:
    """Returns the precision that is set for all matrix products, with which `not_kept` marks none; None where none is."""
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


def _keep_all_but_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name not in _MOVES


def _keep_products(primitive: Any, *_: Any, **params: Any) -> bool:
    # cuDNN's forward also returns the softmax statistics, so that the backward pass need not run it again.
    is_product = primitive.name in _PRODUCTS or "dot_product_attention_fwd" in primitive.name
    return is_product and not _is_marked(params)


def _is_marked(params: dict[str, Any]) -> bool:
    precision = params.get("precision")
    return precision == _SAID or precision == (_SAID, _SAID)


# The rest is computed again.
REMAT: dict[str, Callable[..., bool]] = {
    "none": _keep_all_but_weights,
    "dots": _keep_products,
    "full": jax.checkpoint_policies.nothing_saveable,
}
