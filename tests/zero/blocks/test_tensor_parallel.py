"""Checks what is gathered and reduced over an axis of the compiler. This module tests zerojax.zero.blocks.tensor_parallel."""

import contextlib
import re

import compile_only
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import traces
from zerojax.clock import rates, walk
from zerojax.errors import UserError
from zerojax.plan import departures, findings, ledger
from zerojax.zero.blocks import tensor_parallel

WIDTH, HIDDEN, LENGTH = 64, 256, 128
TABLE = (
    (r"block_\d/mlp", (None, "model"), (None, None)),
    (r".*/wide", (None, None, "model")),
    (r".*norm", P(None, "model")),
)
OVERRIDES = [("wide/kernel", P(None, "model")), ("narrow/kernel", P("model"))]


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        wide = [nn.Dense(HIDDEN, use_bias=False, dtype=jnp.bfloat16, name=f"{n}/wide") for n in range(2)]
        return nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16, name="narrow")(wide[0](x) * wide[1](x)), None


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x)
        return x + MLP(name="mlp")(y)[0]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = Block(name=f"block_{number}")(x)
        return x


def compiled(table, mesh):
    net = Net()

    def create(key):
        params = net.init(key, jnp.zeros((1, LENGTH, WIDTH), jnp.bfloat16))["params"]
        return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1))

    state = jax.eval_shape(create, jax.random.key(0))
    partition = zerojax.partition_state(state, mesh=mesh, stage=3, overrides=OVERRIDES)

    def loss_fn(params, batch, state):
        return jnp.mean((net.apply({"params": params}, batch) - batch).astype(jnp.float32) ** 2)

    how = {"compute_dtype": jnp.bfloat16, "reduce_dtype": jnp.float32, "remat": "dots"}
    step = zerojax.make_train_step(loss_fn, partition, blocks=r"block_\d", activations=table, **how)
    batch = jax.ShapeDtypeStruct((16, LENGTH, WIDTH), jnp.bfloat16)
    return partition, compile_only.compile_gpu(step.lower(partition.abstract_state, batch))


@pytest.mark.parametrize("first", ["model", pytest.param(None, marks=runs.LONG)])
def test_activations_are_gathered_once_for_all_matmuls_and_in_16_bits(first):
    """A block gathers its norm's result and sums its own; backward it gathers one gradient and sums the other. What is gathered over
    examples is not transposed."""
    mesh = zerojax.make_mesh(model=4, devices=compile_only.devices())
    rest = (first, "model")
    partition, text = compiled(((TABLE[0][0], rest, (None, None)), TABLE[1], (TABLE[2][0], rest)), mesh)
    assert bool(re.search(rf"= bf16\[\d,{LENGTH},{WIDTH}\]\S* fusion\(%all-gather", text)) == (first is None)
    found = ledger.ledger(text, mesh, partition.placements)
    moved = [row for row in found.rows if row.axes == ("model",) and row.elements > 1000]
    assert {row.dtype for row in moved} == {"bf16"}
    # The second gather of a norm's result is for the gradients of the matmuls that read it: 2 + 1 a block.
    assert sorted(row.kind for row in moved) == ["all-gather"] * 6 + ["reduce-scatter"] * 4
    assert {row.role for row in moved} == {"activations"}
    assert not findings.findings(found, compute_dtype=jnp.bfloat16)
    assert not departures.departures(found)
    foretold = walk.walk(found.flow, rates.of("h200"), 8)
    timed = findings.findings(found, compute_dtype=jnp.bfloat16, foretold=foretold, rates=rates.of("h200"))
    # Nothing is beside any of these; a ring of examples would send them beside matmuls.
    assert [finding.rule for finding in timed] == ["layers wait for activations over mesh.model"] * bool(first)
    assert all(0 < one.seconds < foretold.seconds for one in timed)


def test_what_an_axis_does_not_divide_and_modules_outside_of_the_table_stay_as_they_are():
    mesh = zerojax.make_mesh(data=2, model=4)
    (hook,) = tensor_parallel.hooks_of(((".*norm", (None, "model")),), mesh)
    net = Net()
    x = jnp.ones((2, 7, WIDTH), jnp.bfloat16)
    params = net.init(jax.random.key(0), x)
    with hook.known({}), hook.known({}):
        text = str(jax.make_jaxpr(net.apply)(params, x))
    assert "sharding_constraint" not in text
    (hook,) = tensor_parallel.hooks_of(TABLE, mesh)
    with hook.known({}):
        text = str(jax.make_jaxpr(net.apply)(params, jnp.ones((2, 8, WIDTH), jnp.bfloat16)))
    assert re.findall("sharding_constraint", text)
    assert tensor_parallel.hooks_of(TABLE, zerojax.make_mesh(data=8)) == ()


@pytest.mark.parametrize("examples, tokens, dim", [(4, 6, 0), (3, 6, 1), (3, 5, None), (2, 6, 0)])
def test_an_axis_that_a_spec_names_twice_shards_examples_where_it_divides_them_and_else_tokens(examples, tokens, dim):
    """Where the compiler shards the examples too, tokens alone. Values do not change."""
    mesh = zerojax.make_mesh(data=2, model=2, devices=jax.devices()[:4])
    (hook,) = tensor_parallel.hooks_of([("norm", ("model", "model"))], mesh)
    block = Block()
    x = jax.random.normal(jax.random.key(0), (2 * examples, tokens, WIDTH), jnp.bfloat16)
    params = block.init(jax.random.key(1), x)

    def shard(x):
        with hook.known({}):
            return block.apply(params, x)

    by_hand = jax.shard_map(shard, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    for run, chosen in ((by_hand, dim), (shard, None if tokens % 2 else 1)):
        closed = jax.make_jaxpr(run)(x)
        found = {
            number
            for equation in traces.equations(closed.jaxpr)
            if equation.primitive.name == "sharding_constraint"
            for number, entry in enumerate(equation.params["sharding"].spec)
            if entry == "model"
        }
        assert found == ({chosen} - {None})
        np.testing.assert_array_equal(jax.jit(run)(x), jax.jit(block.apply)(params, x))


@pytest.mark.parametrize(
    "row", [("(", (None,)), ("norm",), ("norm", 3), 5, ("norm", (), (), ()), (b"norm", ("model",))]
)
def test_a_row_that_is_no_regex_with_specs_is_refused(row):
    with pytest.raises(UserError, match=r"^activations: each is \(regex over module paths"):
        tensor_parallel.hooks_of((row,), zerojax.make_mesh(model=8))


def test_rows_that_match_no_module_and_features_of_a_ring_that_are_not_those_of_their_weight_are_refused():
    x = jnp.ones((8, 2, 4))
    net = Sharing(shares=False)
    params = net.init(jax.random.key(1), x)["params"]
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(1.0))
    mesh = zerojax.make_mesh(model=2, devices=jax.devices()[:4])
    partition = zerojax.partition_state(
        state, mesh=mesh, min_size=8, overrides=[("wide/kernel", P("model")), OVERRIDES[1]]
    )
    ring = [(r".*/wide", P(None, None, "model")), (r".*/mlp", P("model", "model"), P(), "(wide|narrow)/kernel")]
    for table, words in (
        ([("mpl", P(None, "model"))], r"^activations: no row matches a module of Linen .* the first is 'mpl'; "),
        (
            ring,
            r"^activations: block_0/mlp runs in a ring, and a module in it has other features than its weight there",
        ),
    ):
        step = zerojax.make_train_step(
            lambda params, batch, _: jnp.mean(net.apply({"params": params}, batch)),
            partition,
            blocks=r"block_\d",
            reduce_dtype=jnp.float32,
            activations=table,
        )
        with pytest.raises(UserError, match=words):
            step.trace(partition.abstract_state, x)


def test_an_axis_of_the_batch_is_refused():
    with pytest.raises(
        UserError, match=r"^activations: .* names 'data', over which the compiler does not shard; name model"
    ):
        tensor_parallel.hooks_of((("norm", ("data",)),), zerojax.make_mesh(model=8))


class Narrow(nn.Module):
    beside: nn.Module | None

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4, use_bias=False, name="narrow")(jnp.tanh(nn.Dense(8, use_bias=False, name="wide")(x)))
        return y if self.beside is None else y + self.beside(x)


class Adding(nn.Module):
    beside: nn.Module | None

    @nn.compact
    def __call__(self, x):
        return x + Narrow(self.beside, name="mlp")(x)


class Sharing(nn.Module):
    """Two blocks, whose MLPs call a module that neither owns, if `shares` says so."""

    shares: bool

    @nn.compact
    def __call__(self, x):
        beside = nn.Dense(4, name="beside") if self.shares else None
        return Adding(beside, name="block_1")(Adding(beside, name="block_0")(x))


@pytest.mark.parametrize("shares", [False, True])
def test_a_module_that_calls_one_from_elsewhere_runs_in_no_ring(shares):
    net, x = Sharing(shares), jax.random.normal(jax.random.key(0), (8, 2, 4))
    params = net.init(jax.random.key(1), x)["params"]
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(1.0))
    loss_fn = lambda params, batch, _: jnp.mean((net.apply({"params": params}, batch) - 1) ** 2)  # noqa: E731
    expected, grads = jax.value_and_grad(loss_fn)(params, x, None)
    mesh = zerojax.make_mesh(model=2, devices=jax.devices()[:4])
    state, partition = zerojax.shard_train_state(state, mesh=mesh, stage=3, min_size=8, overrides=OVERRIDES)
    table = [(r".*/wide", P(None, None, "model")), (r"block_\d/mlp", P("model", "model"), P(), "(wide|narrow)/kernel")]
    step = zerojax.make_train_step(loss_fn, partition, blocks=r"block_\d", reduce_dtype=jnp.float32, activations=table)
    told = pytest.warns(UserWarning, match=r"^activations: no module that 'block_.*mlp' matches runs in a ring")
    with told if shares else contextlib.nullcontext():
        traced = step.trace(state, x)
    assert ("ppermute" in str(traced.jaxpr)) == (not shares)
    state, metrics = step(state, x)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    moved = jax.tree.map(jnp.subtract, params, jax.device_get(state.params))
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, atol=1e-6), moved, grads)
