"""Checks the exchange of tokens by itself, against experts that a device has all of. This module tests zerojax.ops.expert_parallel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.ops import expert_parallel, experts

F32 = 2e-5  # float32 sums of some hundred terms, in another order
WAYS, TOKENS, DIM, WIDTH, EXPERTS, TOP = 4, 8, 16, 12, 8, 3


def apart(load, parts, x, logits, *matrices):
    """Returns what each of four devices makes of its tokens, with two experts a device."""
    mesh = mesh_lib.make_mesh(expert=WAYS, devices=jax.devices()[:WAYS])

    def on_device(x, logits, *matrices):
        with expert_parallel.used():
            shares = [expert_parallel.Stack(own, ("expert",), (P(),), load, parts) for own in matrices]
            seen = [expert_parallel.add(str(number), share) for number, share in enumerate(shares)]
            return experts.apply(x, experts.route(logits, TOP), *seen)

    every = P("expert")
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(every,) * 5, out_specs=every, check_vma=False)
    return run(x, logits, *matrices)


CASES = {"two parts": (1.0, 2), "one part": (1.0, 1), "room for all": (4.0, 1)}


@pytest.mark.parametrize("name", runs.cases(CASES, long=[*CASES][1:]))
def test_results_and_gradients_do_not_depend_on_where_experts_live_nor_on_the_load(name):
    random = np.random.default_rng(0)
    shapes = (WAYS * TOKENS, DIM), (EXPERTS, DIM, WIDTH), (EXPERTS, DIM, WIDTH), (EXPERTS, WIDTH, DIM)
    x, *matrices = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    drawn = random.normal(size=(WAYS * TOKENS, EXPERTS)).astype(np.float32)
    to_one, skewed = drawn.copy(), drawn.copy()
    to_one[:, :3] += 50  # the first device has all but a third of all rows, and the last two none
    skewed[:TOKENS, 5] += 50  # one device sends more to another than the rest do

    def all_here(x, logits, *matrices):
        return experts.apply(x, experts.route(logits, TOP), *matrices)

    def both(*arrays):
        def squares(run):
            return lambda *arrays: jnp.sum(run(*arrays) ** 2)

        runs_ = (lambda *arrays: apart(*CASES[name], *arrays), all_here)
        return [(run(*arrays), jax.grad(squares(run), argnums=(0, 1, 2, 3, 4))(*arrays)) for run in runs_]

    program = jax.jit(both)
    for logits in (drawn, to_one, skewed):
        ours, theirs = map(jax.tree.leaves, program(x, logits, *matrices))
        for own, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(own, other, atol=F32 * np.abs(other).max())


def test_bytes_of_a_round_are_those_of_its_room():
    assert expert_parallel.room(64, 8, 1.5) == 12 and expert_parallel.room(64, 8, 100.0) == 64
    assert expert_parallel.cost(64, 16, 8, 1.5, 2) == {
        "forward": 7 * 12 * (2 * 32 + 4),
        "backward": 7 * 12 * (3 * 32 + 8),
    }
