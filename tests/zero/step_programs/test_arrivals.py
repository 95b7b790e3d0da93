"""Checks that a room of its own can store arguments of a step, and bring them. This module tests zerojax.zero.step_programs.arrivals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_nets import abstract
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.zero.step_programs import arrivals, blocks, programs, schedule

BY_RIDERS = 3  # of the weights


class Halved(arrivals.ArgumentSource):
    """Stores weights as halves, which arrive one program ahead: the first ones by themselves, the others as sums by programs."""

    paths = frozenset(f"params/{number}" for number in range(6))

    def arrivals(self, late, reads, values):
        return ByHalves(late, reads, values)


class ByHalves(arrivals.Arrivals):
    ahead = 1

    def __init__(self, late, reads, values):
        self.late, self._reads, self._values = set(late), reads, values[: len(late)]

    def rider(self, index):
        numbers = tuple(n for n in self.sent(index) if n < BY_RIDERS)
        return arrivals.Rider(
            [self._values[n] for n in numbers], numbers, lambda *halves: [half * 2 for half in halves]
        )

    def sent(self, index):
        return self._reads[index + 1] if index + 1 < len(self._reads) else ()

    def dropped(self, index):
        return set(self._reads[index])

    def begin(self, stored, follows):
        self._stored = stored
        return {n: stored[n] * 2 for n in self.sent(-1)}

    def before(self, index, values):
        values.update({n: self._stored[n] * 2 for n in self.sent(index) if n >= BY_RIDERS})
        return [self._stored[n] for n in self.rider(index).gives]


@pytest.mark.parametrize("source", [arrivals.ArgumentSource(), Halved()])
def test_a_run_is_the_same_wherever_its_arguments_come_from_and_holds_few_of_them(source):
    mesh = mesh_lib.make_mesh(8)
    here = NamedSharding(mesh, P())
    weights = [jax.device_put(np.full((4,), number + 1.0, np.float32), here) for number in range(6)]
    x = jax.device_put(np.arange(4.0, dtype=np.float32), here)

    def on_device(weights, x):
        for weight in weights:
            x = blocks._nested("forward", lambda weight, x: jnp.sin(x * weight))(weight, x)
        return x

    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    late = {number: path for number in range(6) if (path := f"params/{number}") in source.paths}
    cut = programs.cut(run, *abstract((weights, x)), late=late, source=source)
    stored = [weight / 2 for weight in weights] if late else weights
    held = []
    found = schedule.Schedule(cut)(stored, x, done=lambda _, __, values: held.append(len(values.keys() & late.keys())))
    np.testing.assert_array_equal(found, jax.jit(run)(weights, x))
    # The first reads x and the last writes the result; of those between, one has a rider.
    assert len({id(program.run) for program in cut.programs}) == (4 if late else 3)
    assert max(held) == (2 if late else 0)
