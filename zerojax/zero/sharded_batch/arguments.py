"""Checks the arguments of a train step. This module refuses, in one line, what JAX would refuse in its own words or accept in silence.

XLA aborts the interpreter where a step on several devices gets a state whose buffers an earlier step has reused, so each call is checked
before it starts.
"""

import collections
import contextlib
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zerojax import errors, specs, tree, xla_flags
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.weights import partition as partition_lib

OWN_SPEC = 'batch_specs=[("^{}$", jax.sharding.PartitionSpec())]'  # of a leaf that counts no examples


def checked(partition: partition_lib.Partition, limit: Any, *, is_explicit: bool) -> float:
    """Returns the limit of the gradients' norm, after checking it and the partition's weights; see `clip_norm` and `weights`."""
    weights(partition, is_explicit=is_explicit)
    return clip_norm(limit)


def clip_norm(value: object) -> float:
    """Returns a limit of the gradients' global norm.

    Raises:
      UserError: it is no number, negative or not a number. A negative limit would turn the gradients round.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or math.isnan(value) or value < 0:
        raise UserError(f"clip_norm: must be above 0, or 0 for no limit, and is {errors.shown(value)}")
    return 0.0 if math.isinf(value) else float(value)


def grad_accum(value: object) -> None:
    """Raises a UserError if a number of passes is not a whole number above 0."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise UserError(f"grad_accum: must be a whole number, and is {errors.shown(value)}")
    if value < 1:
        raise UserError(f"grad_accum: must be at least 1, and is {value}")


def batch_specs(chosen: Any, *, is_list: bool) -> None:
    """Raises a UserError for specs of a batch that are no specs; see `inputs.Layout`. `is_list`: they are pairs (path regex, spec)."""
    for pattern, spec in chosen if is_list else ():
        errors.regex("batch_specs", pattern, "pass one over paths of the batch's leaves")
        if not isinstance(spec, P):
            raise UserError(f"batch_specs: {pattern!r} needs a PartitionSpec, and has {spec!r}")
    for path, spec in () if is_list else tree.flatten(chosen, is_leaf=lambda node: isinstance(node, P)):
        if not isinstance(spec, P):
            raise UserError(f"batch_specs: {path or 'it'} must be a PartitionSpec, and is {spec!r}")


def unmatched_spec(pattern: str, paths: Sequence[str]) -> UserError:
    """Returns the error for a regex of `batch_specs` that matches no leaf of a batch, whose paths these are."""
    return UserError(f"batch_specs: {pattern!r} matches no leaf of the batch; its leaves are {', '.join(paths[:5])}")


def other_tree(paths: Sequence[str]) -> UserError:
    """Returns the error for a tree of specs that is not like the batch, whose paths these are."""
    return UserError(
        f"batch_specs: is a tree of another structure than the batch, whose leaves are {', '.join(paths[:5])}; "
        "pass specs like the batch, or pairs (path regex, PartitionSpec)"
    )


def unequal(rows: Mapping[str, int]) -> UserError:
    """Returns the error for leaves that differ in the number of examples, where each device sees its own; their numbers are by path."""
    (most, _), *_ = collections.Counter(rows.values()).most_common()
    odd = next(path for path, count in rows.items() if count != most)
    like = next(path for path, count in rows.items() if count == most)
    return UserError(
        f"batch/{odd}: has {rows[odd]} rows and batch/{like} has {most}, and with reduce_dtype each device sees its own examples; pass "
        f"{OWN_SPEC.format(odd)} for a leaf that counts none"
    )


def indivisible(mesh: Mesh, path: str, leaf: Leaf, spec: P, dim: int, *, is_own: bool) -> UserError:
    """Returns the error for a leaf of a batch of which a dim does not divide; `is_own`: `batch_specs` names the leaf."""
    axes = set(specs.names(spec[dim]))
    ways = mesh_lib.size(mesh, axes)
    what = " * ".join(sorted(axes - set(mesh_lib.EXPERT) or axes))
    counted = "examples" if dim in specs.dims_of(spec, mesh_lib.EXAMPLES) else "tokens"
    rest = "" if is_own else f"; pass {OWN_SPEC.format(path)} if it counts none"
    return UserError(
        f"batch/{path}: dim {dim} of {leaf.shape} does not divide by {what} = {ways}; use a multiple of {ways} {counted}{rest}"
    )


def tokens(mesh: Mesh, batch: PyTree, own: Mapping[str, P]) -> None:
    """Raises a UserError for leaves of which no spec says whether they have a dim of tokens, where devices have tokens of their own."""
    sizes, axis = mesh_lib.text(mesh, mesh_lib.TOKENS), mesh_lib.TOKENS[0]
    form = f'batch_specs=[("tokens|labels", PartitionSpec(("replica", "data"), "{axis}"))] for leaves [examples, tokens, ...]'
    for path, leaf in tree.flatten(batch):
        if path not in own:
            raise UserError(
                f"batch/{path}: the mesh has {sizes}, and nothing says which dim of it counts tokens; pass {form}, and "
                'PartitionSpec(("replica", "data")) for those without such a dim'
            )
        is_keys = jax.dtypes.issubdtype(tree.dtype_of(leaf), jax.dtypes.prng_key)
        if is_keys and specs.dims_of(own[path], mesh_lib.EXAMPLES):
            raise UserError(
                f"batch/{path}: has a random key of each example, which would draw the same numbers for all parts of it over {sizes}; "
                "pass one key, with PartitionSpec()"
            )
    if all(specs.axes(spec).isdisjoint(mesh_lib.TOKENS) for spec in own.values()):
        raise UserError(
            f"batch_specs: no leaf has a dim of tokens, so devices along {sizes} would repeat each other's work; pass {form}, or make "
            f"a mesh without {axis}"
        )


def weights(partition: partition_lib.Partition, *, is_explicit: bool) -> None:
    """Raises a UserError if a trained weight has a dtype without gradients, or an explicit step one whose sums would be no gradients."""
    for path, leaf in tree.flatten(partition.abstract_state):
        placement = partition.placements.get(path)
        if placement is not None and placement.trainable and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise UserError(
                f"{path}: is {leaf.dtype} and a weight, and only floating weights have gradients; keep it in another field of the state, "
                "or freeze it with trainable="
            )
        if placement is not None and is_explicit and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise UserError(
                f"reduce_dtype: {path} is {leaf.dtype}, and sums in reduce_dtype are real; store its real and its imaginary part as two "
                "weights, or omit reduce_dtype"
            )


def of_call(partition: partition_lib.Partition) -> dict[str, Any]:
    """Returns the checks of a step's calls, as arguments of `jitted.jit`."""
    return {
        "before": lambda state, batch: is_usable(state),
        "explained": lambda state, batch: _why(partition, state, batch) or unfed(state),
    }


def is_usable(state: State) -> None:
    """Raises a UserError if a buffer of a state was deleted, as a step that donates deletes those of its input, or `jit` is disabled."""
    xla_flags.check_settings(xla_flags.NO_JIT)
    tree.undeleted(state)


@contextlib.contextmanager
def in_own_mesh(mesh: Mesh) -> Iterator[None]:
    """Explains what fails under `jax.set_mesh` of another mesh."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, AssertionError) as error:
        if (why := elsewhere(mesh)) is None:
            raise
        raise why from error


def elsewhere(mesh: Mesh) -> UserError | None:
    """Returns the error for a call under `jax.set_mesh` of another mesh, or None."""
    chosen = jax.sharding.get_mesh()
    if chosen.empty or chosen == mesh:
        return None
    return UserError(
        f"jax.set_mesh: the mesh is {_described(chosen)}, and the state's is {_described(mesh)}; call this outside of jax.set_mesh, or "
        "under that of the partition's mesh"
    )


def explained(partition: partition_lib.Partition, state: State) -> UserError | None:
    """Returns the error for a state that is not one of this partition, or None if it is."""
    for problem in _problems(partition, state):
        return UserError(
            f"state: {problem}; shard it with this partition's mesh, or build the step with the state's own partition"
        )
    return None


@contextlib.contextmanager
def explaining(partition: partition_lib.Partition, state: State, batch: PyTree) -> Iterator[None]:
    """Checks a call of a step of several programs, as `of_call` does those of one."""
    is_usable(state)
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the host's part of such a step meets the leaves too
        tree.untraced((state, batch))
        why = _why(partition, state, batch) or _of_numpy(state)
        if why is None:
            raise
        raise why from error


def _why(partition: partition_lib.Partition, state: State, batch: PyTree) -> UserError | None:
    return explained(partition, state) or unusable(partition, batch) or elsewhere(partition.mesh)


def unusable(partition: partition_lib.Partition, batch: PyTree) -> UserError | None:
    """Returns the error for a batch with leaves that are no arrays, or are committed to other devices than the partition's, or None."""
    for path, leaf in tree.flatten(batch):
        if not tree.is_array(leaf):
            return UserError(
                f"batch/{path}: is {errors.shown(leaf)}, and every leaf of a batch must be an array or a number; leave it out of the batch"
            )
        if (
            isinstance(leaf, jax.Array)
            and leaf.committed
            and leaf.sharding.device_set != set(partition.mesh.devices.flat)
        ):
            return UserError(
                f"batch/{path}: is committed to {len(leaf.sharding.device_set)} device(s), and the state is on {partition.mesh.size}; call "
                "jax.device_put(batch, partition.batch_sharding), or numpy arrays"
            )
    return None


def _of_numpy(state: State) -> UserError | None:
    for path, leaf in tree.flatten(state):
        if isinstance(leaf, (np.ndarray, np.generic, int, float)):
            return UserError(
                f"state: {path} is {errors.shown(leaf)}, and this step takes arrays of JAX; call jax.device_put(state, partition.shardings)"
            )
    return None


def unfed(state: State) -> UserError | None:
    """Returns the error for an optimizer whose update needs more than a train state's `apply_gradients` gives it, or None."""
    if not all(hasattr(state, name) for name in ("tx", "params", "opt_state")):
        return None
    try:
        jax.eval_shape(
            lambda params, opt_state: state.tx.update(params, opt_state, params), state.params, state.opt_state
        )
    except TypeError as error:
        if missing := re.search(r"required keyword-only arguments?: (.*)", str(error)):
            return UserError(
                f"state.tx: its update needs {missing[1]}, which apply_gradients does not pass; build a step of your own with "
                "zerojax.where_used, and call tx.update there"
            )
    return None


def _problems(partition: partition_lib.Partition, state: State) -> Iterator[str]:
    own = dict(tree.flatten(state))
    wanted = dict(tree.flatten(partition.abstract_state))
    for path in [*wanted, *own]:
        if path not in own or path not in wanted:
            yield f"{path} is {'not in it' if path in wanted else 'no leaf'} of the state that the partition was made from"
    for path, leaf in own.items():
        if (jnp.shape(leaf), tree.dtype_of(leaf)) != (wanted[path].shape, wanted[path].dtype):
            yield f"{path} is {_kind(leaf)}, and the partition stores {_kind(wanted[path])}"
        mesh, stored = getattr(getattr(leaf, "sharding", None), "mesh", None), wanted[path].sharding.mesh
        if isinstance(mesh, Mesh) and list(mesh.devices.flat) != list(stored.devices.flat):
            yield f"{path} is sharded over the mesh {_described(mesh)}, and the partition over {_described(stored)}"
    for path, leaf in own.items():
        sharding, kept = getattr(leaf, "sharding", None), wanted[path].sharding
        if sharding is not None and not sharding.is_equivalent_to(kept, len(wanted[path].shape)):
            where = (f"{getattr(one, 'spec', one)} in {one.memory_kind} memory" for one in (sharding, kept))
            yield f"{path} has the sharding {', and the partition stores '.join(where)}"
    structures: list[Any] = [jax.tree.structure(one) for one in (state, partition.abstract_state)]
    if structures[0] != structures[1]:
        yield "its static fields (tx, apply_fn) are not those of the state that the partition was made from"


def _kind(leaf: Leaf) -> str:
    return f"{tree.dtype_of(leaf)}{list(jnp.shape(leaf))}"


def _described(mesh: Mesh) -> str:
    sizes = " x ".join(f"{name} {size}" for name, size in mesh_lib.sizes(mesh).items())
    return f"{sizes} of devices {[device.id for device in mesh.devices.flat][:8]}"
