"""Checks gathers where weights are used: values, gradients, dtypes and residuals. This module tests zerojax.zero.blocks.where_used."""

import collections
import functools

import arrays
import chex
import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax import traces, tree
from zerojax.errors import UserError
from zerojax.models.llama import model as llama
from zerojax.models.llama.config import LlamaConfig
from zerojax.ops import losses
from zerojax.zero import shard_state, stages
from zerojax.zero.blocks import remat as remat_lib
from zerojax.zero.blocks import where_used

ROUNDING = 2e-6  # the same float32 terms, summed in another order
# Each example compiles a program: a failure is reported as found, without minutes of shrinking.
COMPILES = hypothesis.settings(
    deadline=None, derandomize=True, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)
SHAPES = st.lists(st.sampled_from([1, 3, 6, 8, 16]), max_size=3).map(tuple)
NAMES = st.sampled_from(["a", "b", "kernel", "scale"])
BRANCHES = st.dictionaries(NAMES, SHAPES, min_size=1, max_size=2)
TREES = st.dictionaries(NAMES, SHAPES | BRANCHES, min_size=1, max_size=3)


def make_state(params):
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-3))


def shard(params, stage=3, mesh=None, **options):
    return shard_state.shard_train_state(
        make_state(params), mesh=mesh or mesh_lib.make_mesh(), stage=stage, min_size=0, **options
    )


def assert_close(found, expected):
    chex.assert_trees_all_close(found, expected, atol=ROUNDING, rtol=ROUNDING)


@hypothesis.settings(COMPILES, max_examples=4)
@hypothesis.given(
    TREES,
    st.sampled_from(list(stages.STAGES)),
    st.sampled_from(["whole", "pad"]),
    st.sampled_from(list(remat_lib.REMAT)),
)
def test_gradients_are_those_of_the_plain_loss_sharded_by_the_stage(shapes, stage, indivisible, remat):
    shapes, structure = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    values = [arrays.normal(i, shape) for i, shape in enumerate(shapes)]
    params = jax.tree.unflatten(structure, values)

    def loss_fn(params, factor):
        leaves = jax.tree.leaves(params)
        assert [leaf.shape for leaf in leaves] == shapes
        return factor * sum((i + 1) * jnp.mean(jnp.sin(leaf)) for i, leaf in enumerate(leaves))

    state, part = shard(params, stage, indivisible=indivisible)
    loss_of_stored = where_used.where_used(loss_fn, part.placements, remat=remat)
    loss, grads = jax.jit(jax.value_and_grad(loss_of_stored))(state.params, 3.0)
    assert_close(loss, loss_fn(params, 3.0))
    expected = jax.grad(loss_fn)(params, 3.0)
    for path, grad in tree.flatten(grads):
        placement = part.placements[f"params/{path}"]
        assert grad.sharding.is_equivalent_to(placement.grad, grad.ndim)
        full = dict(tree.flatten(expected))[path]
        assert_close(grad[tuple(slice(n) for n in full.shape)], full)
        assert np.abs(np.asarray(grad)).sum() == pytest.approx(float(abs(full).sum()), rel=1e-4), (
            "padding took gradient"
        )


@pytest.mark.parametrize("blocks", ["", r"layer_\d+"])
def test_weights_are_cast_before_they_are_gathered(blocks):
    """2 bytes an element are sent: no constraint in the forward pass holds a gathered float32 weight."""
    _, params, loss_fn = small_llama()
    state, part = shard(params)
    stored = where_used.where_used(loss_fn, part.placements, compute_dtype=jnp.bfloat16, blocks=blocks)
    jaxpr = jax.make_jaxpr(stored)(state.params, tokens())
    gathers = [e for e in traces.equations(jaxpr.jaxpr) if e.primitive.name == "sharding_constraint"]
    count = sum(p.stored != p.used for p in part.placements.values())
    assert count == len(part.placements)
    for field in ("stored", "used"):
        shardings = {getattr(p, field) for p in part.placements.values()}
        found = [e.invars[0].aval.dtype for e in gathers if e.params["sharding"] in shardings]
        assert len(found) >= count and set(found) == {jnp.dtype(jnp.bfloat16)}


def test_a_gradient_leaves_in_its_weights_dtype_and_integers_pass():
    params = {"w": jnp.ones((8, 4)), "ids": jnp.arange(8)}
    state, part = shard(params)

    def loss_fn(params):
        assert params["w"].dtype == jnp.bfloat16 and params["ids"].dtype == jnp.int32
        return jnp.sum(params["w"][params["ids"]]).astype(jnp.float32)

    stored = where_used.where_used(loss_fn, part.placements, compute_dtype=jnp.bfloat16)
    grad = jax.jit(jax.grad(lambda w, ids: stored({"w": w, "ids": ids})))(state.params["w"], state.params["ids"])
    assert grad.dtype == jnp.float32 and float(grad.sum()) == 32


# What the backward pass keeps


@functools.cache
def small_llama():
    config = LlamaConfig(67, 2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128)
    model = llama.Llama(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1), shapes)  # compiling the initialisers takes seconds

    def loss_fn(params, tokens):
        return losses.cross_entropy(model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    return model, params, loss_fn


def tokens():
    return arrays.integers(1, (3, 6), 0, 67)  # sizes that no weight shares


def kept_16_bit_sizes(loss_of_stored, params) -> collections.Counter:
    """Counts the 16-bit arrays, by number of elements, that a backward pass is handed: weights are stored in 32."""
    residuals = jax.eval_shape(lambda p: jax.vjp(lambda q: loss_of_stored(q, tokens()), p)[1], params)
    leaves = [leaf for leaf in jax.tree.leaves(residuals) if hasattr(leaf, "dtype")]
    return collections.Counter(leaf.size for leaf in leaves if leaf.dtype == jnp.bfloat16)


@pytest.mark.parametrize("blocks", ["", r"layer_\d+"])
@pytest.mark.parametrize("remat", remat_lib.REMAT)
def test_a_gathered_weight_is_not_kept_for_the_backward_pass(remat, blocks):
    _, params, loss_fn = small_llama()
    state, part = shard(params)
    stored = where_used.where_used(loss_fn, part.placements, compute_dtype=jnp.bfloat16, blocks=blocks, remat=remat)
    kept = kept_16_bit_sizes(stored, state.params)
    inside = {leaf.size for path, leaf in tree.flatten(params) if leaf.ndim > 1 and ("layer_" in path or not blocks)}
    assert not inside & set(kept)
    bytes_kept = 2 * sum(size * count for size, count in kept.items())
    if blocks or remat != "none":  # beside activations, which "none" keeps all of
        assert bytes_kept < 2 * sum(leaf.size for leaf in jax.tree.leaves(params))


def test_without_rematerialisation_gathered_weights_would_be_kept():
    """Shows that the test above can fail."""
    _, params, loss_fn = small_llama()
    state, part = shard(params)

    def naive(params, tokens):
        full = tree.map_with_path(
            lambda path, leaf: where_used.gathered(leaf, part.placements[f"params/{path}"], jnp.bfloat16), params
        )
        return loss_fn(full, tokens)

    inside = {leaf.size for path, leaf in tree.flatten(params) if leaf.ndim > 1 and "layer_" in path}
    assert inside <= set(kept_16_bit_sizes(naive, state.params))


@pytest.mark.parametrize("stage", [0, 3])
def test_only_gathered_weights_make_the_policy_none_compute_again(stage):
    """Where nothing is gathered the backward pass is that of the plain loss: each op once, nothing computed again."""
    _, params, loss_fn = small_llama()
    state, part = shard(params, stage=stage)
    jaxpr = jax.make_jaxpr(where_used.where_used(loss_fn, part.placements, remat="none"))
    text = str(jaxpr(state.params, jnp.zeros((8, 6), jnp.int32)))
    assert ("checkpoint" in text or "remat" in text) == (stage == 3)


def test_policies_keep_less_and_less():
    _, params, loss_fn = small_llama()
    state, part = shard(params)
    kept = {}
    for remat in remat_lib.REMAT:
        stored = where_used.where_used(
            loss_fn, part.placements, compute_dtype=jnp.bfloat16, blocks=r"layer_\d+", remat=remat
        )
        kept[remat] = sum(size * count for size, count in kept_16_bit_sizes(stored, state.params).items())
    assert kept["none"] > kept["dots"] > kept["full"]


# Blocks: models that nobody here wrote


class Block(nn.Module):
    """Dropout, batch norm, a static flag, a tuple and a None among its inputs and outputs."""

    @nn.compact
    def __call__(self, x, mask=None, *, deterministic, scale=1.0):
        y = nn.Dense(16)(x) * scale
        y = nn.BatchNorm(use_running_average=deterministic, momentum=0.5)(y)
        y = nn.Dropout(0.5, deterministic=deterministic)(y)
        y = y if mask is None else y * mask
        return x + nn.tanh(y), {"norm": jnp.mean(y**2)}


class Net(nn.Module):
    """Calls its first block twice; its second is reached through another method and a keyword array."""

    def setup(self):
        self.block_0 = Block()
        self.block_1 = Block()
        self.readout = nn.Dense(1)

    def second(self, x, mask, deterministic):
        return self.block_1(x, mask=mask, deterministic=deterministic, scale=jnp.float32(2.0))

    def __call__(self, x, deterministic):
        x, first = self.block_0(x, deterministic=deterministic)
        x, again = self.block_0(x, None, deterministic=deterministic)
        x, last = self.second(x, jnp.ones((16,)), deterministic)
        return self.readout(x), first["norm"] + again["norm"] + last["norm"]


def net_loss(model, params, stats, x, deterministic):
    (y, norm), changed = model.apply(
        {"params": params, "batch_stats": stats},
        x,
        deterministic,
        rngs={"dropout": jax.random.key(5)},
        mutable=["batch_stats"],
    )
    return jnp.mean(y**2) + norm, changed


@runs.LONG
@pytest.mark.parametrize(
    ("blocks", "deterministic", "remat"),
    [
        pytest.param("", False, "dots", marks=runs.LONG),
        pytest.param(r"block_\d", True, "dots", marks=runs.LONG),
        pytest.param(r"block_\d", False, "dots", marks=runs.LONG),
        pytest.param(r"block_\d", False, "full", marks=runs.LONG),
        (r"block_1/Dense_0", False, "dots"),
    ],
)
def test_any_linen_model_keeps_its_meaning(deterministic, blocks, remat):
    """Static flags, dropout's random keys, batch statistics, shared modules, tuples: values, gradients and statistics."""
    model, x = Net(), arrays.normal(2, (8, 16))
    variables = jax.jit(model.init, static_argnums=2)({"params": jax.random.key(0)}, x, True)
    loss_fn = functools.partial(net_loss, model)
    plain = jax.jit(jax.value_and_grad(loss_fn, has_aux=True), static_argnums=3)
    expected = plain(variables["params"], variables["batch_stats"], x, deterministic)
    state, part = shard(variables["params"])
    stored = where_used.where_used(loss_fn, part.placements, blocks=blocks, remat=remat)
    step = jax.jit(jax.value_and_grad(stored, has_aux=True), static_argnums=3)
    assert_close(step(state.params, variables["batch_stats"], x, deterministic), expected)


def test_the_outermost_matching_module_is_the_block():
    model, x = Net(), jnp.ones((8, 16))
    variables = model.init({"params": jax.random.key(0)}, x, True)
    state, part = shard(variables["params"])
    stored = where_used.where_used(functools.partial(net_loss, model), part.placements, blocks=r"block_\d(/Dense_0)?")
    jaxpr = jax.make_jaxpr(lambda p: stored(p, variables["batch_stats"], x, True))(state.params)
    rematted = [e for e in traces.equations(jaxpr.jaxpr) if e.primitive.name.startswith(("remat", "checkpoint"))]
    assert len(rematted) == 3  # block_0 twice, block_1 once


def test_blocks_that_match_nothing_are_an_error():
    _, params, loss_fn = small_llama()
    state, part = shard(params)
    for blocks in ("decoder", r"layer_\d", "ayer_0"):
        stored = where_used.where_used(loss_fn, part.placements, blocks=blocks)
        if blocks == r"layer_\d":
            assert jax.eval_shape(stored, state.params, tokens()).shape == ()
            continue
        with pytest.raises(UserError, match=rf"^blocks: {blocks!r} matches no module .* such as 'layer"):
            jax.eval_shape(stored, state.params, tokens())


@runs.LONG
def test_recompute_keeps_less_and_changes_no_gradient():
    _, params, loss_fn = small_llama()
    state, part = shard(params)
    kept, found = {}, {}
    for recompute in ("", r"layer_0/mlp/up", r".*/mlp/up", r".*/attention/(q|k)"):
        stored = where_used.where_used(loss_fn, part.placements, blocks=r"layer_\d+", recompute=recompute)
        residuals = jax.eval_shape(lambda p, f=stored: jax.vjp(lambda q: f(q, tokens()), p)[1], state.params)
        kept[recompute] = sum(leaf.size for leaf in jax.tree.leaves(residuals) if hasattr(leaf, "size"))
        if recompute != r"layer_0/mlp/up":
            found[recompute] = jax.jit(jax.grad(stored))(state.params, tokens())
            assert_close(found[recompute], found[""])
    up = 3 * 5 * 128  # of one layer
    assert kept[""] - kept[r"layer_0/mlp/up"] == up and kept[""] - kept[r".*/mlp/up"] == 2 * up
    assert kept[r".*/attention/(q|k)"] < kept[""]


@pytest.mark.parametrize("remat", runs.cases(["dots", "full"], long=["full"]))
def test_offload_keeps_in_the_hosts_memory_and_changes_no_gradient(remat):
    """The device keeps everything but the modules' matmuls, or the blocks' inputs."""
    _, params, loss_fn = small_llama()
    state, part = shard(params)
    up, layers = {"offload": r".*/mlp/up"}, {"offload": r"layer_\d+"}
    again = {"recompute": r".*/mlp/up"} if remat == "dots" else {}
    kept, found = {}, {}
    for options in ({}, up, layers, again):
        stored = where_used.where_used(loss_fn, part.placements, blocks=r"layer_\d+", remat=remat, **options)
        sizes = kept[str(options)] = {jax.memory.Space.Device: 0, jax.memory.Space.Host: 0}

        def look(params, stored=stored, sizes=sizes):
            for leaf in jax.tree.leaves(jax.vjp(lambda q: stored(q, tokens()), params)[1]):
                sizes[jax.typeof(leaf).memory_space] += leaf.size

        jax.eval_shape(look, state.params)
        if "recompute" not in options:
            found[str(options)] = jax.jit(jax.grad(stored))(state.params, tokens())
            assert_close(found[str(options)], found["{}"])
    of = lambda space: {what: sizes[space] for what, sizes in kept.items()}  # noqa: E731
    on_host, on_device = of(jax.memory.Space.Host), of(jax.memory.Space.Device)
    assert on_host[str(up)] == 2 * 3 * 5 * 128
    assert on_host[str(layers)] == 2 * 3 * 5 * 64
    assert on_device[str(up)] == on_device[str(again)]
    if remat == "full":
        assert on_device[str(layers)] == on_device["{}"] - on_host[str(layers)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": r"layer_\d+", "offload": "mlp/up"}, r"^offload: 'mlp/up' matches no module called inside a block"),
        (
            {"blocks": ".*", "offload": ".*", "remat": "none"},
            r"^offload: '\.\*' names modules whose results are kept in host memory",
        ),
        (
            {"blocks": r"layer_\d+", "offload": ".*/mlp/up", "recompute": ".*/mlp/(up|gate)"},
            r"^recompute: '.*' and offload: '.*' both match layer_\d/mlp/up",
        ),
        (
            {"blocks": r"layer_\d+", "recompute": "mlp/up"},
            r"^recompute: 'mlp/up' matches no module called inside a block",
        ),
        ({"blocks": r"layer_\d+", "recompute": "mlp/("}, r"^recompute: 'mlp/\(' is not a regex"),
        ({"recompute": "mlp/up"}, r"^recompute: 'mlp/up' needs `blocks`, and it is empty"),
        (
            {"blocks": ".*", "recompute": ".*", "remat": "full"},
            r"^recompute: '\.\*' names matmuls that remat='dots' does",
        ),
    ],
)
def test_recompute_that_cannot_take_effect_is_an_error(options, message):
    _, params, loss_fn = small_llama()
    state, part = shard(params)
    with pytest.raises(UserError, match=message):
        jax.eval_shape(where_used.where_used(loss_fn, part.placements, **options), state.params, tokens())


def matmuls(loss_of_stored, params, precision=None):
    """Counts the matmuls of a loss and its gradients."""
    with jax.default_matmul_precision(precision):
        jaxpr = jax.make_jaxpr(jax.grad(loss_of_stored))(params, tokens())
    return sum(equation.primitive.name == "dot_general" for equation in traces.equations(jaxpr.jaxpr))


@runs.LONG
def test_a_precision_set_for_all_changes_nothing_of_what_is_kept():
    _, params, loss_fn = small_llama()
    state, part = shard(params)
    counts = {}
    for recompute in ("", r"layer_0/mlp/up", r".*/mlp/up"):
        stored = where_used.where_used(loss_fn, part.placements, blocks=r"layer_\d+", recompute=recompute)
        counts[recompute] = matmuls(stored, state.params)
        assert {matmuls(stored, state.params, precision) for precision in ("default", "highest")} == {counts[recompute]}
    assert [counts[r] - counts[""] for r in counts] == [0, 1, 2]


class TwoBlocks(nn.Module):
    """Two blocks of two matmuls, the second of which need not be kept, and a head."""

    precision: str | None

    @nn.compact
    def __call__(self, x):
        for number in range(2):
            y = nn.tanh(nn.Dense(32, precision=self.precision, name=f"up_{number}")(x))
            x = x + nn.tanh(nn.Dense(6, precision=self.precision, name=f"down_{number}")(y))
        return nn.Dense(1, precision=self.precision)(x)


def test_a_model_with_a_precision_of_default_keeps_the_residuals_of_dots():
    def count(precision, recompute):
        model = nn.Sequential([TwoBlocks(precision), TwoBlocks(precision)])
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((3, 6)))["params"]
        state, part = shard(jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes))

        def loss_fn(params, tokens):
            return jnp.mean(model.apply({"params": params}, tokens.astype(jnp.float32) / 67) ** 2)

        options = {"blocks": r"layers_\d", "recompute": recompute}
        return matmuls(where_used.where_used(loss_fn, part.placements, **options), state.params)

    first, both = r"layers_0/up_0", r"layers_\d/(up|down)_0"
    assert count(None, "") == count("default", "")
    assert count(None, first) == count("default", first) == count(None, "") + 1
    assert count(None, both) == count("default", both) == count(None, "") + 4


def test_a_module_that_changes_variables_is_not_computed_again():
    model, x = Net(), jnp.ones((8, 16))
    variables = model.init({"params": jax.random.key(0)}, x, True)
    state, part = shard(variables["params"])
    for recompute in (r"block_\d/Dense_0", r"block_\d/BatchNorm_0"):
        options = {"blocks": r"block_\d", "recompute": recompute}
        stored = where_used.where_used(functools.partial(net_loss, Net()), part.placements, **options)
        step = functools.partial(jax.eval_shape, lambda p, f=stored: f(p, variables["batch_stats"], x, False)[0])
        if "Dense" in recompute:
            assert step(state.params).shape == ()
        else:
            with pytest.raises(UserError, match=r"^recompute: block_0/BatchNorm_0 changes variables"):
                step(state.params)


def test_an_unknown_policy_is_an_error():
    with pytest.raises(UserError, match=r"^remat: must be one of none, dots, attention, full, and is 'some'"):
        where_used.where_used(lambda params: 0.0, {}, remat="some")


def test_stage_0_without_rematerialisation_adds_no_collective():
    """Only the all-reduce of the gradients, and no gather."""
    _, params, loss_fn = small_llama()
    mesh = mesh_lib.make_mesh()
    state, part = shard(params, stage=0, mesh=mesh)
    stored = where_used.where_used(loss_fn, part.placements, remat="none")
    batch = jax.ShapeDtypeStruct((8, 6), jnp.int32, sharding=mesh_lib.batch_sharding(mesh))
    text = jax.jit(jax.grad(stored)).lower(state.params, batch).compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text
