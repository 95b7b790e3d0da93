"""Finds defects of a compiled train step and names a fix for each. This module holds the rules and their table.

Each rule compares the compiled program with the plan, and never reads the source: a defect counts only if it is in the compiled program.
To add a rule, write a function of a `Case` and list it in RULES.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from zerojax import display, roles, tree
from zerojax import mesh as mesh_lib
from zerojax.clock import kernels, walk
from zerojax.clock import rates as rates_lib
from zerojax.hlo import buffers, collectives, parameters, syntax
from zerojax.ops import tiles
from zerojax.plan import attribution, matmuls
from zerojax.plan import bound as bound_lib
from zerojax.plan import ledger as ledger_lib
from zerojax.zero.host import groups

SHARE = 0.01  # of the parameters, or of the state's bytes; less is not reported
EXPOSED = 0.4  # of the bytes of a ring's hops: that of two devices has a third with nothing beside them
WAITS = 0.25  # of a step: 1F1B on two groups with three micro-batches or more waits less
ALONE = 0.5  # of the bytes of tokens that travel to their experts: in two parts less, in one part three quarters
PAYS = 0.02  # of a step's time, which another form of sending must save
LARGE = 0.2  # of the peak; less than that tiles need not save
_ACTIVATIONS = (roles.ACTIVATIONS, roles.ACTIVATION_GRADIENTS)
_NAMED = 3  # leaves that a finding names; it counts the rest
# Primitives of explicit collectives. A collective that the partitioner inserts has the name of the operation that needs it.
_WRITTEN = frozenset(
    "all_gather all_to_all ppermute psum psum_scatter reduce_scatter ragged_all_to_all pbroadcast".split()
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One defect: its rule, where it is, its cost on each device (bytes sent in a step, or bytes held), the remedy, and by how much shorter
    a step would be at most with it, by the clock (0: unknown, or none)."""

    rule: str
    where: str
    amount: str
    remedy: str
    nbytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """The inputs of the rules.

    Attributes:
      ledger: the compiled step's.
      planned: the leaves of the state that the plan wants the step to take, by path.
      is_16_bit: whether the forward pass computes in 16 bits.
      passes: forward and backward passes in a step.
      copies: of activations to host memory.
      at_peak, peak: the temporaries that are alive at the peak, and its bytes.
      free: bytes of a device's memory that the step's own peak leaves; None if unknown.
      waits: the share of a step in which the groups of a pipeline wait by their schedule alone.
      foretold, rates: the step's time by the clock, and the rates that it read; None if unknown.
    """

    ledger: ledger_lib.Ledger
    planned: Mapping[str, Any]
    is_16_bit: bool
    passes: int = 1
    copies: bound_lib.Copies | None = None
    at_peak: Sequence[buffers.Temporary] = ()
    peak: int = 0
    free: int | None = None
    waits: float = 0.0
    foretold: walk.StepTime | None = None
    rates: rates_lib.GpuRates | None = None
    known: walk.Known = dataclasses.field(default_factory=dict)

    def saved(self, rows: Sequence[ledger_lib.Row], left: float) -> float:
        """Returns by how many seconds a step would be shorter if so much were left of what collectives send of these rows; 0 if unknown."""
        shorter = self.shorter(rows, left)
        return 0.0 if self.foretold is None or shorter is None else max(0.0, self.foretold.seconds - shorter.seconds)

    def shorter(self, rows: Sequence[ledger_lib.Row], left: float) -> walk.StepTime | None:
        """Returns the time of such a step; None if it is unknown."""
        if self.foretold is None or self.rates is None or not self.foretold.spans:
            return None
        fewer, all_of = dict[tuple[str, str], float](), dict[tuple[str, str], float]()
        for found, own in ((fewer, rows), (all_of, self.rows)):
            for row in own:
                key = row.computation, row.name
                found[key] = found.get(key, 0.0) + row.nbytes
        sent = {key: max(0.0, 1 - (1 - left) * nbytes / all_of[key]) for key, nbytes in fewer.items() if nbytes}
        mesh = self.ledger.mesh
        per_host = bound_lib.per_host(mesh)
        return walk.walk(self.ledger.flow, self.rates, mesh.size, per_host, known=self.known, sent=sent)

    @property
    def rows(self) -> tuple[ledger_lib.Row, ...]:
        return self.ledger.rows

    @property
    def is_cpu(self) -> bool:
        return self.ledger.mesh.devices.flat[0].platform == "cpu"


def findings(
    ledger: ledger_lib.Ledger, *, planned: Any = None, compute_dtype: DTypeLike | None = None, **known: Any
) -> tuple[Finding, ...]:
    """Returns the defects of a step: those that cost the most time first, then those of the most bytes.

    Args:
      ledger: the compiled step's.
      planned: the state that the plan wants the step to take: a pytree of ShapeDtypeStructs with shardings
        (`Partition.abstract_state`). Without it, the rules about shardings and memory kinds find nothing.
      compute_dtype: the dtype of the forward pass. If None, the dtype of most of the program's matmuls.
      **known: other fields of a `Case`.
    """
    is_16_bit = (
        _computes_in_16_bits(ledger.flow.module) if compute_dtype is None else jnp.dtype(compute_dtype).itemsize == 2
    )
    case = Case(ledger, dict(tree.flatten(planned)), is_16_bit, **known)
    defects = [finding for rule in RULES for finding in rule(case)]
    return tuple(sorted(defects, key=lambda finding: (-finding.seconds, -finding.nbytes)))


def gradients_all_reduced(case: Case) -> Iterable[Finding]:
    """Finds gradients that the program all-reduces although the plan shards them."""
    weights = case.ledger.weights
    rows = [
        row
        for row in case.rows
        if row.role == roles.GRADIENTS
        and row.kind == "all-reduce"
        and any(_is_unsharded(row, weights[path]) for path in row.weights)
    ]
    if rows and not case.is_cpu and _is_large(case, rows):  # whose compiler inserts no reduce-scatter
        yield _sent(
            "gradients are all-reduced, but the plan shards them",
            rows,
            "reduce-scatter each gradient: gather weights with zerojax.where_used, whose backward pass reduce-scatters. "
            "A with_sharding_constraint that replicates a weight replicates its gradient too",
            case.saved(rows, 0.5),
        )


def weights_gathered_in_float32(case: Case) -> Iterable[Finding]:
    """Finds weights that are gathered in 32 bits and used in 16."""
    stored_in_16_bits = _stored_in_16_bits(case)
    rows = [
        row
        for row in case.rows
        if row.kind == "all-gather"
        and row.dtype == "f32"
        and (
            row.role in (roles.WEIGHTS_FORWARD, roles.WEIGHTS_BACKWARD)
            or (row.role == roles.UPDATED_WEIGHTS and stored_in_16_bits & set(row.weights))
        )
    ]
    if rows and case.is_16_bit and not case.is_cpu and _is_large(case, rows):  # the CPU backend computes in 32 bits
        yield _sent(
            "weights are gathered in float32, but matmuls run in 16 bits",
            rows,
            "cast each weight's shard before the gather: zerojax.where_used(..., compute_dtype='bfloat16')",
            case.saved(rows, 0.5),
        )


def activations_resharded(case: Case) -> Iterable[Finding]:
    """Finds activations that the partitioner reshards without an explicit collective.

    The partitioner may gather activations to compute shards of a weight's gradient. That is no defect if it moves less than reducing
    the gradient would.
    """
    rows = [
        row
        for row in case.rows
        if row.role == roles.ACTIVATIONS
        and row.kind not in collectives.REDUCTIONS
        and row.op_name.rsplit("/", 1)[-1] not in _WRITTEN
        and not _is_tensor_parallel(row)
        and not _replaces_a_gradient(case.ledger, row)
    ]
    if rows and _is_large(case, rows, share=SHARE / 10):
        yield _sent(
            "activations are resharded",
            rows,
            "keep activations sharded on the batch dim: gather the weight where it is used (zerojax.where_used), or constrain the "
            "activation with zerojax.batch_sharding(mesh) before and after this operation",
            case.saved(rows, 0.0),
        )


def activations_gathered_in_float32(case: Case) -> Iterable[Finding]:
    """Finds activations that tensor parallelism gathers in 32 bits, though matmuls read them in 16."""
    rows = [
        row
        for row in case.rows
        if row.kind == "all-gather"
        and row.dtype == "f32"
        and _is_tensor_parallel(row)
        and row.op_name.rsplit("/", 1)[-1] not in _WRITTEN
    ]
    if rows and case.is_16_bit and not case.is_cpu and _is_large(case, rows, share=SHARE / 10):
        yield _sent(
            "activations are gathered in float32, but matmuls run in 16 bits",
            rows,
            "shard what the norm before them returns (`activations` of make_train_step), and cast inside the norm: the gather then follows "
            "the cast",
            case.saved(rows, 0.5),
        )


def _is_tensor_parallel(row: ledger_lib.Row) -> bool:
    return re.search(rf"\b{roles.TENSOR_PARALLEL}\b", row.op_name) is not None


def gathered_over_their_own_axes(case: Case) -> Iterable[Finding]:
    """Finds weights, or their gradients, gathered over an axis over which the plan uses them sharded: tensor parallelism undone."""
    weights = case.ledger.weights
    rows = [
        row
        for row in case.rows
        if row.kind == "all-gather" and row.weights and all(weights[path].axes & set(row.axes) for path in row.weights)
    ]
    axes = sorted({axis for row in rows for path in row.weights for axis in weights[path].axes & set(row.axes)})
    if rows and _is_large(case, rows):
        yield _sent(
            f"weights are gathered over {' and '.join(axes)}, over which they are used sharded",
            rows,
            "let no operation need the whole weight: inside a jax.shard_map of your own, run collectives over other axes, and kernels "
            f"that XLA cannot shard, in a nested one over {' and '.join(axes)}; or shard the weight's other dim (overrides)",
            case.saved(rows, 0.0),
        )


def gathered_weights_kept(case: Case) -> Iterable[Finding]:
    """Finds gathered weights that stay in memory until the backward pass reads them."""
    rows = [row for row in case.rows if row.is_kept]
    if rows and not case.is_cpu and _is_large(case, rows):  # whose compiler merges a second gather with the first
        held = sum(syntax.Array(row.dtype, tuple(row.dims)).nbytes * row.times for row in rows)
        yield Finding(
            "gathered weights are kept for the backward pass",
            _where(rows),
            f"{display.human(held)} held from the forward pass to the backward pass",
            "gather again in the backward pass, as zerojax.where_used does; or wrap each block and its gather in jax.checkpoint "
            "with a policy that saves no weight (jax.checkpoint_policies.nothing_saveable)",
            held,
        )


def reduced_in_every_pass(case: Case) -> Iterable[Finding]:
    """Finds replicated gradients that are all-reduced in every micro-batch."""
    weights = case.ledger.weights
    rows = [
        row
        for row in case.rows
        if row.role == roles.GRADIENTS
        and row.times >= case.passes > 1
        and all(math.prod(weights[p].grad) == weights[p].size for p in row.weights)
    ]
    if rows and _is_large(case, rows):
        yield _sent(
            f"replicated gradients are all-reduced in each of {case.passes} passes",
            rows,
            "use fewer and larger passes (a smaller grad_accum)"
            + ("" if case.waits else ", or accumulate each device's gradients in shard_map and reduce them once"),
            case.saved(rows, 1 / case.passes),
        )


def sharded_on_another_dim(case: Case) -> Iterable[Finding]:
    """Finds weights and gradients that an all-to-all moves from one sharded dim to another."""
    rows = [
        row
        for row in case.rows
        if row.role in roles.SENT_OF_WEIGHTS
        and "all-to-all" in row.kind
        and row.op_name.rsplit("/", 1)[-1] not in _WRITTEN
    ]
    if rows and _is_large(case, rows):
        yield _sent(
            "weights or gradients change their sharded dim",
            rows,
            "shard a weight, its gradient and its moments on the same dim, as zerojax.partition_state does, and constrain none of them "
            "to another dim",
            case.saved(rows, 0.0),
        )


def replicated_leaves(case: Case) -> Iterable[Finding]:
    """Finds leaves that are replicated in the program, or have larger shards than in the plan."""
    excess = {}
    for path, (parameter, leaf) in _arguments(case).items():
        planned = leaf.sharding.shard_shape(leaf.shape)
        if parameter.elements > math.prod(planned):
            excess[path] = parameter.arrays[0].nbytes - syntax.Array(parameter.arrays[0].dtype, planned).nbytes
    if excess:
        yield Finding(
            "leaves of the state are replicated, or have larger shards than planned",
            _listed(excess),
            f"{display.human(sum(excess.values()))} more on each device",
            "compile the step with the plan's shardings: jax.jit(..., in_shardings=(partition.shardings, None), "
            "out_shardings=(partition.shardings, None)), and shard the state with zerojax.shard_train_state",
            sum(excess.values()),
        )


def state_not_donated(case: Case) -> Iterable[Finding]:
    """Finds arguments that the step returns in new memory, so that the device holds both the old and the new state."""
    module = case.ledger.flow.module
    arguments = module.entry.parameters
    donated = set(module.aliases.values())
    root = module.entry.root
    new_outputs = [array for index, array in enumerate(root.arrays) if index not in module.aliases]
    held = {}
    for number, parameter in arguments.items():
        array = parameter.arrays[0] if parameter.arrays else None
        if array is not None and number not in donated and array in new_outputs:
            new_outputs.remove(array)
            held[parameters.path_of(parameter.op_name) or parameter.name] = array.nbytes
    total = sum(array.nbytes for p in arguments.values() for array in p.arrays)
    if sum(held.values()) > SHARE * total:
        yield Finding(
            "the state is not donated",
            _listed(held),
            f"{display.human(sum(held.values()))} held twice",
            "donate the old state, so that the new one reuses its memory: jax.jit(train_step, donate_argnums=0)",
            sum(held.values()),
        )


def offloaded_state_on_device(case: Case) -> Iterable[Finding]:
    """Finds leaves that the plan keeps in host memory and the program keeps in device memory."""
    on_device = {
        path: parameter.arrays[0].nbytes
        for path, (parameter, leaf) in _arguments(case).items()
        if leaf.sharding.memory_kind not in (None, "device") and not parameter.arrays[0].is_on_host
    }
    if on_device and not case.is_cpu:  # on the CPU, host and device memory are the same
        yield Finding(
            "offloaded state stays on the device",
            _listed(on_device),
            f"{display.human(sum(on_device.values()))} of device memory",
            "pass shardings with their memory kinds to jax.jit, as in_shardings and as out_shardings",
            sum(on_device.values()),
        )


def copies_outlast_the_forward_pass(case: Case) -> Iterable[Finding]:
    """Finds copies of activations to host memory that take longer than the forward pass beside which they run."""
    found = case.copies
    if found and found.seconds > found.forward:
        share = found.forward / found.seconds
        yield Finding(
            "copies to host memory outlast the forward pass",
            f"{found.seconds * 1e3:.0f} ms beside some {found.forward * 1e3:.0f} ms of forward pass",
            f"{display.human(found.nbytes)} sent by each device, with all devices of its host at once",
            f"offload at most {share:.0%} of it (model.offload), and recompute the rest (model.recompute) or keep it",
            found.nbytes,
            case.foretold.parts[walk.WAITS] if case.foretold else 0.0,
        )


def columns_send_more_than_weights(case: Case) -> Iterable[Finding]:
    """Finds matrices used by columns whose activations are more than their weights: with every device there are more examples."""
    sent = sum(row.nbytes for row in case.rows if re.search(rf"\b{roles.BY_COLUMNS}\b", row.op_name))
    moved = [row for row in case.rows if "all-to-all" in row.kind and row.op_name.endswith("all_to_all")]
    used = {path: row.ways for row in moved for path in row.weights}
    # Each pass would gather them in the compute dtype and sum their gradients in float32.
    passing = {p: case.ledger.weights[p].size * (ways - 1) // ways * case.passes for p, ways in used.items()}
    elements = sum(passing.values())
    nbytes = elements * (6 if case.is_16_bit else 8)
    if sent > nbytes > 0:
        yield Finding(
            "activations that are sent in place of weights are more than the weights",
            _listed(passing),
            f"each device receives {display.human(sent)} in a step; gathering the weights and summing their gradients takes "
            f"{display.human(nbytes)}",
            "gather them, if the memory allows: omit them from by_columns; or give each device fewer examples",
            sent - nbytes,
            case.saved([row for row in case.rows if re.search(rf"\b{roles.BY_COLUMNS}\b", row.op_name)], nbytes / sent),
        )


def matmuls_not_in_fp8(case: Case) -> Iterable[Finding]:
    """Finds matmuls that were asked for in fp8 and run in another dtype."""
    asked = [matmul for matmul in case.ledger.matmuls if matmul.wants_fp8]
    others = [matmul for matmul in asked if matmul.kind != matmuls.FP8]
    if others and not case.is_cpu:  # the CPU backend has no arithmetic in fp8
        kinds = ", ".join(dict.fromkeys(matmul.kind for matmul in others))
        count = sum(matmul.times for matmul in asked)
        yield Finding(
            "matmuls asked for in fp8 run in another dtype",
            _listed({f"{matmul.op_name} ({matmul.source})": matmul.times for matmul in others}),
            f"{sum(matmul.times for matmul in others)} of {count} matmuls run in {kinds}",
            "multiply the fp8 arrays themselves (zerojax.fp8.dot_general), and compile with xla_gpu_enable_triton_gemm=False, as "
            "make_train_step(..., fp8=zerojax.Fp8()) does",
        )


def all_tokens_at_once(case: Case) -> Iterable[Finding]:
    """Finds arrays of tokens x the inner width of an MLP that take a large part of the peak, where tiles would be much smaller."""
    matrices = [w.used for path, w in case.ledger.weights.items() if len(w.used) == 2 and re.search(r"\d", path)]
    widths = {max(dims) for dims in matrices if max(dims) >= 2 * min(dims)}
    wide: dict[str, int] = {}
    saved = 0.0
    for value in case.at_peak:
        dims = [int(dim) for dim in re.findall(r"\d+", value.type.partition("[")[2].partition("]")[0])]
        tokens = math.prod(dims[:-1]) if dims else 0
        if value.role in _ACTIVATIONS and dims and dims[-1] in widths and tokens >= tiles.MANY:
            name = f"{value.op_name.rpartition('/')[0].rpartition('/')[2]} {value.type.partition('{')[0]}"
            wide[name] = wide.get(name, 0) + value.nbytes
            saved += value.nbytes * (1 - tiles.USUAL / tokens)
    if saved > LARGE * case.peak:
        yield Finding(
            "an MLP makes arrays of all tokens",
            _listed(wide),
            f"they take {display.human(sum(wide.values()))} of the peak of {display.human(case.peak)}",
            f"run it for a tile of tokens at a time: tile_tokens={tiles.USUAL} would save some {display.human(saved)}, and so would "
            "zerojax.over_tiles in a model of your own. model.long_texts=True also keeps what attention returns (remat='attention'), and "
            "the inputs of layers in host memory (offload)",
            round(saved),
        )


def hops_exposed(case: Case) -> Iterable[Finding]:
    """Finds a ring of attention whose hops run beside nothing. The last hop of a backward pass has nothing beside it in any ring."""
    hops = [row for row in case.rows if row.kind == "collective-permute" and set(row.axes) & set(mesh_lib.TOKENS)]
    exposed = [row for row in hops if not (row.is_async and row.overlaps)]
    nbytes = sum(row.nbytes for row in exposed)
    if not case.is_cpu and nbytes > EXPOSED * sum(row.nbytes for row in hops) and _is_large(case, exposed):
        yield _sent(
            "hops of a ring have nothing beside them",
            exposed,
            "take zerojax.attention, whose hops are tied to a block of attention each; or let devices exchange heads (Ulysses), with a "
            "number of devices along `context` that divides the heads",
            case.saved(exposed, 0.0),
        )


def tokens_travel_alone(case: Case) -> Iterable[Finding]:
    """Finds all-to-alls of tokens to their experts that run beside no matmul, in a step that would be faster if they did."""
    rows = [row for row in case.ledger.exchanged if row.nbytes]
    alone = [row for row in rows if not (row.is_async and has_arithmetic(row))]
    nbytes = sum(row.nbytes for row in alone)
    if case.is_cpu or nbytes <= ALONE * sum(row.nbytes for row in rows) or not _is_large(case, alone):
        return
    if case.foretold is not None and case.foretold.parts[walk.EXPOSED] < PAYS * case.foretold.seconds:
        return
    yield _sent(
        "tokens travel to their experts with no matmul beside them",
        alone,
        "send them in two parts (expert_parts=2, or experts.parts=2 of a config), one beside the matmuls of the other; this pays where a "
        "part has enough rows an expert, some 256, to fill a matmul",
        case.saved(alone, 0.0),
    )


def experts_gathered_are_faster(case: Case) -> Iterable[Finding]:
    """Finds experts on several devices whose tokens cost more time than gathered weights would, which travel beside matmuls, and for which
    the memory has room."""
    apart = {path: weight for path, weight in case.ledger.weights.items() if weight.apart > 1}
    shorter = case.shorter(case.ledger.exchanged, 0.0) if apart and case.ledger.exchanged else None
    if case.is_cpu or shorter is None or case.foretold is None or case.rates is None:
        return
    further = {path: case.passes * weight.size * (weight.apart - 1) for path, weight in apart.items()}
    of_layers = collections.Counter[str]()
    for path, weight in apart.items():
        of_layers[groups.block_of(path)] += weight.size * (weight.apart - 1)
    # Two layers' weights are gathered at a time, and one layer's gradients not yet summed. The rooms of the exchange, which end, are not
    # counted.
    held = sum(of * (2 if case.is_16_bit else 4) for _, of in of_layers.most_common(2)) + 4 * max(of_layers.values())
    if case.free is not None and held > case.free:
        return
    room = "if the memory allows" if case.free is None else f"for which {display.human(case.free)} are free"
    # Both passes would gather them in the compute dtype, and sums of gradients are float32.
    nbytes = sum(further.values()) * (8 if case.is_16_bit else 12)
    mesh = case.ledger.mesh
    work = kernels.KernelWork(kernels.COLLECTIVE, "all-gather", nbytes=nbytes, group=tuple(range(mesh.size)))
    per_host = bound_lib.per_host(mesh)
    gathered = case.rates.seconds(work, per_host if per_host < mesh.size else 0)
    free = shorter.parts[kernels.MATMUL] + shorter.parts[walk.EXPOSED] - shorter.busy.get(kernels.COLLECTIVE, 0.0)
    seconds = case.foretold.seconds - shorter.seconds - max(0.0, gathered - max(0.0, free))
    if seconds < PAYS * case.foretold.seconds:
        return
    yield Finding(
        "gathered experts would be faster than tokens that travel to theirs",
        _listed(further),
        f"each device receives {display.human(sum(row.nbytes for row in case.ledger.exchanged))} of tokens in a step; gathering the "
        f"experts and summing their gradients takes {display.human(nbytes)}, beside matmuls",
        f"omit `expert` from the mesh (mesh.expert=1), {room}: a device then holds all experts of two layers at a time, and the "
        f"gradients of those of one, at most {display.human(held)} more",
        seconds=seconds,
    )


_RAGGED = re.compile(r"\bragged_dot\w*")
_TWIN = re.compile(r"\bgrouped_twin\b")  # `pallas_kernels.grouped.TWIN`


def every_expert_over_all_rows(case: Case) -> Iterable[Finding]:
    """Finds products of groups of rows that run as dense ones: every matrix over the rows of all groups."""
    found = [m for m in case.ledger.matmuls if _RAGGED.search(m.op_name) or _TWIN.search(m.op_name)]
    if found and not case.is_cpu:
        yield Finding(
            "experts multiply the rows of all others too",
            _listed({f"{matmul.op_name} ({matmul.source})": matmul.times for matmul in found}),
            f"{sum(matmul.times for matmul in found)} matmuls of a step take as many times the operations as there are experts",
            "take zerojax.ops.experts.apply, whose kernels on NVIDIA GPUs compute each row once, in place of jax.lax.ragged_dot; on TPUs "
            "there is no such kernel yet",
        )


def activations_leave_the_host(case: Case) -> Iterable[Finding]:
    """Finds an axis over which layers wait for activations and whose devices are on several hosts."""
    over = [row for row in case.rows if row.role in _ACTIVATIONS and set(row.axes) & set(mesh_lib.COMPILER)]
    far = [row for row in over if len(bound_lib.hosts(case.ledger.mesh, row.axes)) > 1]
    if far:
        sizes = mesh_lib.text(case.ledger.mesh, sorted({*far[0].axes} & {*case.ledger.mesh.shape}))
        yield _sent(
            f"layers wait for activations that travel between hosts, because {sizes} spans hosts",
            far,
            "keep the axis inside a host (a smaller mesh.model), and shard over data or context between hosts: their collectives run "
            "beside arithmetic",
            case.saved(far, 0.0),
        )


def layers_wait_for_examples(case: Case) -> Iterable[Finding]:
    """Finds layers that wait for the examples of other devices inside a host, where a ring would send them beside matmuls."""
    over = [row for row in case.rows if row.role in _ACTIVATIONS and set(row.axes) <= set(mesh_lib.COMPILER)]
    rows = [
        row for row in over if row.kind in ("all-gather", "reduce-scatter") and not _OF_VOCABULARY.search(row.op_name)
    ]
    of_examples = [
        row for row in rows if _dim(case, row) == 0 and len(bound_lib.hosts(case.ledger.mesh, row.over)) == 1
    ]
    seconds = case.saved(of_examples, 0.0) if of_examples else 0.0
    if case.foretold is not None and seconds > PAYS * case.foretold.seconds:
        yield _sent(
            "layers wait for activations over mesh.model",
            of_examples,
            "send them beside matmuls: model.ring=True, for decoders in 16 bits; or a smaller mesh.model, if the memory allows",
            seconds,
        )


# The embedding and the loss, which run in no ring.
_OF_VOCABULARY = re.compile(rf"\b{roles.TENSOR_PARALLEL}/shard_map\b")
_DIMENSION = re.compile(r"dimensions=\{(\d+)\}")


def _dim(case: Case, row: ledger_lib.Row) -> int | None:
    """Returns the dim along which a collective gathers or scatters; None if it has none."""
    found = _DIMENSION.search(case.ledger.flow.module.computation(row.computation).by_name[row.name].attributes)
    return int(found[1]) if found else None


def groups_wait(case: Case) -> Iterable[Finding]:
    """Finds a pipeline whose groups wait for each other in a large share of the step, by its schedule alone."""
    if case.waits > WAITS:
        yield Finding(
            "groups of a pipeline wait for each other",
            "step",
            f"{case.waits:.0%} of the time, if all stages take equally long",
            f"take more micro-batches (grad_accum, now {case.passes}), smaller ones if the batch is to stay, or the schedule interleaved",
            seconds=case.waits * case.foretold.seconds if case.foretold else 0.0,
        )


_PACKED = re.compile(rf"\b({roles.PACKED_WEIGHT}|{roles.PACKED_GRADIENT})\b")
# Of what travels between hosts, the bytes of a value that packed wires leave, with scales: int8, int4, and none for the second gather.
_LEFT = {roles.WEIGHTS_FORWARD: 1 + 4 / 256, roles.WEIGHTS_BACKWARD: 0.0, roles.GRADIENTS: 0.5 + 4 / 256}
# Bytes of device memory for a value, read and written: a weight is unpacked, a gradient is packed and added up.
_HANDLED = {roles.WEIGHTS_FORWARD: 3, roles.WEIGHTS_BACKWARD: 3, roles.GRADIENTS: 4 + 1 + 1}


def links_between_hosts_are_slow(case: Case) -> Iterable[Finding]:
    """Finds a step that waits for weights and gradients between hosts, where packed wires would pay by the clock."""
    if case.foretold is None or case.rates is None:
        return
    saved, cost, rows = 0.0, 0.0, []
    for row in case.rows:
        by_host = bound_lib.hosts(case.ledger.mesh, row.over)
        is_plain = (
            not _PACKED.search(row.op_name) and row.kind in ("all-gather", "reduce-scatter") and len(row.dims) > 1
        )
        if len(by_host) > 1 and row.role in _LEFT and row.weights and is_plain:
            far = row.nbytes / min(by_host.values()) / case.rates.figures["network"]
            saved += far * (1 - _LEFT[row.role] * 8 / syntax.bits(row.dtype))
            cost += row.elements * _HANDLED[row.role] / case.rates.figures["bandwidth"]
            rows.append(row)
    gain = min(saved, case.foretold.parts[walk.EXPOSED]) - cost
    if gain > PAYS * case.foretold.seconds:
        yield Finding(
            "the step waits for weights and gradients between hosts",
            _where(rows),
            f"it waits {case.foretold.parts[walk.EXPOSED] * 1e3:.0f} ms of {case.foretold.seconds * 1e3:.0f}",
            "send fewer bits: wire.weights=int8, wire.gradients=int4 and wire.second_copy=True (zerojax.PackedWires); or take more "
            "examples a pass",
            sum(row.nbytes for row in rows),
            gain,
        )


def packed_inside_a_host(case: Case) -> Iterable[Finding]:
    """Finds packed weights and gradients that no link between hosts carries."""
    rows = [row for row in case.rows if _PACKED.search(row.op_name)]
    if rows and not case.is_cpu and all(len(bound_lib.hosts(case.ledger.mesh, row.over)) == 1 for row in rows):
        yield _sent(
            "weights or gradients are packed, and all devices are on one host",
            rows,
            "send them as they are (omit wire): inside a host collectives run beside arithmetic, and packing takes time and digits",
        )


RULES: tuple[Callable[[Case], Iterable[Finding]], ...] = (
    gradients_all_reduced,
    weights_gathered_in_float32,
    activations_resharded,
    activations_gathered_in_float32,
    gathered_over_their_own_axes,
    gathered_weights_kept,
    reduced_in_every_pass,
    sharded_on_another_dim,
    replicated_leaves,
    state_not_donated,
    offloaded_state_on_device,
    copies_outlast_the_forward_pass,
    columns_send_more_than_weights,
    matmuls_not_in_fp8,
    all_tokens_at_once,
    hops_exposed,
    tokens_travel_alone,
    experts_gathered_are_faster,
    every_expert_over_all_rows,
    activations_leave_the_host,
    layers_wait_for_examples,
    groups_wait,
    links_between_hosts_are_slow,
    packed_inside_a_host,
)


def has_arithmetic(row: ledger_lib.Row) -> bool:
    """Returns whether matmuls or attention run beside a collective."""
    return bool(row.overlaps.get("matmul") or row.overlaps.get("attention"))


def _computes_in_16_bits(module: syntax.Module) -> bool:
    """Returns whether most matmuls and convolutions read 16-bit floats."""
    counted = {True: 0, False: 0}
    for name in module.spans:
        if not module.mentions(name, "dot", "convolution", "custom-call"):
            continue
        computation = module.computation(name)
        for instruction in computation.instructions:
            operand = computation.by_name.get(instruction.operands[0]) if instruction.operands else None
            may_be_matmul = instruction.opcode in ("dot", "convolution", "custom-call")
            if operand is not None and may_be_matmul and collectives.work_kind(module, instruction) == "matmul":
                counted[syntax.bits(operand.arrays[0].dtype) <= 16] += 1
    return counted[True] > counted[False]


def _arguments(case: Case) -> dict[str, tuple[syntax.Instruction, Any]]:
    """Returns the program's parameters that are leaves of the planned state, by the leaf's path, each with the leaf."""
    index = tree.suffix_index(case.planned)
    arguments: dict[str, tuple[syntax.Instruction, Any]] = {}
    for parameter in case.ledger.flow.module.entry.parameters.values():
        label = parameters.path_of(parameter.op_name)
        path = tree.longest_suffix(index, label)
        if path is None or not label.endswith(path) or len(parameter.arrays) != 1:
            continue
        leaf = case.planned[path]
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            arguments[path] = (parameter, leaf)
    return arguments


def _stored_in_16_bits(case: Case) -> set[str]:
    """Returns the weights that the step takes in 16 bits. A 32-bit gather of one of these gathers its master copy."""
    index = tree.suffix_index(case.ledger.weights)
    # By weight: (length of the label, bits) of the argument with the shortest label. Labels of moments are longer.
    shortest: dict[str, tuple[int, int]] = {}
    for parameter in case.ledger.flow.module.entry.parameters.values():
        label = parameters.path_of(parameter.op_name)
        path = tree.longest_suffix(index, label)
        if path is not None and parameter.arrays:
            labelled = len(label), syntax.bits(parameter.arrays[0].dtype)
            shortest[path] = min(labelled, shortest.get(path, labelled))
    return {path for path, (_, bits) in shortest.items() if bits <= 16}


def _is_unsharded(row: ledger_lib.Row, weight: attribution.WeightDims) -> bool:
    """Returns whether a reduction sums an unsharded gradient that the plan shards. Sums of shards over replicas are as planned."""
    shards = weight.size // max(1, math.prod(weight.grad))
    return shards > 1 and math.prod(row.dims) == weight.size and row.ways % shards == 0


def _replaces_a_gradient(ledger: ledger_lib.Ledger, row: ledger_lib.Row) -> bool:
    """Returns whether gathering these activations replaces the reduction of a larger gradient, such as a large embedding's."""
    reduced = {path for other in ledger.rows if other.role == roles.GRADIENTS for path in other.weights}
    modules = {part for name in row.read_by for part in name.split("/")}
    replaced = [
        w.size
        for path, w in ledger.weights.items()
        if w.trainable and path not in reduced and path.split("/")[-2:-1] and path.split("/")[-2] in modules
    ]
    return attribution.is_backward(row.op_name) and row.elements <= max(replaced, default=0)


def _is_large(case: Case, rows: list[ledger_lib.Row], share: float = SHARE) -> bool:
    """Returns whether the rows move more than a share of the parameters."""
    return sum(math.prod(row.dims) * row.times for row in rows) > share * case.ledger.params


def _sent(rule: str, rows: list[ledger_lib.Row], remedy: str, seconds: float = 0.0) -> Finding:
    nbytes = sum(row.nbytes for row in rows)
    return Finding(rule, _where(rows), f"each device sends {display.human(nbytes)} in a step", remedy, nbytes, seconds)


def _where(rows: list[ledger_lib.Row]) -> str:
    """Names the weights of the rows, or if there are none, their operations and source lines."""
    named: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: -row.nbytes):
        source = f" ({row.source})" if row.source else ""
        read_by = f", read by {row.read_by[0]}" if row.read_by else ""
        name = row.weights[0] if row.weights else f"{row.op_name}{source}{read_by}"
        named[name] = named.get(name, 0) + row.nbytes
    return _listed(named)


def _listed(named: Mapping[str, int]) -> str:
    """Returns the costliest names, and the number of the others."""
    first = sorted(named, key=lambda name: -named[name])[:_NAMED]
    rest = len(named) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")
