"""A small model whose blocks are of several kinds, and its gradients in two forms. This module serves tests of programs and offload."""

import functools
import itertools
from typing import Any

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax.zero import shard_state
from zerojax.zero.blocks import block_settings, overlap
from zerojax.zero.sharded_batch import inputs, outputs
from zerojax.zero.step_programs import blocks, one_pass

X = arrays.normal(1, (16, 8))
HOW: dict[str, Any] = {"reduce_dtype": jnp.float32, "compute_dtype": None}


class Block(nn.Module):
    dropout: bool = False

    @nn.compact
    def __call__(self, x, scale=None):
        y = nn.Dense(8, name="narrow")(nn.tanh(nn.Dense(16, name="wide")(x)))
        y = nn.Dropout(0.5, deterministic=not self.dropout)(y)
        return x + (y if scale is None else y * scale)


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.mean(jnp.square(nn.Dense(1, name="out")(x)))


class Net(nn.Module):
    """Reads one weight in two blocks and outside of them, and an array in each block."""

    layers: int = 2
    dropout: bool = False

    @nn.compact
    def __call__(self, x, scale):
        shared = Block(self.dropout, name="block_shared")
        x = shared(nn.Dense(8, name="embed")(x), scale)
        for number in range(self.layers):
            x = Block(self.dropout, name=f"block_{number}")(x, scale)
        if self.dropout:
            x = nn.Dropout(0.5, deterministic=False)(x)
        penalty = jnp.sum(jnp.square(shared.variables["params"]["wide"]["kernel"]))
        return Head(name="head")(shared(x)) + 1e-3 * penalty


def loss_of(net: Net, params: Any, batch: Any, state: Any) -> tuple[jax.Array, dict]:
    rngs = {"dropout": jax.random.fold_in(jax.random.key(0), state.step)} if net.dropout else {}
    loss = net.apply({"params": params}, batch["x"], batch["scale"], rngs=rngs)
    return loss, {"state": {"step": state.step + 1}, "metrics": {"twice": 2 * loss, "one": jnp.float32(1)}}


def prepared_layout(passes: int, mesh: tuple[int, ...] = (1, 8)) -> inputs.Layout:
    return inputs.Layout(mesh_lib.make_mesh(*mesh), passes, by_device=True)


def parts(
    net: Net, mesh: tuple[int, ...] = (1, 8), stage: int = 3, passes: int = 1, dtypes: Any = None, **how: Any
) -> tuple[Any, ...]:
    """Returns one pass as a function of (params, batch, state, number), the same with nested blocks, and the arguments.

    `dtypes` are those of `one_pass.one_pass`, `how` the rest of `block_settings.Blocks`.
    """
    scale = jnp.linspace(0.5, 1.5, 16)[:, None]
    params = jax.eval_shape(net.init, {"params": jax.random.key(0), "dropout": jax.random.key(0)}, X, scale)["params"]
    seeds = itertools.count(2)
    params = jax.tree.map(lambda leaf: arrays.normal(next(seeds), leaf.shape) / 3, params)
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(*mesh), stage=stage, min_size=0)
    batch = jax.device_put({"x": X, "scale": scale}, part.batch_sharding)
    make = functools.partial(
        one_pass.one_pass,
        outputs.with_aux(functools.partial(loss_of, net), lambda state: 1.0),
        part,
        block_settings.Blocks(r"block_\w+", **{"heads": "head"} | how),
        layout=prepared_layout(1, mesh),
        passes=passes,
        **HOW | (dtypes or {}),
    )
    args = state.params, batch, state.replace(params=(), opt_state=()), jax.numpy.int32(0)
    return make(runner=overlap.Chain), make(runner=blocks.NestedBlocks), *args


def abstract(value: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), value)
