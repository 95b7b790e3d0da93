"""Compares adapters of a mixture's experts with merged weights, on one device and where devices hold different experts."""

import functools

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
from zerojax import tree
from zerojax.errors import UserError
from zerojax.lora import adapters, linen, targets
from zerojax.models import experts

F32 = 1e-5  # float32 sums over devices, in another order
NAMES = ("gate", "up", "down")
WIDTH, COUNT = 64, 8  # widths of blocks of codes, an expert's twice that
TABLE = (
    ("experts/(gate|up)(/|_adapter/lora_b|$)", P("expert", None, "model")),
    ("experts/down(/|_adapter/lora_a|$)", P("expert", "model")),
    ("experts/.*_adapter", P("expert")),
)
X, Y = (np.random.default_rng(seed).normal(size=(16, 4, WIDTH)).astype(np.float32) for seed in (0, 1))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + experts.Experts(COUNT, 2, 2 * WIDTH, stddevs=(0.3, 0.1, 0.1), name="experts")(x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return 2 * Block(name="block_0")(x / 2)


def apply(params, x):
    return Net().apply({"params": params}, x)


def loss_fn(params, batch, *_):
    return jnp.mean((apply(params, batch["x"]) - batch["y"]) ** 2)


def init(lora, bias, key):
    params = zerojax.add_lora(Net().init(key, X)["params"], lora, key, apply, X)
    own = params["block_0"]["experts"]
    own["router"] = own["router"].at[0, 3].add(bias).at[0, 2].add(bias)
    for number, name in enumerate(NAMES):
        pair = own[f"{name}_adapter"]
        pair["lora_b"] = 0.1 * jax.random.normal(jax.random.key(number), pair["lora_b"].shape)
    return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.5, momentum=0.9))


def trained(mesh, stage, quantize="none", bias=0.0, table=TABLE, **how):
    """Returns the losses and norms of two steps, the params after them, and those before."""
    lora = zerojax.Lora(r=4, alpha=8, quantize=quantize)
    state, partition = zerojax.shard_train_state(
        functools.partial(init, lora, bias),
        jax.random.key(0),
        mesh=mesh,
        stage=stage,
        min_size=0,
        overrides=table,
        trainable=lora.trainable,
    )
    how = {"reduce_dtype": jnp.float32, "blocks": r"block_\d"} | how
    if mesh.shape["context"] * mesh.shape["expert_context"] > 1:
        how["batch_specs"] = [("", P(("replica", "data"), "context"))]
    before = jax.tree.map(np.asarray, state.params)
    step = zerojax.make_train_step(zerojax.with_lora(loss_fn, lora), partition, **how)
    found = []
    for _ in range(2):
        state, metrics = step(state, {"x": X, "y": Y + (10 * (X[..., :1] > 0) if bias else 0)})
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return found, jax.tree.map(np.asarray, state.params), before


@functools.cache
def of_one_device(quantize, bias):
    mesh = zerojax.make_mesh(devices=jax.devices()[:1])
    return trained(mesh, 0, quantize, bias, (), reduce_dtype=None, blocks="")


ALL_TO_TWO = 30.0  # a bias of the router, by which most tokens go to two experts of one device, in further rounds


@pytest.mark.parametrize("quantize", runs.cases(["none", "nf4"], long=["none"]))
def test_adapters_of_experts_give_the_output_of_merged_matrices_and_train_alone(quantize):
    lora = zerojax.Lora(r=4, alpha=8, quantize=quantize)
    losses, after, before = of_one_device(quantize, ALL_TO_TWO)
    assert losses[2] < losses[0]
    changed = {path for path, leaf in tree.flatten(before) if not np.array_equal(leaf, dict(tree.flatten(after))[path])}
    assert changed == {f"block_0/experts/{name}_adapter/lora_{part}" for name in NAMES for part in "ab"}
    shapes = jax.eval_shape(Net().init, jax.random.key(0), X)["params"]
    chosen = targets.choose(lora, linen.find(apply, shapes, X), targets.flat(shapes))
    merged = adapters.merge(after, chosen)
    np.testing.assert_allclose(
        zerojax.with_lora(apply, lora)(after, X), apply(merged, X), atol=F32, err_msg="adapted and merged"
    )
    assert {path for path, _ in tree.flatten(merged)} == {path for path, _ in tree.flatten(shapes)}


CASES = [
    ({"expert": 4}, 3, "nf4", ALL_TO_TWO),
    ({"expert": 4}, 3, "none", ALL_TO_TWO),
    ({"expert": 8}, 1, "nf4", 0.0),
    ({"expert": 2, "model": 2}, 3, "nf4", 0.0),
    ({"expert": 2, "model": 2}, 3, "fp8_block", ALL_TO_TWO),
    ({"expert": 2, "model": 2}, 3, "none", ALL_TO_TWO),
    ({"expert": 4, "context": 2, "model": 2}, 2, "int8", ALL_TO_TWO),
    ({"replica": 2, "expert": 2}, 3, "none", 0.0),
    ({}, 3, "nf4", ALL_TO_TWO),
]


@runs.LONG
@pytest.mark.parametrize("case", runs.cases(CASES, long=CASES[1:]))
def test_adapters_of_experts_on_devices_train_as_on_one(case):
    sizes, stage, quantize, bias = case
    expected = of_one_device(quantize, bias)
    found = trained(zerojax.make_mesh(**sizes), stage, quantize, bias)
    np.testing.assert_allclose(found[0], expected[0], rtol=F32)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=F32), found[1], expected[1])


PACKED = {
    "init_from": "tests/golden/huggingface/gptoss",
    "model__num_layers": 0,
    "lora__r": 4,
    "lora__quantize": "mxfp4",
}
PACKED |= {"zero__stage": 3, "reduce_dtype": "fp32", "seq_len": 16}


def test_packed_experts_train_where_they_live_and_not_where_scales_are_sharded_otherwise():
    found, alone = runs.trained(devices=4, **PACKED, mesh__expert=2), runs.trained(**PACKED)
    np.testing.assert_allclose(found, alone, rtol=F32)
    told = r"codes of experts in mxfp4 are sharded as .*'model'.* and their scales as .*\(\) beside `expert`; .*a mesh without model"
    with pytest.raises(UserError, match=told):
        runs.trained(devices=4, **PACKED, mesh__expert=2, mesh__model=2)
