"""Compares a run with the memory of this host. This module refuses a run on CPU devices that cannot fit, before it allocates anything.

GPUs and TPUs have memory of their own, which the plan of the compiled step is compared with (`trainer.memory_guard`).
"""

import os
from typing import Any

import jax

from zerojax import display, errors, xla_flags
from zerojax import mesh as mesh_lib
from zerojax.data import batches
from zerojax.errors import UserError
from zerojax.zero import memory
from zerojax.zero.offload import budget

SHORT = "out of host memory"  # the start of the error messages
_POOL_IS_FULL = "Out of host memory while trying to allocate"  # what XLA says
WAY_OUT = "use a smaller model, batch or config.seq_len, fewer config.emulate_devices, or a host with more memory"


def check(program: Any) -> None:
    """Checks that the state and the batches of a `Program` fit into the memory of this host.

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
        held = sum(memory.bytes_per_device(program.partition).values())
        count = len(program.mesh.local_devices)
        refuse(
            f"the state of config.model (preset={chosen.preset}, num_layers={chosen.num_layers}, vocab_size={chosen.vocab_size}) "
            f"on {count} CPU devices",
            held * count,
        )


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
