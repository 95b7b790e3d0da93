"""Checks matrices of which each device uses columns, against one device and numpy. This module tests zerojax.zero.wires.columns."""

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.models import layers
from zerojax.zero import shard_state
from zerojax.zero.blocks import block_settings
from zerojax.zero.gradients import explicit
from zerojax.zero.sharded_batch import inputs
from zerojax.zero.weights import gather, placement
from zerojax.zero.wires import columns

BLOCKS = r"block_\d"


@pytest.mark.parametrize("mesh", [(1, 8), (2, 4)], ids=["8", "2 x 4"])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["rows", "columns"])
def test_columns_are_made_of_shards_along_either_dim_and_their_gradients_become_shards_again(mesh, spec):
    mesh, wire = mesh_lib.make_mesh(*mesh), columns.ByColumns()
    sharded, replicated = NamedSharding(mesh, spec), NamedSharding(mesh, P())
    place = placement.Placement(sharded, replicated, sharded, sharded, sharded, wire, shape=(16, 24))
    weight = jnp.arange(16.0 * 24).reshape(16, 24)

    def there_and_back(shard):
        own = wire.send(shard, None, place, None).shard
        return own, wire.home(own, place, gather.Reduction(jnp.float32))[0]

    mapped = jax.shard_map(there_and_back, mesh=mesh, in_specs=spec, out_specs=(P(None, "data"), spec), check_vma=False)
    found, grad = jax.jit(mapped)(weight)
    np.testing.assert_array_equal(found, weight)
    np.testing.assert_array_equal(grad, mesh.shape["replica"] * weight)  # the sum over replicas


class Words(nn.Module):
    """A language model of one table, one matmul and one head."""

    @nn.compact
    def __call__(self, tokens):
        x = layers.Embed(16, 8, name="embed")(tokens)
        x = nn.tanh(nn.Dense(8, name="block_0")(x))
        return layers.Head(8, 16, name="head").loss(x, tokens)


def test_gradients_of_matrices_used_by_columns_are_those_of_one_device():
    tokens = arrays.integers(1, (16, 5), 0, 16)
    params = Words().init(jax.random.key(0), tokens)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(2, 4), stage=3, min_size=0)
    part = columns.marked(part, "embed|head", BLOCKS, jnp.float32)
    how = block_settings.Blocks(BLOCKS, heads="head")

    def loss_fn(params, batch, state):
        return Words().apply({"params": params}, batch["x"]), {"metrics": {}}

    given = {"layout": inputs.Layout(part.mesh, 2, by_device=True), "reduce_dtype": jnp.float32, "compute_dtype": None}
    gradients = explicit.value_and_grad(loss_fn, part, how, passes=2, **given)
    batch = {"x": tokens.reshape(2, -1, 5)}
    (loss, _), grads = jax.jit(gradients)(state.params, batch, state)
    plain = jax.value_and_grad(lambda p: Words().apply({"params": p}, tokens))(params)
    jax.tree.map(
        lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6), (loss, grads), plain
    )


@pytest.mark.parametrize(
    ("pattern", "stage", "reduce_dtype", "line"),
    [
        ("head(", 3, jnp.float32, r"by_columns: 'head\(' is not a regex"),
        (["head"], 3, jnp.float32, r"by_columns: must be text, and is \['head'\]"),
        (None, 3, jnp.float32, "by_columns: must be text, and is None"),
        ("head", 3, None, "by_columns: needs explicit collectives; pass reduce_dtype="),
        (
            "head",
            2,
            jnp.float32,
            "by_columns: params/head/kernel cannot be used by columns, because every device holds all",
        ),
        ("heads", 3, jnp.float32, "by_columns: 'heads' matches no module with a matrix"),
        (
            "odd",
            3,
            jnp.float32,
            "params/odd/kernel cannot be used by columns, because its 12 columns do not divide by data=8",
        ),
    ],
)
def test_matrices_that_cannot_be_used_by_columns_are_refused(pattern, stage, reduce_dtype, line):
    kernels = {"head": {"kernel": jnp.ones((64, 64))}, "odd": {"kernel": jnp.ones((64, 12))}}
    state = TrainState.create(apply_fn=None, params=kernels, tx=optax.sgd(1.0))
    _, partition = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=stage, min_size=0)
    with pytest.raises(UserError, match=line):
        zerojax.make_train_step(
            lambda *_: 0.0, partition, blocks="block", by_columns=pattern, reduce_dtype=reduce_dtype
        )


def test_one_device_has_all_columns_and_is_told():
    state = TrainState.create(apply_fn=None, params={"head": {"kernel": jnp.ones((64, 64))}}, tx=optax.sgd(1.0))
    one = mesh_lib.make_mesh(devices=jax.devices()[:1])
    _, partition = shard_state.shard_train_state(state, mesh=one, stage=3, min_size=0)
    with pytest.warns(UserWarning, match="^by_columns: has no effect, because the mesh has data=1"):
        zerojax.make_train_step(lambda *_: 0.0, partition, blocks="block", by_columns="head", reduce_dtype=jnp.float32)
