"""Checks gathers in fp8: their scales and their gradients. This module tests zerojax.zero.wires.fp8."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.ops import fp8
from zerojax.zero.weights import gather
from zerojax.zero.wires import fp8 as fp8_wire

RANDOM = np.random.default_rng(0)
KERNEL = RANDOM.normal(size=(16, 8)).astype(np.float32) * np.exp(RANDOM.normal(size=(16, 1))).astype(np.float32)


def partition_of(**weights):
    mesh = zerojax.make_mesh(data=8, devices=jax.devices()[:8])
    params = {"params": {name: {"kernel": jnp.asarray(value)} for name, value in weights.items()}}
    return zerojax.partition_state(params, mesh=mesh, stage=3, min_size=64)


def test_chosen_weights_are_marked_if_they_are_gathered():
    weights = fp8_wire.BlockWeights()
    marked = fp8_wire.marked(
        partition_of(a=KERNEL, b=KERNEL, small=KERNEL[:2]), {"a/kernel", "small/kernel"}, weights
    ).placements
    assert {path: weight.wire for path, weight in marked.items()} == {
        "params/a/kernel": fp8_wire.InFp8(weights=weights),
        "params/b/kernel": gather.PLAIN,
        "params/small/kernel": gather.PLAIN,  # it is replicated
    }


def test_a_gathered_weight_is_the_cast_of_the_weight_with_its_own_scale():
    partition = partition_of(a=KERNEL, b=3e-5 * KERNEL)
    wire = fp8_wire.InFp8()

    def on_device(shards):
        scales = wire.known({"a": shards[0], "b": shards[1]})
        places = [partition.placements[f"params/{name}/kernel"] for name in "ab"]
        return [wire.send(s, scales[name], place, None) for s, name, place in zip(shards, "ab", places)]

    mapped = jax.shard_map(on_device, mesh=partition.mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    for found, weight in zip(
        jax.jit(mapped)([jnp.asarray(KERNEL), 3e-5 * jnp.asarray(KERNEL)]), (KERNEL, 3e-5 * KERNEL)
    ):
        expected = fp8.quantized(jnp.asarray(weight), fp8.FORWARD, fp8.scale_of(jnp.asarray(weight), fp8.FORWARD))
        np.testing.assert_array_equal(found.scale, expected.scale)
        np.testing.assert_array_equal(found.values.astype(jnp.float32), expected.values.astype(jnp.float32))


def test_a_widened_weight_has_the_values_in_fp8_and_its_sink_the_gradient():
    weight = fp8.quantized(jnp.asarray(KERNEL), fp8.FORWARD, fp8.scale_of(jnp.asarray(KERNEL), fp8.FORWARD))
    value, grad = jax.value_and_grad(lambda sink: jnp.sum(fp8_wire.widened(weight, sink) * KERNEL))(
        fp8_wire.InFp8().differentiated(weight, jnp.float32)
    )
    np.testing.assert_allclose(value, np.sum(np.asarray(weight.values, np.float32) / weight.scale * KERNEL), rtol=1e-6)
    np.testing.assert_array_equal(grad, KERNEL)


def test_modules_find_their_weight_by_the_end_of_its_path():
    one, other = (fp8.EightBits(jnp.zeros(1), jnp.ones(())) for _ in range(2))
    weights = fp8_wire.BlockWeights()
    assert weights.of_module("layer_0/up") is None
    with weights.known({"net/layer_0/up/kernel": one, "net/layer_0/big_up/kernel": other}):
        assert weights.of_module("layer_0/up") is one and weights.of_module("net/layer_0/big_up") is other
        assert weights.of_module("er_0/up") is None
    assert weights.of_module("layer_0/up") is None
