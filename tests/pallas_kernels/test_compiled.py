"""Compiles the kernels for a GPU that is not there, and reads the memory that they take."""

import functools

import compile_only
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.optim import fused

LARGE, SMALL, COUNT = (8192, 2000), (70, 256), 3
SPARE = 2**16  # bytes: scalars, seeds and partial sums


def compiled(tx):
    """Returns the compiled update of one large weight, on eight devices, and three small ones, on each."""
    mesh = zerojax.make_mesh(devices=compile_only.devices())

    def abstract(shape, spec, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def weights(dtype):
        return {"large": abstract(LARGE, P("data"), dtype)} | {
            str(n): abstract(SMALL, P(), dtype) for n in range(COUNT)
        }

    params, grads = weights(jnp.float32), weights(jnp.bfloat16)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    part = zerojax.partition_state(
        jax.eval_shape(lambda params: {"params": params, "opt_state": tx.init(params)}, params),
        mesh=mesh,
        stage=3,
        min_size=10**6,
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads, loss_scale):
        norm = loss_scale * optax.global_norm(grads)
        how = {
            "scale": loss_scale / norm,
            "finite": jnp.isfinite(norm),
            "copy_dtype": jnp.bfloat16,
            "shardings": shardings,
        }
        return tx.apply(grads, state, params, **how)

    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    state = part.abstract_state["opt_state"]
    return step.lower(params, state, grads, scalar).compile(compiler_options=compile_only.ASSEMBLED), params, state


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_kernels_write_over_what_they_read_and_few_launches_serve_many_leaves(moments):
    tx = fused.fused_adamw(
        1e-3, moments=moments, stochastic_rounding=moments == "int8", mask=None, implementation="pallas"
    )
    program, params, state = compiled(tx)
    held = sum(
        leaf.sharding.shard_shape(leaf.shape)[0] * (leaf.size // max(1, leaf.shape[0])) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((params, state))
        if leaf.shape
    )
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < SPARE
    calls = program.as_text().count("__gpu$xla.gpu.triton")
    assert calls == 2, calls  # of the large leaf and of the group


def test_plain_updates_of_small_leaves_are_one_launch_and_xla_fuses_those_of_large_ones():
    grouped, plain = (compiled(fused.fused_adamw(1e-3, implementation=how))[0].as_text() for how in ("auto", "jnp"))
    counts = [text.count("__gpu$xla.gpu.triton") for text in (grouped, plain)]
    assert counts == [1, 0]
