"""Checks that blocks that are alike are traced once, and that the step stays what it is. This module tests zerojax.zero.blocks.alike."""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.zero.blocks import alike, where_used
from zerojax.zero.weights import gather

WIDTH, LAYERS = 16, 4
traced: list[str] = []  # the names of the layers that were traced


class Layer(nn.Module):
    """A residual MLP with a rule for a derivative in it."""

    slope: float = 1.0
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x, mask=None, is_cut=False):
        traced.append(self.name)
        y = nn.Dense(2 * WIDTH, dtype=self.dtype, name="up")(nn.LayerNorm(dtype=self.dtype, name="norm")(x))
        y = nn.Dense(WIDTH, dtype=self.dtype, name="down")(
            self.slope * jax.nn.relu(y[..., : WIDTH if is_cut else None])
        )
        return x + (y if mask is None else mask[:, None] * y)


class Net(nn.Module):
    """Layers, one after the other; `slopes` are the fields of some."""

    slopes: tuple[tuple[int, float], ...] = ()

    @nn.compact
    def __call__(self, x, mask=None):
        for number in range(LAYERS):
            layer = Layer(dict(self.slopes).get(number, 1.0), name=f"layer_{number}")
            x = layer(x, mask if number else None, is_cut=False)
        return x


def lowered(monkeypatch, claims: bool, net: nn.Module, **how):
    """Returns the lowered step of a net whose layers claim to be alike, or not; `traced` has the layers that were traced for it."""
    step, *args = made(monkeypatch, claims, net, **how)
    traced.clear()
    return step.lower(*args)


def made(monkeypatch, claims, net, stage=3, wrap=lambda loss, params: (loss, params), model=1, **how):
    """Returns the step, and its arguments."""
    monkeypatch.setattr(Layer, alike.CLAIM, claims, raising=False)

    def loss_fn(params, batch, state):
        error = net.apply({"params": params}, batch["x"], batch["mask"]) - batch["x"]
        return jnp.mean(error.astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((8, WIDTH), jnp.bfloat16)
    loss, params = wrap(loss_fn, jax.eval_shape(net.init, jax.random.key(0), x)["params"])
    zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)  # noqa: E731
    state = jax.eval_shape(lambda: train_state.TrainState.create(apply_fn=None, params=zeros(), tx=optax.sgd(0.1)))
    mesh = zerojax.make_mesh(model=model, devices=jax.devices()[:4])
    partition = zerojax.partition_state(state, mesh=mesh, stage=stage, min_size=1)
    how = {"blocks": r"layer_\d", "compute_dtype": jnp.bfloat16, "reduce_dtype": jnp.float32, **how}
    how["batch_specs"] = [("", zerojax.batch_sharding(mesh).spec)]  # otherwise the loss is read first
    step = zerojax.make_train_step(loss, partition, **how)
    return step, partition.abstract_state, {"x": x, "mask": jax.ShapeDtypeStruct((8,), jnp.bfloat16)}


def with_adapters(loss, params, alphas=()):
    lora = zerojax.Lora(r=2, target_modules=["up"], alpha_pattern=dict(alphas))
    x = jnp.zeros((8, WIDTH))
    call = lambda params: Net().apply({"params": params}, x)  # noqa: E731
    add = lambda: zerojax.add_lora(jax.tree.map(lambda w: jnp.zeros(w.shape), params), lora, jax.random.key(0), call)  # noqa: E731
    return zerojax.with_lora(loss, lora), jax.eval_shape(add)


# Layer 0 is called without a mask.
@pytest.mark.parametrize(
    ("net", "how", "once"),
    [
        (Net(), {}, "01"),
        (Net(), {"stage": 0, "remat": "none"}, "01"),
        (Net(), {"stage": 2, "remat": "full"}, "01"),
        (Net(slopes=((2, 2.0),)), {}, "012"),
        (Net(), {"recompute": "layer_2/up"}, "012"),
        (Net(), {"offload": r"layer_[12]/up"}, "013"),
        (Net(), {"wrap": with_adapters}, "01"),
        (Net(), {"wrap": functools.partial(with_adapters, alphas=[("layer_2.up", 4)])}, "012"),
        (Net(), {"model": 2, "activations": [(r"layer_\d/up", P(None, "model"))]}, "01"),
        (Net(), {"model": 2, "activations": [(r"layer_[013]/up", P(None, "model"))]}, "012"),
    ],
)
def test_blocks_that_are_alike_are_traced_once_and_the_step_is_the_same(monkeypatch, net, how, once):
    found = {}
    for claims in (False, True):
        step = lowered(monkeypatch, claims, net, **how)
        found[claims] = step.as_text()
        expected = once if claims else "0123"
        assert sorted(traced) == [f"layer_{number}" for number in expected]
    assert found[True] == found[False]


def test_each_block_has_its_own_names(monkeypatch):
    names = re.findall(r'loc\("([^"]*)"', lowered(monkeypatch, True, Net()).as_text(debug_info=True))
    ends: dict[str, set] = {}
    for name in names:
        layers = set(re.findall(r"layer_\d", name))
        assert len(layers) < 2, name
        if layers:
            (layer,) = layers
            ends.setdefault(layer, set()).add(name.replace(layer, "layer"))
    assert sorted(ends) == [f"layer_{number}" for number in range(LAYERS)]
    of_arguments = {name for name in ends["layer_0"] if "['layer']" in name}
    assert (
        of_arguments
        and ends["layer_1"] - of_arguments == ends["layer_2"] - of_arguments == ends["layer_3"] - of_arguments
    )
    assert any("transpose(" in name and "up/dot_general" in name for name in ends["layer_3"])


def test_modules_whose_fields_cannot_be_compared_are_not_alike(monkeypatch):
    lowered(monkeypatch, True, Net(slopes=tuple((number, Unhashable(1.0)) for number in range(LAYERS))))
    assert len(traced) == LAYERS


def test_blocks_whose_wire_notes_which_weights_are_read_are_each_traced(monkeypatch):
    monkeypatch.setattr(gather.Plain, "read_as", lambda self, first, path: False)  # as of a table by columns
    lowered(monkeypatch, True, Net())
    assert len(traced) == LAYERS


def test_blocks_under_an_interceptor_that_claims_nothing_are_each_traced(monkeypatch):
    def around(loss, params):
        def run(*args):
            with nn.intercept_methods(lambda call, args, kwargs, context: call(*args, **kwargs)):
                return loss(*args)

        return run, params

    lowered(monkeypatch, True, Net(), wrap=around)
    assert len(traced) == LAYERS


@pytest.mark.parametrize(("slopes", "once"), [((), "01"), (((2, 2.0),), "012")])
def test_forward_only_alike_blocks_are_one_function(monkeypatch, slopes, once):
    monkeypatch.setattr(Layer, alike.CLAIM, True, raising=False)
    net, x = Net(slopes), jax.random.normal(jax.random.key(1), (8, WIDTH))
    params = net.init(jax.random.key(0), x)["params"]
    apply = lambda params, x, mask: net.apply({"params": params}, x, mask)  # noqa: E731
    run, mask = jax.jit(where_used.forward_only(apply, {}, blocks=r"layer_\d")), jnp.linspace(0, 1, 8)
    traced.clear()
    text = run.lower(params, x, mask).as_text()
    assert sorted(traced) == [f"layer_{number}" for number in once]
    assert text.count("stablehlo.dot_general") == 2 * len(once)
    assert jnp.array_equal(run(params, x, mask), jax.jit(apply)(params, x, mask))


def test_what_of_a_result_is_no_array_is_that_of_the_call(monkeypatch):
    class Counts(nn.Module):
        calls_are_alike = True

        @nn.compact
        def __call__(self, x):
            y = x + nn.Dense(WIDTH, name="up")(x)
            return (y, len(x)) if x.ndim == 2 else {"y": y}

    class Reads(nn.Module):
        @nn.compact
        def __call__(self, x):
            for number, count in enumerate((3, 4, 3, None)):
                found = Counts(name=f"layer_{number}")(x[:count] if count else x[None])
                x = found["y"][0] if isinstance(found, dict) else x.at[: len(found[0])].set(found[0] / found[1])
            return x

    net, x = Reads(), jax.random.normal(jax.random.key(1), (8, WIDTH))
    params = net.init(jax.random.key(0), x)["params"]
    apply = lambda params, x: net.apply({"params": params}, x)  # noqa: E731
    run = where_used.forward_only(apply, {}, blocks=r"layer_\d")
    assert jnp.array_equal(jax.jit(run)(params, x), jax.jit(apply)(params, x))


class Unhashable(float):
    __hash__ = None


def test_a_program_for_each_kind_is_the_same_where_blocks_are_traced_once(monkeypatch):
    found = {}
    for claims in (False, True):
        step, *args = made(monkeypatch, claims, Net(), programs="kinds")
        traced.clear()
        programs = step.one_pass(*args).schedule.cut.programs
        expected = "01" if claims else "0123"
        assert sorted(set(traced)) == [f"layer_{number}" for number in expected]
        found[claims] = [(program.name, program.run.cost_analysis().get("flops")) for program in programs]
    assert len(found[True]) > 2 * LAYERS and found[True] == found[False]


def test_the_claim_of_a_block_that_reads_an_array_of_the_loss_changes_nothing(monkeypatch):
    given = []  # JAX 0.10 takes the array, and later releases refuse it

    class Reads(nn.Module):
        @nn.compact
        def __call__(self, x, mask=None):
            given[:] = [nn.Dense(WIDTH, name="outer")(x)]
            for number in range(LAYERS):
                x = Layer(Slope(), name=f"layer_{number}")(x)
            return x

    class Slope(float):
        def __mul__(self, other):
            return other * given[0].sum().astype(other.dtype)

    def outcome(claims):
        try:
            return lowered(monkeypatch, claims, Reads()).as_text()
        except zerojax.UserError as error:
            return str(error)

    assert outcome(False) == outcome(True)
    step, *args = made(monkeypatch, True, Reads(), programs="kinds")
    with pytest.raises(
        zerojax.UserError, match=r"^blocks: .* reads an array that is neither its weight nor its argument"
    ):
        step.one_pass(*args)
