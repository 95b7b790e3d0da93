"""Checks that a function with XLA options is one of JAX's in all else. This module tests zerojax.jitted."""

import copy

import compile_only
import jax
import jax.export
import jax.numpy as jnp
import pytest

import zerojax
from zerojax import jitted
from zerojax.zero.step_programs import xla_options


def test_a_program_with_options_may_be_part_of_another_or_exported():
    """JAX refuses options of a function that another one calls."""
    mesh = zerojax.make_mesh(devices=compile_only.devices())
    leaf = jax.ShapeDtypeStruct((8,), "float32", sharding=zerojax.batch_sharding(mesh))
    step = jitted.jit(lambda x: (jnp.sin(x), 2 * x), xla_options.for_mesh(mesh), donate_argnums=0)

    def twice(x):
        return jax.lax.scan(lambda carry, _: (step(carry)[0], None), x, length=2)[0]

    with compile_only.optimized():
        for program in (jax.jit(twice), jax.jit(step), step):
            program.lower(leaf).compile()
    assert jax.eval_shape(step, leaf)[1].shape == (8,)
    assert jax.export.export(step)(leaf).in_avals[0].shape == (8,)


def test_a_program_with_options_computes_what_it_does_without():
    step = jitted.jit(jnp.sin, {"xla_cpu_enable_fast_math": False})
    x = jnp.arange(4.0)
    assert (step(x) == jnp.sin(x)).all() and (jax.jit(step)(x) == jnp.sin(x)).all()
    assert jitted.jit(jnp.sin, {}).lower(x).compile()(x).shape == (4,)


def test_a_program_can_be_copied():
    program = jitted.jit(lambda x: x + 1, {})
    for copied in (copy.copy(program), copy.deepcopy(program)):
        assert copied(jnp.float32(1)) == 2


def test_a_program_takes_arguments_by_name_beside_shardings():
    program = jitted.jit(lambda x: x + 1, {}, in_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert program(x=jnp.float32(1)) == 2
    with pytest.raises(TypeError, match=r"^too many positional arguments$"):
        program(jnp.float32(1), 2)


def test_an_output_that_reuses_a_donated_argument_takes_no_bytes_beside_the_arguments():
    leaf = jax.ShapeDtypeStruct((1024,), "float32")
    kept, donated = (jax.jit(jnp.negative, donate_argnums=n).lower(leaf).compile() for n in ((), 0))
    assert (jitted.bytes_beside(kept), jitted.bytes_beside(donated)) == (4096, 0)
