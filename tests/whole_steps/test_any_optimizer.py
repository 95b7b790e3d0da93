"""Compares optax's optimizers with plain optax on one device, at every kind of setting. This module tests whole steps."""

import functools
import itertools
from typing import Any

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState
from optax import contrib

import zerojax
from zerojax.optim import locality

ROWS, STEPS, RATE = 16, 2, 1e-2
ROUNDING = 3e-6  # the same float32 terms, summed in another order, through two steps
X = arrays.normal(1, (ROWS, 8))


def named(module: Any, names: str) -> dict[str, Any]:
    return {name: getattr(module, name)(RATE) for name in names.split()}


OPTIMIZERS = (
    named(
        optax,
        "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw novograd "
        "optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd sm3 yogi",
    )
    | named(
        contrib,
        "acprop ademamix adopt cocob dadapt_adamw dog dowg muon prodigy schedule_free_sgd simplified_ademamix",
    )
    | {
        "adafactor": optax.adafactor(RATE, min_dim_size_to_factor=8),
        "noisy_sgd": optax.noisy_sgd(RATE, eta=0.0, gamma=0.0, key=0),
        "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(RATE)),
        "every second step": optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
    }
)
# (stage, indivisible). At the first an elementwise optimizer updates sharded and padded leaves. Any other sees no padding there, and takes
# the second too, with sharded and replicated ones. At the last no leaf is sharded, so few optimizers take it.
PLACES = ((3, "pad"), (3, "whole"), (0, "whole"))
GRADIENTS = tuple(itertools.product((False, True), (None, jnp.float32)))  # (with blocks, reduce_dtype)


class Net(nn.Module):
    """Of the widths 12 and 16 the second divides by 8 devices: the leaves of the first are padded or replicated."""

    @nn.compact
    def __call__(self, x):
        make = functools.partial(nn.Dense, bias_init=nn.initializers.normal(0.5))
        return jnp.mean(jnp.tanh(make(16, name="wide")(jnp.tanh(make(12, name="narrow")(x)))) ** 2)


def loss_fn(params, batch, state):
    return Net().apply({"params": params}, batch)


# Their updates are made as those of the others: of each element by itself, or with norms of leaves, or with a number of all leaves.
ALIKE = (
    "adadelta adamax adamaxw adan amsgrad nadam nadamw optimistic_adam_v2 radam rmsprop sign_sgd yogi acprop ademamix adopt "
    "simplified_ademamix fromage lars cocob dadapt_adamw dog adabelief adagrad adam rprop lamb prodigy "
    "lion dowg novograd sm3 sgd optimistic_gradient_descent schedule_free_sgd"
).split()


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=runs.LONG if name in ALIKE else (), id=name) for n, name in enumerate(OPTIMIZERS)],
)
def test_optimizers_update_as_on_one_device(number):
    """At stages 3 and 0; the ways to get the gradients take turns."""
    plain = TrainState.create(
        apply_fn=None, params=Net().init(jax.random.key(0), X)["params"], tx=[*OPTIMIZERS.values()][number]
    )
    is_elementwise = locality.of(plain.tx, plain.params).kind == locality.ELEMENTWISE
    placed = []
    places = PLACES[: 1 if is_elementwise else 2] + PLACES[2:] * (number % 9 == 0)
    for turn, (stage, indivisible) in enumerate(places):
        with_blocks, reduce_dtype = GRADIENTS[(number + turn) % len(GRADIENTS)]
        on, part = zerojax.shard_train_state(
            plain, mesh=zerojax.make_mesh(), stage=stage, min_size=8, indivisible=indivisible
        )
        step = zerojax.make_train_step(
            loss_fn, part, blocks="wide|narrow" if with_blocks else "", reduce_dtype=reduce_dtype
        )
        for _ in range(STEPS):
            on, _ = step(on, X)
        placed.append(dict(jax.tree_util.tree_leaves_with_path(zerojax.unpad(on, part))))
    first = plain.params
    update = jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss_fn)(state.params, X, None)))
    for _ in range(STEPS):
        plain = update(plain)
    assert all((before != after).any() for before, after in zip(jax.tree.leaves(first), jax.tree.leaves(plain.params)))
    for path, expected in jax.tree_util.tree_leaves_with_path(plain):
        for turn, found in enumerate(placed):
            if not jnp.issubdtype(jnp.result_type(expected), jax.dtypes.prng_key):
                text = f"{path} at {places[turn]}"
                np.testing.assert_allclose(found[path], expected, atol=ROUNDING, rtol=2e-4, err_msg=text)
