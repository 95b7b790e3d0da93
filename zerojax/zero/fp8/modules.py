"""Chooses the modules whose matmuls run in fp8. This module injects the matmul into Linen modules that know nothing of it.

A Linen module with a field `dot_general` (Dense, DenseGeneral, the layers of our families) and a weight `kernel` gets
`ops.fp8.dot_general` in that field while it is called. NNX modules take it when they are created: `nnx.Linear(...,
dot_general=zerojax.fp8.dot_general)`.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
from jax.sharding import Mesh

from zerojax import errors, precision, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.ops import expert_matrices, fp8, tiles
from zerojax.tree import PyTree
from zerojax.zero.blocks import hooks
from zerojax.zero.fp8 import history as history_lib
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.weights import placement
from zerojax.zero.wires import fp8 as fp8_wire

FIELD, FORM = "dot_general", "form"  # of modules with one kernel, and of mixtures of experts
MOST_STEPS = 4096  # of a history
_FIRST_GPU = 8.9
_TPUS = ("TPU v5", "TPU v5p", "TPU7x")


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Which matmuls of a train step run in fp8, and how.

    Attributes:
      recipe: "tensorwise", "delayed" or "rowwise"; see `ops.fp8`.
      filter: a regex over full module paths (r"layer_\\d+/mlp/\\w+"); "": every module with a kernel inside blocks. Modules that it matches
        outside of blocks take part too.
      first, last: the number of blocks at the beginning and the end of each stack whose matmuls keep their dtype.
      history: the number of steps whose magnitudes "delayed" remembers.
      experts: whether experts' matrices of mixtures (`models.experts`) take part, by the paths of their weights (r"layer_\\d+/experts/up");
        with "tensorwise" scales alone.
      dtype: of all else in the forward pass, where it is given as `compute_dtype`; None: the stored one.
    """

    recipe: str = fp8.TENSORWISE
    filter: str = ""
    first: int = 0
    last: int = 0
    history: int = 16
    experts: bool = False
    dtype: Any = None

    def __post_init__(self) -> None:
        errors.one_of("recipe", self.recipe, fp8.RECIPES)
        precision.floating("fp8.dtype", self.dtype)
        errors.regex("fp8.filter", self.filter, "pass one over module paths, such as 'layer_\\d+/mlp/.*'")
        for name in ("first", "last"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise UserError(f"fp8.{name}: must be a number of blocks, 0 or more, and is {getattr(self, name)!r}")
        if not isinstance(self.history, int) or not 1 <= self.history <= MOST_STEPS:
            raise UserError(f"fp8.history: must be a number of steps from 1 to {MOST_STEPS}, and is {self.history!r}")
        if self.experts and self.scales != fp8.Recipe():
            raise UserError(
                f"fp8.experts: experts' products have one scale for each array, and fp8.recipe is {self.recipe!r}; take "
                f"{fp8.TENSORWISE!r}, or set fp8.experts to False"
            )

    @property
    def scales(self) -> fp8.Recipe:
        """Returns how arrays are scaled."""
        return fp8.RECIPES[self.recipe]

    def one_program(self) -> placement.OneProgram | None:
        """Returns why a step with this recipe is one program, or None."""
        if not self.scales.remembers:
            return None
        why = f"is {self.recipe!r} and keeps magnitudes in the state, which one program hands on"
        return placement.OneProgram("fp8.recipe", why, f"take {fp8.TENSORWISE!r}")

    def init(self, params: PyTree, blocks: str = "") -> PyTree:
        """Returns the first value of the train state's field `fp8`: a history for each module ("delayed"), or () for other recipes.

        Args:
          params: the weights, or their shapes.
          blocks: the regex that `make_train_step` gets.
        """
        if not self.scales.remembers:
            return ()
        paths = [path for path, _ in tree.flatten(params)]
        return history_lib.empty(chosen(self, paths, blocks).in_fp8, self.history)


class Chosen(NamedTuple):
    """The paths of the modules with a kernel whose matmuls run in fp8; of the modules and experts' matrices that keep their dtype; and of
    experts' matrices in fp8."""

    in_fp8: frozenset[str]
    others: frozenset[str]
    stacks: frozenset[str] = frozenset()

    @property
    def weights(self) -> frozenset[str]:
        """Returns the paths of the weights in fp8."""
        return self.stacks | {f"{path}/{fp8_wire.WEIGHT}" for path in self.in_fp8}


def chosen(settings: Fp8, weights: Iterable[str], blocks: str) -> Chosen:
    """Returns the modules whose matmuls run in fp8.

    Args:
      settings: what is asked for.
      weights: the paths of the params.
      blocks: a regex over the paths of blocks; "" for none.

    Raises:
      UserError: no module is left, or there are no blocks to choose from.
    """
    if not settings.filter and not blocks:
        raise UserError(
            "fp8.filter: is '', which means every block, and there are no `blocks`; pass either, a regex over module paths"
        )
    named, inside = re.compile(settings.filter), re.compile(blocks)
    below = [tree.below_params(path) for path in weights]
    stacks = _stacks(below) if settings.experts else frozenset()
    if settings.experts and not stacks:
        raise UserError(
            f"fp8.experts: no module has the weights {', '.join(expert_matrices.NAMES)} of a mixture's experts; set it to False"
        )
    block_of = {
        path.removesuffix(f"/{fp8_wire.WEIGHT}"): tree.block_of(path, inside) if blocks else None
        for path in below
        if path.endswith(f"/{fp8_wire.WEIGHT}") or path in stacks
    }
    kept = _ends({block for block in block_of.values() if block}, settings.first, settings.last)
    asked = [path for path, block in block_of.items() if (named.fullmatch(path) if settings.filter else block)]
    found = frozenset(path for path in asked if block_of[path] not in kept)
    if settings.experts and not found & stacks:
        raise UserError(
            "fp8.experts: the modules that are chosen include no experts; choose others, or set it to False"
        )
    if not found:
        if asked:
            raise UserError(
                f"fp8.first: {settings.first} and fp8.last={settings.last} leave no module of {len(asked)} in fp8; make them smaller"
            )
        pattern = f"fp8.filter: {settings.filter!r}" if settings.filter else f"fp8.filter: is '', and blocks={blocks!r}"
        raise UserError(
            f"{pattern} matches no module with a weight `{fp8_wire.WEIGHT}`; it is a regex over full module paths"
            f"{tree.such_as(settings.filter, block_of)}"
        )
    return Chosen(found - stacks, frozenset(block_of) - found, found & stacks)


def _stacks(weights: Collection[str]) -> frozenset[str]:
    """Returns the paths of experts' matrices, which are beside each other."""
    known = frozenset(weights)
    ends = {path.removesuffix(end) for path in known if path.endswith(end := f"/{expert_matrices.NAMES[0]}")}
    mixtures = [[f"{end}/{name}" for name in expert_matrices.NAMES] for end in ends]
    return frozenset(path for paths in mixtures if known.issuperset(paths) for path in paths)


def _ends(blocks: Collection[str], first: int, last: int) -> set[str]:
    """Returns the first and the last blocks of each stack; the blocks of a stack differ in the digits of their names."""
    stacks: dict[str, list[str]] = {}
    for block in sorted(
        blocks, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]
    ):
        stacks.setdefault(re.sub(r"\d+", "0", block), []).append(block)
    return {block for stack in stacks.values() for block in (*stack[:first], *stack[len(stack) - last :])}


def check_devices(mesh: Mesh) -> None:
    """Raises a UserError if the devices of a mesh multiply nothing in fp8. CPUs emulate it."""
    device = mesh.devices.flat[0]
    capability = mesh_lib.capability(mesh)
    is_old_gpu = device.platform == "gpu" and capability is not None and capability < _FIRST_GPU
    if is_old_gpu or (device.platform == "tpu" and device.device_kind not in _TPUS):
        raise UserError(
            f"fp8: {device.device_kind} has no arithmetic in fp8 (GPUs have it from compute capability {_FIRST_GPU}, Ada and Hopper, on); "
            "compute in bf16"
        )


def in_step(
    settings: Fp8 | None, loss_fn: Callable[..., Any], partition: partition_lib.Partition, blocks: str
) -> tuple[Callable[..., Any], partition_lib.Partition, hooks.Hooks]:
    """Returns a step's loss with its matmuls in fp8, a partition whose blocks gather weights in fp8, and the hooks that keep histories.

    These weights are those of chosen modules, if a weight has one scale. Without settings the arguments are returned.

    Raises:
      UserError: the devices have no fp8, or no module is chosen.
    """
    if settings is None:
        return loss_fn, partition, ()
    check_devices(partition.mesh)
    modules = chosen(settings, partition.placements, blocks)
    if settings.scales.remembers:
        if any(path in partition.on_host for path in partition.placements):
            raise UserError("fp8.recipe: 'delayed' does not go together with params in host memory; take 'tensorwise'")
        history_lib.check(partition.abstract_state, modules.in_fp8)
    matmuls = _Matmuls(modules, settings.recipe)
    if not settings.scales.by_row:
        partition = fp8_wire.marked(partition, modules.weights, matmuls.weights)
    kept = (matmuls.histories,) if settings.scales.remembers else ()
    return _in_fp8(loss_fn, modules, matmuls), partition, kept


def stateless(
    settings: Fp8 | None, loss_fn: Callable[..., Any], partition: partition_lib.Partition, blocks: str
) -> Callable[..., Any]:
    """Returns a loss outside of a step, with its matmuls in fp8 and no history. Without settings it is returned."""
    if settings is None:
        return loss_fn
    recipe = fp8.TENSORWISE if settings.scales.remembers else settings.recipe
    return wrapped(loss_fn, chosen(settings, partition.placements, blocks), recipe)


def wrapped(loss_fn: Callable[..., Any], modules: Chosen, recipe: str) -> Callable[..., Any]:
    """Returns a loss whose chosen Linen modules multiply in fp8.

    Raises:
      UserError: when called, if a chosen module takes no `dot_general`, or none is called.
    """
    return _in_fp8(loss_fn, modules, _Matmuls(modules, recipe))


def _in_fp8(loss_fn: Callable[..., Any], modules: Chosen, matmuls: "_Matmuls") -> Callable[..., Any]:
    @functools.wraps(loss_fn)
    def in_fp8(*args: Any, **kwargs: Any) -> Any:
        matmuls.entered.clear()
        with nn.intercept_methods(matmuls.intercept):
            result = loss_fn(*args, **kwargs)
        if not matmuls.entered:
            raise UserError(
                f"fp8.filter: the loss calls no Linen module of {', '.join(sorted(modules.in_fp8 | modules.stacks)[:3])}; an NNX module "
                "takes dot_general=zerojax.fp8.dot_general when it is created"
            )
        return result

    return in_fp8


def _paths_in_model(own: frozenset[str], others: frozenset[str]) -> frozenset[str]:
    """Returns the paths of chosen modules in the model. A loss may call a model with a part of the params, so they may begin later."""
    ends, of_others = (
        {"/".join(names[start:]) for names in (path.split("/") for path in paths) for start in range(len(names))}
        for paths in (own, others)
    )
    return own | (ends - of_others)


class _Matmuls:
    """The matmuls in fp8 of a loss, with the weights that blocks gather for them and the histories that they read."""

    def __init__(self, modules: Chosen, recipe: str):
        self._paths, self._recipe = _paths_in_model(modules.in_fp8, modules.others), recipe
        self._stacks = _paths_in_model(modules.stacks, modules.others)
        self.weights, self.histories = fp8_wire.BlockWeights(), history_lib.OfState()
        self.entered: set[str] = set()

    def _of_module(self, path: str) -> Callable[..., Any]:
        history, recipe = self.histories.of_module(path), self._recipe
        remembers = fp8.RECIPES[recipe].remembers
        if remembers and tiles.is_inside():
            raise UserError(
                f"fp8.recipe: 'delayed' remembers one magnitude of a matmul, and {path} runs in tiles (`over_tiles`); take 'tensorwise'"
            )
        if remembers and history is None:
            recipe = fp8.TENSORWISE  # a trace whose values nothing reads (`sharded_batch.dependence`)
        return functools.partial(
            fp8.dot_general, recipe=recipe, rhs_in_fp8=self.weights.of_module(path), history=history
        )

    def _of_stack(self, path: str, name: str, matrices: expert_matrices.Matrices) -> expert_matrices.Matrices:
        path = f"{path}/{name}"
        return expert_matrices.in_fp8(matrices, self.weights.of_weight(path)) if path in self._stacks else matrices

    def intercept(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if module.scope is None or context.method_name == "setup":
            return call(*args, **kwargs)
        path = "/".join(module.path)
        if hasattr(module, FORM) and any(f"{path}/{name}" in self._stacks for name in expert_matrices.NAMES):
            self.entered.add(path)
            with _field(module, FORM, functools.partial(self._of_stack, path)):
                return call(*args, **kwargs)
        if path not in self._paths:
            return call(*args, **kwargs)
        if FIELD not in {field.name for field in dataclasses.fields(module)}:
            raise UserError(
                f"fp8.filter: {path} is a {type(module).__name__}, which has no field `{FIELD}`; leave it out of fp8.filter, or give it one"
            )
        self.entered.add(path)
        with _field(module, FIELD, self._of_module(path)):
            return call(*args, **kwargs)


@contextlib.contextmanager
def _field(module: nn.Module, name: str, value: object) -> Any:
    """Sets a field of a bound module, which belongs to this trace, for one call."""
    before = getattr(module, name)
    object.__setattr__(module, name, value)
    try:
        yield
    finally:
        object.__setattr__(module, name, before)
