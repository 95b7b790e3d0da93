"""Checks where kernels run and where their twins do. This module tests zerojax.kernels."""

import functools

import compile_only
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.optim import fused, kernels


@pytest.mark.parametrize(
    ("how", "is_kernel"),
    [
        ({}, False),
        ({"moments": "bf16"}, False),
        ({"moments": "bf16", "stochastic_rounding": True}, True),
        ({"moments": "int8"}, True),
        ({"moments": "int8", "implementation": "jnp"}, False),
    ],
)
def test_by_default_a_kernel_runs_where_it_is_faster_on_a_gpu(how, is_kernel):
    for devices, is_gpu in ((compile_only.devices(), True), (jax.devices(), False)):
        params = {"w": jax.ShapeDtypeStruct((64, 512), jnp.float32)}
        tx = fused.fused_adamw(1e-3, **how)
        shardings = {"w": NamedSharding(zerojax.make_mesh(devices=devices), P("data"))}
        state = jax.eval_shape(tx.init, params)
        step = jax.make_jaxpr(functools.partial(tx.apply, shardings=shardings))(params, state, params)
        assert ("pallas_call" in str(step)) == (is_kernel and is_gpu)


def test_a_kernel_is_refused_where_it_cannot_run():
    for name in ("pallas", "grouped"):
        with pytest.raises(
            zerojax.UserError, match=rf"^implementation: '{name}' is compiled for GPUs, and this is a cpu"
        ):
            kernels.choose(name, "plain", zerojax.make_mesh())
    assert kernels.choose("interpret", "plain", zerojax.make_mesh()) == "interpret"
