"""Checks that scans and blocks that no interceptor sees gather their own weights. This module tests zerojax.zero.blocks.traced_blocks."""

import functools
import re
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx import bridge
from jax.sharding import PartitionSpec as P

from zerojax import errors, train_state
from zerojax import mesh as mesh_lib
from zerojax.plan import targets
from zerojax.zero import shard_state, stages, step
from zerojax.zero.step_programs import xla_options
from zerojax.zero.weights import layer_stacks

LAYERS, WIDTH = 8, 64
# Sums over devices in another order, over five steps.
LAST_PLACES = 1e-5
GATHER = r" all-gather(?:-start)?\("


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH, name="down")(
            nn.gelu(nn.Dense(2 * WIDTH, name="up")(nn.RMSNorm(name="norm")(x)))
        ), None


class LinenScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(LinenLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return nn.Dense(16, name="out")(layers(name="layers")(x, None)[0])


class LinenList(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(LAYERS):
            x, _ = LinenLayer(name=f"layer_{number}")(x, None)
        return nn.Dense(16, name="out")(x)


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NnxScan(nnx.Module):
    def __init__(self, rngs, is_remat=False):
        self.is_remat, self.out = is_remat, nnx.Linear(WIDTH, 16, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxLayer, in_axes=(0,), out_axes=0))(rngs)

    def __call__(self, x):
        body = lambda x, layer: layer(x)  # noqa: E731
        body = nnx.remat(body) if self.is_remat else body
        return self.out(nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers))


class NnxList(nnx.Module):
    def __init__(self, rngs):
        self.out, self.layers = (
            nnx.Linear(WIDTH, 16, rngs=rngs),
            nnx.List([NnxLayer(rngs) for _ in range(LAYERS)]),
        )

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def bridged(key):
    model = bridge.ToNNX(LinenScan())
    model.lazy_init(jnp.zeros((1, WIDTH)), rngs=nnx.Rngs(key))
    return model


def loss_of(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def of_nnx(make):
    graph, _, rest = nnx.split(make(jax.random.key(0)), nnx.Param, ...)
    init = lambda key: nnx.state(make(key), nnx.Param)  # noqa: E731
    return init, lambda params, batch, state: loss_of(nnx.merge(graph, params, rest)(batch["x"]), batch)


def of_functions():
    def layer(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (WIDTH, 2 * WIDTH)) / 8,
            "down": jax.random.normal(down, (2 * WIDTH, WIDTH)) / 11,
        }

    def init(key):
        out = jax.random.normal(key, (WIDTH, 16)) / 8
        return {"layers": jax.vmap(layer)(jax.random.split(key, LAYERS)), "out": out}

    @jax.jit
    def loss(params, batch, state):
        body = lambda x, own: (x + jax.nn.gelu(x @ own["up"]) @ own["down"], None)  # noqa: E731
        # Weights are cast all together, as mixed precision by hand does.
        layers = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params["layers"])
        return loss_of(jax.lax.scan(body, batch["x"], layers)[0] @ params["out"], batch)

    return init, loss


class EquinoxLayer(eqx.Module):
    norm: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.RMSNorm(WIDTH)
        up, down = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=up), eqx.nn.Linear(2 * WIDTH, WIDTH, key=down)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class EquinoxList(eqx.Module):
    layers: list
    out: eqx.nn.Linear

    def __init__(self, key):
        self.layers = [EquinoxLayer(own) for own in jax.random.split(key, LAYERS)]
        self.out = eqx.nn.Linear(WIDTH, 16, key=key)

    def __call__(self, x):
        for layer in self.layers:
            x = eqx.filter_checkpoint(layer)(x)
        return self.out(x)


def of_equinox():
    rest = eqx.filter(EquinoxList(jax.random.key(0)), eqx.is_array, inverse=True)
    init = lambda key: {"net": eqx.filter(EquinoxList(key), eqx.is_array)}  # noqa: E731
    return init, lambda params, batch, state: loss_of(jax.vmap(eqx.combine(params["net"], rest))(batch["x"]), batch)


def of_linen(change=None):
    net = LinenList()
    init = lambda key: net.init(key, jnp.zeros((1, WIDTH)))["params"]  # noqa: E731

    def loss(params, batch, state):
        params = params if change is None else jax.tree.map(change, params)
        return loss_of(net.apply({"params": params}, batch["x"]), batch)

    return init, loss


def penalised(form, penalty=lambda leaf: jnp.sum(jnp.square(leaf))):
    """Returns a loss with a penalty on all weights."""
    init, loss = form

    def with_penalty(params, batch, state):
        return 1e-4 * sum(map(penalty, jax.tree.leaves(params))) + loss(params, batch, state)

    return init, with_penalty


def in_checkpoint():
    """Returns a loss in a jitted checkpoint of the user's, with a penalty on all weights."""
    init, loss = penalised(of_linen(lambda leaf: leaf.astype(jnp.float32) * 1))
    return init, jax.jit(jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable))


UNROLLED = {  # with a regex of their layers
    "Linen with changed weights": (lambda: of_linen(lambda leaf: leaf * 1), r"layer_\d+"),
    "Linen in a checkpoint, with a penalty": (in_checkpoint, r"layer_\d+"),
    "Equinox": (of_equinox, r"net/layers/\d+"),
    "Equinox, by the path of a list": (of_equinox, "net/layers"),
    "Equinox with a penalty": (lambda: penalised(of_equinox()), r"net/layers/\d+"),
    "Equinox with norms": (
        lambda: penalised(of_equinox(), lambda leaf: optax.global_norm(leaf + 1)),
        r"net/layers/\d+",
    ),
}
FORMS = {
    "ToNNX of nn.scan(nn.remat)": lambda: of_nnx(bridged),
    "nnx.scan": lambda: of_nnx(lambda key: NnxScan(nnx.Rngs(key))),
    "nnx.scan(nnx.remat)": lambda: of_nnx(lambda key: NnxScan(nnx.Rngs(key), is_remat=True)),
    "jax.lax.scan": of_functions,
}


def batch():
    x = jax.random.normal(jax.random.key(1), (64, WIDTH))
    return {"x": x, "y": jnp.argmax(x[:, :16], -1)}


def compiled(form, devices=8, model=1, shard=None, **how):
    """Returns a state and a train step."""
    init_params, loss_fn = form

    def init(key):
        return train_state.TrainState.create(apply_fn=None, params=init_params(key), tx=optax.adamw(1e-3))

    mesh = mesh_lib.make_mesh(data=devices // model, model=model, devices=jax.devices()[:devices])
    stage = 3 if devices > 1 else 0
    state, partition = shard_state.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=stage, **shard or {})
    train_step = step.make_train_step(loss_fn, partition, **how)
    return state, train_step


def losses(state, train_step):
    found = []
    for _ in range(5):
        state, metrics = train_step(state, batch())
        found.append(float(metrics["loss"]))
    return found


def gathered(program):
    """Returns the shapes of a program's gathers."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\][^=]*? all-gather(?:-start)?\(", program.as_text())
    return {tuple(map(int, shape.split(","))) for shape in found}


@pytest.mark.parametrize("how", [{"blocks": "layers"}, {}], ids=["blocks", "no blocks"])
@pytest.mark.parametrize("reduce_dtype", [jnp.float32, None], ids=["explicit", "by the compiler"])
@pytest.mark.parametrize("name", FORMS)
def test_a_scan_gathers_a_layer_a_step_and_its_losses_are_those_of_one_device(name, reduce_dtype, how):
    state, train_step = compiled(FORMS[name](), reduce_dtype=reduce_dtype, **how)
    program = train_step.lower(state, batch()).compile()
    shapes = gathered(program)
    assert any(set(shape) >= {WIDTH, 2 * WIDTH} for shape in shapes)
    assert not [shape for shape in shapes if len(shape) == 3 and shape[0] == LAYERS], shapes
    one = losses(*compiled(FORMS[name](), devices=1))
    np.testing.assert_allclose(losses(state, train_step), one, rtol=LAST_PLACES)
    assert one[-1] < one[0]


@pytest.mark.parametrize("name", FORMS)
def test_temporaries_of_a_scan_are_at_most_those_of_a_loop(name):
    def temporaries(form, blocks):
        state, train_step = compiled(form, reduce_dtype=jnp.float32, blocks=blocks)
        return train_step.lower(state, batch()).compile().memory_analysis().temp_size_in_bytes

    unrolled = temporaries(of_nnx(lambda key: NnxList(nnx.Rngs(key))), r"layers/\d+")
    assert temporaries(FORMS[name](), "layers") <= 1.3 * unrolled


@pytest.mark.parametrize("reduce_dtype", [jnp.float32, None], ids=["explicit", "by the compiler"])
@pytest.mark.parametrize("name", UNROLLED)
def test_unrolled_layers_gather_their_own_weights_and_losses_are_those_of_one_device(name, reduce_dtype):
    make, blocks = UNROLLED[name]
    how = {"reduce_dtype": reduce_dtype, "blocks": blocks}
    state, train_step = compiled(make(), **how)
    program = train_step.lower(state, batch()).compile()
    one = losses(*compiled(make(), devices=1, **how))
    np.testing.assert_allclose(losses(state, train_step), one, rtol=LAST_PLACES)
    assert one[-1] < one[0]
    gathers, temporaries = of_linen_list(reduce_dtype)
    assert program.memory_analysis().temp_size_in_bytes <= 1.3 * temporaries
    assert len(re.findall(GATHER, program.as_text())) <= gathers + 1


@functools.cache
def of_linen_list(reduce_dtype):
    """Returns the gathers and the bytes of temporaries of the same layers in Linen, whose calls are intercepted."""
    state, train_step = compiled(of_linen(), reduce_dtype=reduce_dtype, blocks=r"layer_\d+")
    program = train_step.lower(state, batch()).compile()
    return len(re.findall(GATHER, program.as_text())), program.memory_analysis().temp_size_in_bytes


def test_a_gpu_gathers_each_unrolled_layer_once_a_pass(monkeypatch):
    """Equinox's layers have the collectives of intercepted ones: a gather for each pass, and a sum, also where the compiler inserts it."""
    devices = targets.devices("h200", "1x8")

    def collectives(form, blocks, reduce_dtype=jnp.float32):
        init_params, loss_fn = form

        def init():
            params = init_params(jax.random.key(0))
            return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

        partition = stages.partition_state(jax.eval_shape(init), mesh=mesh_lib.make_mesh(data=8, devices=devices))
        train_step = step.make_train_step(loss_fn, partition, blocks=blocks, reduce_dtype=reduce_dtype)
        text = train_step.lower(partition.abstract_state, jax.eval_shape(batch)).compile().as_text()
        return {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in ("all-gather", "reduce-scatter")}

    of_layers = collectives(of_equinox(), r"net/layers/\d+")
    assert of_layers == collectives(of_linen(), r"layer_\d+")
    assert LAYERS < of_layers["all-gather"] <= 2 * LAYERS + 2
    monkeypatch.setattr(xla_options, "_MERGED", 0)  # more than these layers have
    assert LAYERS <= collectives(of_equinox(), r"net/layers/\d+", None)["reduce-scatter"] <= LAYERS + 2


def test_sums_over_the_elements_of_stacks_gather_nothing():
    def of_large(leaf):
        return jnp.sum(jnp.where(jnp.abs(leaf) > 0.1, jnp.square(leaf), jnp.zeros_like(leaf)))

    for name, penalty in (("jax.lax.scan", of_large), ("nnx.scan", lambda leaf: jnp.sum(jnp.square(leaf)))):
        make = lambda name=name, penalty=penalty: penalised(FORMS[name](), penalty)  # noqa: E731
        state, train_step = compiled(make(), blocks="layers", reduce_dtype=jnp.float32)
        shapes = gathered(train_step.lower(state, batch()).compile())
        assert not [shape for shape in shapes if len(shape) == 3 and shape[0] == LAYERS], shapes
        one = losses(*compiled(make(), devices=1))
        np.testing.assert_allclose(losses(state, train_step), one, rtol=LAST_PLACES)


@pytest.mark.parametrize("blocks", ["layers", "layers|out"])
def test_a_regex_of_an_nnx_list_means_its_layers(blocks):
    def temporaries(blocks):
        make = of_nnx(lambda key: NnxList(nnx.Rngs(key)))
        state, train_step = compiled(make, blocks=blocks, reduce_dtype=jnp.float32)
        return train_step.lower(state, batch()).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(blocks) <= 1.1 * temporaries(r"layers/\d+")


def test_a_list_that_no_trace_can_cut_is_said():
    make = of_nnx(lambda key: NnxList(nnx.Rngs(key)))
    state, train_step = compiled(make, blocks="layers|out", recompute="out/never", reduce_dtype=jnp.float32)
    with (
        pytest.warns(UserWarning, match=r"^blocks: layers is a list of modules, .* write 'layers/\\d\+'"),
        pytest.raises(errors.UserError, match="recompute"),
    ):
        train_step.lower(state, batch())


@pytest.mark.parametrize("reduce_dtype", [jnp.float32, None], ids=["explicit", "by the compiler"])
def test_a_stack_that_is_sharded_by_its_layers_is_refused_with_the_override_for_all_of_it(reduce_dtype):
    init_params, loss_fn = FORMS["nnx.scan"]()
    params = init_params(jax.random.key(0))  # a state that was made before does not say which dims count layers
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    state, partition = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=3, min_size=8)
    train_step = step.make_train_step(loss_fn, partition, blocks="layers", reduce_dtype=reduce_dtype)
    line = r"layers/.* counts the layers .* would hold all 8 at a time; pass overrides=\[\(\"layers/\", PartitionSpec\(None, "
    with pytest.raises(errors.UserError, match=line):
        train_step(state, batch())


@pytest.mark.parametrize(
    ("blocks", "how", "line"),
    [
        (
            "net/layer",
            {},
            r"matches no module called in the loss, nor the path of a weight; .* such as 'net/layers/\\d\+'",
        ),
        (r"net/layers/\d+", {"recompute": "net/layers/0/up"}, r"is not cut at other modules where recompute, offload"),
        (r"net/layers/\d+", {"heads": "net/aut"}, r"^heads: 'net/aut' .* such as 'net/out'"),
    ],
)
def test_regexes_that_find_no_call_are_refused_in_a_line(blocks, how, line):
    state, train_step = compiled(of_equinox(), blocks=blocks, reduce_dtype=jnp.float32, **how)
    with pytest.raises(errors.UserError, match=line):
        train_step.lower(state, batch())


def nested():
    """Returns a loss that scans over groups of layers."""
    init, _ = of_functions()

    def of_groups(key):
        groups = jax.vmap(lambda own: init(own)["layers"])(jax.random.split(key, 2))
        return {"layers": groups, "out": jax.random.normal(key, (WIDTH, 16)) / 8}

    def loss(params, batch, state):
        body = lambda x, own: (x + 0.3 * jax.nn.gelu(x @ own["up"]) @ own["down"], None)  # noqa: E731
        group = lambda x, own: jax.lax.scan(body, x, own)  # noqa: E731
        return loss_of(jax.lax.scan(group, batch["x"], params["layers"])[0] @ params["out"], batch)

    return of_groups, loss


class Ensemble(nnx.Module):
    """Layers beside each other, all of which `nnx.vmap` runs at a time."""

    def __init__(self, rngs):
        self.out = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.layers = nnx.split_rngs(splits=4)(nnx.vmap(NnxLayer, in_axes=(0,), out_axes=0))(rngs)

    def __call__(self, x):
        return self.out(nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x).mean(0))


OVER_MODEL = [("up/weight", P("model", "data")), ("down/weight", P("data", "model"))]
CROSSED = {
    "scans in a scan": (nested, {"blocks": "layers"}),
    "scans in a scan, without blocks": (nested, {"reduce_dtype": None}),
    "a stack that nnx.vmap runs": (lambda: of_nnx(lambda key: Ensemble(nnx.Rngs(key))), {"blocks": "layers"}),
    "a head": (of_equinox, {"blocks": r"net/layers/\d+", "heads": "net/out"}),
    "params in host memory": (
        of_equinox,
        {"blocks": r"net/layers/\d+", "shard": {"offload": {"optimizer": "host", "params": "host"}}},
    ),
    "model": (of_equinox, {"blocks": r"net/layers/\d+", "model": 2, "shard": {"overrides": OVER_MODEL}}),
    "model and data along one dim": (
        of_equinox,
        {"blocks": r"net/layers/\d+", "model": 2, "shard": {"overrides": [("up/weight", P(("model", "data")))]}},
    ),
}


@pytest.mark.parametrize("name", CROSSED)
def test_blocks_of_a_trace_with_other_features(name):
    make, how = CROSSED[name]
    state, train_step = compiled(make(), **{"reduce_dtype": jnp.float32, **how})
    if "scans" in name:
        shapes = gathered(train_step.lower(state, batch()).compile())
        assert shapes and all(len(shape) == 2 for shape in shapes), shapes  # no group of layers
    np.testing.assert_allclose(losses(state, train_step), losses(*compiled(make(), devices=1)), rtol=LAST_PLACES)


def of_two(loss):
    """Returns a loss of two blocks `a` and `b`, each with two matrices."""

    def init(key):
        return {
            name: {"up": jax.random.normal(own, (WIDTH, WIDTH)) / 8, "down": jax.random.normal(own, (WIDTH, WIDTH)) / 8}
            for name, own in zip("ab", jax.random.split(key))
        }

    return init, lambda params, batch, state: loss_of(loss(params["a"], params["b"], batch["x"])[:, :16], batch)


def layer(own, x):
    return x + jnp.tanh(x @ own["up"]) @ own["down"]


def two_streams(a, b, x):
    left, right = jnp.tanh(x @ a["up"]), jnp.tanh(2 * x @ b["up"])
    return (left + right) @ a["down"] + (left * right) @ b["down"]


def stacked_here(a, b, x):
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), a, b)
    return jax.lax.scan(lambda x, own: (layer(own, x), None), x, stack)[0]


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (lambda a, b, x: layer(a, layer(b, layer(a, x))), None),  # weights that are read twice
        (two_streams, None),
        (stacked_here, r"test_traced_blocks.py:\d+.* reads weights of several blocks .* a/down, b/down"),
    ],
    ids=["shared", "two streams", "stacked in the loss"],
)
def test_weights_that_blocks_share_or_read_in_turns_are_right_and_what_is_gathered_whole_is_said(loss, line):
    how = {"blocks": "a|b", "reduce_dtype": jnp.float32}
    state, train_step = compiled(of_two(loss), **how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = losses(state, train_step)
    said = [str(one.message) for one in caught if str(one.message).startswith("blocks")]
    assert len(said) == (line is not None) and re.search(line or "", "".join(said), re.DOTALL)
    np.testing.assert_allclose(found, losses(*compiled(of_two(loss), devices=1)), rtol=LAST_PLACES)


def test_a_gpu_gathers_a_layer_in_a_loop_and_reduces_its_gradient_there():
    devices = targets.devices("h200", "1x8")
    init_params, loss_fn = FORMS["nnx.scan"]()

    def init():
        params = init_params(jax.random.key(0))
        return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    program, abstract = jax.make_jaxpr(init, return_shape=True)()
    partition = stages.partition_state(
        abstract, mesh=mesh_lib.make_mesh(data=8, devices=devices), layer_dims=layer_stacks.counts(program, abstract)
    )
    train_step = step.make_train_step(loss_fn, partition, blocks="layers", reduce_dtype=jnp.float32)
    compiled = train_step.lower(partition.abstract_state, jax.eval_shape(batch)).compile()
    assert not [shape for shape in gathered(compiled) if shape[0] == LAYERS and len(shape) == 3]
    loops = set(re.findall(r"body=%?([\w.-]+)", compiled.as_text()))
    inside = [text for text in compiled.as_text().split("\n\n") if text.lstrip("% ").split(" ")[0] in loops]
    assert sum("all-gather" in text for text in inside) == 2  # forward and backward
    assert sum("reduce-scatter" in text for text in inside) == 1


def test_a_warning_names_the_path_below_a_part_of_the_params():
    init, loss = of_linen(lambda leaf: leaf)
    form = (lambda key: {"net": init(key)}, lambda params, batch, state: loss(params["net"], batch, state))
    state, train_step = compiled(form, blocks=r"layer_\d+", reduce_dtype=jnp.float32)
    with pytest.warns(UserWarning, match=r"^blocks: weights of layer_0, .*; if those of net/layer_0/\S+ are meant"):
        train_step.lower(state, batch())
