"""Checks which modules multiply in fp8, alone and in train steps. This module tests zerojax.zero.fp8.modules."""

import functools

import compile_only
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState

import zerojax
from zerojax.errors import UserError
from zerojax.models import experts
from zerojax.ops import fp8
from zerojax.trainer import program
from zerojax.zero.fp8 import modules
from zerojax.zero.fp8.modules import Fp8

SUMS = 2e-5  # of the largest value: float32 sums over devices in another order
WEIGHTS = [f"params/block_{n}/{name}/kernel" for n in range(12) for name in ("wide", "narrow")]
WEIGHTS += ["params/block_0/norm/scale", "params/head/kernel", "params/other_0/wide/kernel"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8, name="narrow")(nn.gelu(nn.Dense(16, name="wide")(x)))


class Net(nn.Module):
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        for number in range(self.depth):
            x = Block(name=f"block_{number}")(x)
        return nn.Dense(1, name="head")(x)


X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def init(key):
    params = Net().init(key, jnp.zeros((1, 8)))["params"]
    return TrainState.create(apply_fn=Net().apply, params=params, tx=optax.sgd(1.0))


def loss_fn(params, batch, state):
    return jnp.mean(jnp.square(state.apply_fn({"params": params}, batch["x"])))


def test_the_modules_of_blocks_are_chosen_and_others_by_name():
    found = modules.chosen(Fp8(), WEIGHTS, r"block_\d+")
    assert len(found.in_fp8) == 24 and found.others == {"head", "other_0/wide"}
    found = modules.chosen(Fp8(filter=r".*/wide|head"), WEIGHTS, r"block_\d+")
    assert found.in_fp8 == {"head", "other_0/wide"} | {f"block_{n}/wide" for n in range(12)}


def test_the_first_and_the_last_blocks_of_each_stack_keep_their_dtype():
    stacks = [f"params/{stack}/block_{n}/up/kernel" for stack in ("encoder", "decoder") for n in range(11)]
    found = modules.chosen(Fp8(first=1, last=2), stacks, r"\w+/block_\d+").others
    assert found == {f"{stack}/block_{n}/up" for stack in ("encoder", "decoder") for n in (0, 9, 10)}


def test_experts_are_chosen_where_they_are_asked_for_by_the_paths_of_their_weights():
    stacks = [f"params/block_{n}/experts/{name}" for n in range(3) for name in ("gate", "up", "down", "router")]
    weights = [*WEIGHTS, *stacks, "params/block_0/other/gate", "params/block_0/other/down"]
    assert not modules.chosen(Fp8(), weights, r"block_\d+").stacks
    found = modules.chosen(Fp8(experts=True, first=1), weights, r"block_\d+")
    assert found.stacks == {f"block_{n}/experts/{name}" for n in (1, 2) for name in ("gate", "up", "down")}
    assert len(found.in_fp8) == 22 and not found.stacks & (found.in_fp8 | found.others)
    found = modules.chosen(Fp8(experts=True, filter=".*/experts/down"), weights, r"block_\d+")
    assert not found.in_fp8 and found.stacks == found.weights == {f"block_{n}/experts/down" for n in range(3)}
    with pytest.raises(UserError, match=r"^fp8\.experts: the modules that are chosen include no experts; choose"):
        modules.chosen(Fp8(experts=True, filter=".*/wide"), weights, r"block_\d+")


class Mixture(nn.Module):
    @nn.compact
    def __call__(self, x):
        return experts.Experts(num_experts=2, top_k=1, width=8, name="experts")(x)


def test_experts_that_may_be_those_of_a_block_in_fp8_or_of_another_keep_their_dtype():
    model, x = Mixture(), jnp.zeros((1, 4, 8))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), x)["params"])
    paths = [f"params/block_{n}/experts/{name}" for n in range(2) for name in params["experts"]]
    of_part = lambda params: model.apply({"params": params}, x).sum()  # noqa: E731
    both, one = (modules.chosen(Fp8(experts=True, first=first), paths, r"block_\d+") for first in (0, 1))
    assert "f8_e4m3fn" in str(jax.make_jaxpr(modules.wrapped(of_part, both, "tensorwise"))(params))
    with pytest.raises(UserError, match="the loss calls no Linen module of block_1/experts"):
        jax.eval_shape(modules.wrapped(of_part, one, "tensorwise"), params)


@pytest.mark.parametrize(
    "settings, blocks, line",
    [
        (
            {"recipe": "rows"},
            "",
            r"^recipe: must be one of tensorwise, delayed, rowwise, and is 'rows'; did you mean 'rowwise'\?$",
        ),
        ({"filter": "("}, "", r"^fp8\.filter: '\(' is not a regex: .*; pass one over module paths"),
        ({"first": -1}, "", r"^fp8\.first: must be a number of blocks, 0 or more, and is -1$"),
        ({}, "", r"^fp8\.filter: is '', which means every block, and there are no `blocks`; pass either"),
        (
            {"filter": "wide"},
            r"block_\d+",
            r"^fp8\.filter: 'wide' matches no module with a weight `kernel`; it is a regex",
        ),
        ({}, "layer", r"^fp8\.filter: is '', and blocks='layer' matches no module"),
        ({"first": 6, "last": 6}, r"block_\d+", r"^fp8\.first: 6 and fp8\.last=6 leave no module of 24 in fp8"),
        (
            {"experts": True, "recipe": "rowwise"},
            "",
            r"^fp8\.experts: .* one scale for each array, and fp8\.recipe is 'rowwise'; take 'tensorwise'",
        ),
        ({"experts": True}, r"block_\d+", r"^fp8\.experts: no module has the weights gate, up, down of a mixture's"),
    ],
)
def test_a_choice_without_modules_is_refused(settings, blocks, line):
    with pytest.raises(UserError, match=line):
        modules.chosen(Fp8(**settings), WEIGHTS, blocks)


def test_chosen_modules_multiply_in_fp8_and_others_as_before():
    state, key = init(jax.random.key(0)), "block_1/wide"
    found = modules.Chosen(frozenset([key]), frozenset(["block_0/wide", "head"]))

    def count(loss):
        text = str(jax.make_jaxpr(lambda params: loss(params, {"x": X}, state))(state.params))
        return text.count("dot_general["), text.count("preferred_element_type=float32\n") and text.count("f8_e4m3fn")

    plain, in_fp8 = count(loss_fn), count(modules.wrapped(loss_fn, found, "tensorwise"))
    assert plain == (5, 0) and in_fp8[0] == 5 and in_fp8[1] > 0

    def of_inner(params, batch, state):  # the model is called with a part of the params
        return loss_fn(params["inner"], batch, state)

    inner = modules.Chosen(frozenset(["inner/block_1/wide"]), frozenset(["inner/block_0/wide"]))
    wrapped = jax.jit(modules.wrapped(of_inner, inner, "tensorwise"))({"inner": state.params}, {"x": X}, state)
    outer = jax.jit(modules.wrapped(loss_fn, found, "tensorwise"))(state.params, {"x": X}, state)
    np.testing.assert_array_equal(wrapped, outer)


def test_modules_that_are_not_called_or_take_no_dot_general_are_named():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", nn.initializers.ones, (8, 8))

    params = Own().init(jax.random.key(0), X)["params"]
    own = modules.wrapped(
        lambda params: Own(name="own").apply({"params": params}, X),
        modules.Chosen(frozenset([""]), frozenset()),
        "rowwise",
    )
    with pytest.raises(UserError, match=r"^fp8\.filter: .* is a Own, which has no field `dot_general`; leave it out"):
        own(params)

    class Head(nn.Module):
        def setup(self):
            self.kernel = self.param("kernel", nn.initializers.ones, (8, 8))

        def loss(self, x):
            return jnp.mean(x @ self.kernel)

    class Whole(nn.Module):
        def setup(self):
            self.head = Head()

        def __call__(self, x):
            return self.head.loss(x)

    whole = Whole().init(jax.random.key(0), X)
    by_method = modules.wrapped(
        lambda params: Whole().apply(params, X), modules.Chosen(frozenset(["head"]), frozenset()), "rowwise"
    )
    with pytest.raises(UserError, match=r"^fp8\.filter: head is a Head, which has no field `dot_general`"):
        by_method(whole)
    state = init(jax.random.key(0))
    with pytest.raises(
        UserError, match=r"^fp8\.filter: the loss calls no Linen module of elsewhere; an NNX module takes"
    ):
        modules.wrapped(loss_fn, modules.Chosen(frozenset(["elsewhere"]), frozenset()), "rowwise")(
            state.params, {"x": X}, state
        )


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_delayed_scales_refuse_a_matmul_that_runs_in_tiles(recipe):
    """One magnitude of a matmul is remembered, and a matmul in tiles has one for each tile."""
    state, found = init(jax.random.key(0)), modules.Chosen(frozenset(["block_0/wide"]), frozenset())

    def in_tiles(params, batch, state):
        return jnp.mean(zerojax.over_tiles(lambda x: Net().apply({"params": params}, x), batch["x"], 4))

    trace = lambda: jax.make_jaxpr(modules.wrapped(in_tiles, found, recipe))(state.params, {"x": X}, state)  # noqa: E731
    if recipe == "tensorwise":
        assert "f8_e4m3fn" in str(trace())
        return
    with pytest.raises(UserError, match=r"^fp8\.recipe: 'delayed' .* block_0/wide runs in tiles .* take 'tensorwise'"):
        trace()


def test_devices_without_fp8_are_refused_in_one_line():
    for target, line in (
        ("a100", r"^fp8: NVIDIA A100-SXM4-80GB has no arithmetic in fp8 .*; compute in bf16"),
        ("h100", ""),
    ):
        mesh = zerojax.make_mesh(devices=compile_only.gpus(target, "1x1"))
        if not line:
            modules.check_devices(mesh)
            continue
        with pytest.raises(UserError, match=line):
            modules.check_devices(mesh)
    with pytest.raises(UserError, match=r"^config\.fp8: NVIDIA A100"):
        program.build(runs.config(precision="fp8"), tokenizer_vocab=320, devices=compile_only.gpus("a100", "1x1"))


def stepped(stage, **how):
    """Returns the params after one step of SGD, without their old values: the gradients."""
    state, partition = zerojax.shard_train_state(
        init, jax.random.key(0), mesh=zerojax.make_mesh(data=8, devices=jax.devices()[:8]), stage=stage, min_size=0
    )
    before = jax.tree.map(np.asarray, state.params)
    step = zerojax.make_train_step(
        loss_fn, partition, blocks=r"block_\d", reduce_dtype=jnp.float32, donate=False, **how
    )
    accum = how.get("grad_accum", 1)
    batch = {"x": X if accum == 1 else X.reshape(accum, -1, 8)}
    return jax.tree.map(lambda new, old: np.asarray(new) - old, step(state, batch)[0].params, before)


def assert_close(found, expected, tolerance=SUMS):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max())


@functools.cache
def at_stage_3():
    return stepped(3, fp8=Fp8())


@runs.LONG
def test_stages_and_policies_of_residuals_agree():
    expected = at_stage_3()
    assert_close(stepped(0, fp8=Fp8(), remat="none"), expected)
    in_float32 = stepped(3)
    for ours, theirs in zip(jax.tree.leaves(expected), jax.tree.leaves(in_float32)):
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        assert 1e-4 < error < 0.3  # it is another arithmetic, and it is near


def test_each_devices_arithmetic_is_that_of_one_device_with_its_examples():
    """Every device scales its own activations, so the mean of one-device gradients is the truth."""
    state = init(jax.random.key(0))
    chosen = modules.chosen(
        Fp8(),
        [
            f"params/{p}"
            for p in ("block_0/wide/kernel", "block_0/narrow/kernel", "block_1/wide/kernel", "block_1/narrow/kernel")
        ],
        r"block_\d",
    )
    grad = jax.jit(jax.grad(modules.wrapped(loss_fn, chosen, fp8.TENSORWISE), argnums=0))
    grads = [grad(state.params, {"x": X[2 * n : 2 * n + 2]}, state) for n in range(8)]
    assert_close(at_stage_3(), jax.tree.map(lambda *leaves: -np.mean(np.stack(leaves), 0), *grads))


def test_passes_add_up():
    """With 2 passes of a row on each device, the gradients are those of 16 devices with a row each."""
    state = init(jax.random.key(0))
    chosen = modules.chosen(
        Fp8(), [f"params/block_{n}/{name}/kernel" for n in (0, 1) for name in ("wide", "narrow")], r"block_\d"
    )
    grad = jax.jit(jax.grad(modules.wrapped(loss_fn, chosen, fp8.TENSORWISE), argnums=0))
    grads = [grad(state.params, {"x": row[None]}, state) for row in X]
    expected = jax.tree.map(lambda *leaves: -np.mean(np.stack(leaves), 0), *grads)
    assert_close(stepped(3, fp8=Fp8(), grad_accum=2), expected)
