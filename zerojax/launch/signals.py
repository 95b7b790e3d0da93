"""Stops all processes of a run together when one of them gets a signal. This module turns signals into a decision that all share."""

import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class StopSignal:
    """Turns the first SIGTERM or SIGINT into a request to stop after the step. A SIGINT after that interrupts.

    A context manager for the main thread. Its exit restores the former handlers. `requested` is whether this process got a signal.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = False
        self._former: dict[int, Any] = {}
        self._asked: jax.Array | None = None

    def __enter__(self) -> "StopSignal":
        self._former = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def agreed(self, *, at_once: bool = False) -> bool:
        """Returns on every process whether any process got a signal. Every process must call it once in a step.

        Each call dispatches a tiny reduction and reads the previous one, so that no device waits. The result is therefore one call
        late, unless `at_once` is True. With one process it is `requested`.
        """
        if jax.process_count() == 1:
            return self.requested
        if at_once:
            return agreed(self.requested)
        before, self._asked = self._asked, _any(self.requested)
        return before is not None and bool(jax.device_get(before))

    def _handle(self, number: int, frame: object) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


def agreed(stop: bool) -> bool:
    """Returns whether any process passed True. Every process must call it at the same step.

    It waits for the devices to finish all dispatched work. In a loop, use `StopSignal.agreed`.
    """
    return stop if jax.process_count() == 1 else bool(jax.device_get(_any(stop)))


def _any(stop: bool) -> jax.Array:
    """Dispatches a reduction of `stop` over all processes. The result is bool[], replicated."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    sharding = jax.NamedSharding(mesh, jax.P("all"))
    with jax.transfer_guard("allow"):  # one byte a device
        stops = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.full(1, stop))
    return jax.jit(jnp.any, out_shardings=jax.NamedSharding(mesh, jax.P()))(stops)
