"""Compares a run with the memory of this host. This module refuses a run on CPU devices that cannot fit, before it allocates anything, and
counts what a run will pin.

GPUs and TPUs have memory of their own, which the plan of the compiled step is compared with (`memory_guard`).
"""

import os
import re
import warnings

import jax
import jax.numpy as jnp

from zerojax import display, errors, roles, tree, xla_flags
from zerojax import mesh as mesh_lib
from zerojax.data import batches
from zerojax.errors import UserError
from zerojax.models import family as family_lib
from zerojax.trainer import config as config_lib
from zerojax.trainer import model as model_lib
from zerojax.trainer import program as program_lib
from zerojax.trainer import setting_names
from zerojax.trainer import settings as settings_lib
from zerojax.trainer import weights as weights_lib
from zerojax.zero import state_bytes
from zerojax.zero.host import budget
from zerojax.zero.host import settings as offload_settings
from zerojax.zero.pipeline import order as order_lib

SHORT = "out of host memory"  # the start of the error messages
_POOL_IS_FULL = "Out of host memory while trying to allocate"  # what XLA says
WAY_OUT = "use a smaller model, batch or config.seq_len, fewer config.emulate_devices, or a host with more memory"


def check(program: program_lib.Program) -> None:
    """Checks that the state and the batches of a program fit into the memory of this host.

    Raises:
      UserError: they do not. The line names both sizes.
    """
    chosen, sizes = program.config.model, program.sizes
    tokens = sum(leaf.size * leaf.dtype.itemsize for leaf in program.abstract_batch.values())
    made = tokens // jax.process_count() * (batches.PREFETCHED + 1)
    refuse(
        f"a batch of config.global_batch_size={sizes.global_batch_size} (micro_batch_size={sizes.micro_batch_size}, "
        f"grad_accum={sizes.grad_accum}) sequences of config.seq_len={program.config.seq_len}",
        made,
    )
    if mesh_lib.platform(program.mesh) == "cpu":
        held = sum(state_bytes.bytes_per_device(program.partition).values())
        count = len(program.mesh.local_devices)
        refuse(
            f"the state of config.model (preset={chosen.preset}, num_layers={chosen.num_layers}, vocab_size={chosen.vocab_size}) "
            f"on {count} CPU device{'s' if count > 1 else ''}",
            held * count,
        )


@setting_names.errors_of_config()
def most_pinned_bytes(config: settings_lib.Config) -> int:
    """Returns an upper bound of the bytes of host memory that all processes of a run pin together. Uses no device."""
    chosen = config_lib.make_offload(config.offload, config.zero.stage)
    if not chosen.is_on:
        return 0
    if offload_settings.HOST not in (chosen.optimizer, chosen.params):
        return 0  # what is in flight to a disk fits into the pool of XLA's own choice, or `budget` tells
    source = model_lib.source(config)
    family, model = model_lib.shape(config, source)
    policy = config.policy
    has_params = chosen.params != offload_settings.NONE  # with a 16-bit copy, as at stage 2
    stage = 2 if has_params else config.zero.stage
    each = state_bytes.bytes_per_parameter(policy, stage, 1, moments=config.optimizer.moments)
    with warnings.catch_warnings(action="ignore"):  # `program.build` repeats them
        weights = weights_lib.choose(config, family, model, source)
    params, trainable = weights.abstract(policy, config.lora.frozen_dtype), weights.trainable
    if weights.adapted is not None:
        each |= {roles.PARAMS: jnp.dtype(policy.weight_dtype).itemsize, roles.MASTER: 0.0}  # adapters have no copy
    of_opt_state = 0.0 if chosen.optimizer == offload_settings.NVME else each[roles.MASTER] + each[roles.MOMENTS]
    leaves = tree.flatten(params)
    trained = [leaf.size for path, leaf in leaves if re.search(trainable, path)]
    frozen = sum(tree.nbytes(leaf) for path, leaf in leaves if not re.search(trainable, path))
    of_params = (each[roles.PARAMS] * sum(trained) + frozen) if chosen.params == offload_settings.HOST else 0.0
    held = of_params * chosen.params_fraction + of_opt_state * sum(trained) * chosen.fraction
    new = chosen.chunks_at_once * chosen.chunk_bytes
    new += budget.NEW_PARAMS.get(chosen.params, 0) * each[roles.PARAMS] * max(trained)
    return round(held * config.mesh.replica + new)


@setting_names.errors_of_config()
def most_offloaded_activations(config: settings_lib.Config) -> int:
    """Returns an upper bound of the bytes of activations that `model.offload` keeps in host memory, on all devices that the config names.

    Of a layer it is the input, of a linear module its result. A pipeline keeps them of all micro-batches that wait for their backward pass.
    Uses no device; where the config derives the devices, one is counted.
    """
    if not config.model.offload:
        return 0
    source = model_lib.source(config)
    family, model = model_lib.shape(config, source)
    pattern, width = re.compile(config.model.offload), jnp.dtype(config.policy.compute_dtype).itemsize
    features: dict[str, int] = {}
    for path, leaf in tree.flatten(family_lib.abstract_params(family.parts, model)):
        *modules, name = tree.below_params(path).split("/")
        for depth in range(1, len(modules) + 1):
            features.setdefault("/".join(modules[:depth]), model.embed_dim)
        if name == "kernel":
            is_back = leaf.shape[-1] == model.embed_dim  # to the residual stream, perhaps from heads
            features["/".join(modules)] = model.embed_dim if is_back else tree.size(leaf) // leaf.shape[0]
    kept = sum(count for path, count in features.items() if pattern.fullmatch(path))
    passes = max(1, config.grad_accum)
    rows = config.global_batch_size // passes or config.micro_batch_size * config.mesh.replica * max(
        1, config.mesh.data
    )
    pipe = config.mesh.pipe
    order = order_lib.make(config.pipeline.schedule, pipe, passes, chunks=config.pipeline.chunks) if pipe > 1 else None
    waiting = max(map(order.alive, range(pipe))) if order else 1
    return kept * rows * config.seq_len * width * waiting


def refuse(what: str, needed: int) -> None:
    """Raises a UserError if this host has less memory than needed."""
    there = total()
    if needed > there:
        raise UserError(
            f"{SHORT}: {what} needs {display.human(needed)}, and this host has {display.human(there)}; {WAY_OUT}"
        )


def short(error: Exception) -> UserError | None:
    """Returns the error that ends a run whose host ran out of memory, or None if an exception has another reason."""
    if _POOL_IS_FULL in str(error):
        return UserError(
            f"{SHORT}: XLA's pool of pinned memory has {xla_flags.pinned_pool_gb():g} GiB, and no free place in it is large enough; "
            f"set the environment variable {xla_flags.PINNED_POOL} to more before the start, if this host has more, or offload less "
            "(config.offload.fraction, config.offload.params_fraction)"
        )
    if not errors.is_host_memory_full(error):
        return None
    return UserError(f"{SHORT} ({errors.first_line(error)}), and this host has {display.human(total())}; {WAY_OUT}")


def total() -> int:
    """Returns the bytes of memory that this process may use: the machine's, or its container's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = budget.read_host().allowed
    return machine if allowed is None else min(machine, allowed)
