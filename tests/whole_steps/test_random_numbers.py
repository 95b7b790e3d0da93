"""Walks the table of docs/design.md that says what each random number depends on. This module tests what no one module does.

A draw is a function of all that may change it. One that differs where the table says so, and nowhere else, is right: two steps, passes or
devices with one mask teach less, and a draw by what a resumed run does not have is another run.
"""

import dataclasses
import functools
import itertools
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

import zerojax
from zerojax import train_state, tree
from zerojax.data import batches, objectives, tokenizer
from zerojax.inference import choice, sampling
from zerojax.inference.engine import row_sampling
from zerojax.lora import families as families_lora
from zerojax.models import families, family
from zerojax.optim import fused
from zerojax.trainer import program, steps
from zerojax.trainer import state as state_lib
from zerojax.trainer.tuning import conversations, drawing, lessons, rollouts
from zerojax.zero.gradients import accumulate

TABLE = (runs.ROOT / "docs" / "design.md").read_text().partition("## Random numbers\n")[2].partition("\n## ")[0]
WIDTH, PASSES, DEVICES = 64, 2, 2  # two sets of 64 bits are not equal by chance
EACH = [(number, device) for number in range(PASSES) for device in range(DEVICES)]
RATE = 0.5  # of dropout


class Draw(NamedTuple):
    """How something is drawn: f(**coordinates, each 0 or 1) -> what was drawn, and the coordinates that change nothing."""

    by: Callable[..., Any]
    not_by: tuple[str, ...] = ()


class Layer(nn.Module):
    """Returns what dropout leaves of ones, and what the dropout of its adapter does."""

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(RATE, deterministic=False)(x), nn.Dense(WIDTH, use_bias=False, name="linear")(x)


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.stack([jnp.stack(Layer(name=f"layer_{number}")(x), -2) for number in range(2)], -3)


def masked_loss(model, params, batch, key):
    """Returns a loss whose gradient with respect to a row of `rows` is what its device and pass drew in each layer for it."""
    x = jnp.ones((len(batch["tokens"]), WIDTH))
    drawn = Layers().apply({"params": params["layers"]}, x, rngs={"dropout": key})  # [rows, layers, 2, width]
    return jnp.sum(params["rows"][batch["tokens"][:, 0]] * drawn)


@functools.cache
def masked_step():
    """Returns the state, and the step, of a run with dropout in the model and in adapters."""
    config = runs.config(model__preset="bart_test", model__dropout=RATE, lora__r=4, lora__dropout=RATE)
    zero, one = jnp.zeros((WIDTH, WIDTH)), jnp.eye(WIDTH)
    linear = {"kernel": zero, "lora_a": one, "lora_b": one}
    params = {"layers": {f"layer_{n}": {"linear": linear} for n in range(2)}}
    params["rows"] = jnp.zeros((len(EACH), 2, 2, WIDTH))
    chosen: Any = types.SimpleNamespace(scale=lambda path: 1.0, lora=config.lora)
    drawing = dataclasses.replace(families.PRESETS["bart_test"], loss=masked_loss)
    loss = steps.loss(config, families_lora.with_adapters(drawing, chosen), None, lambda step: 0.0)
    state = train_state.create(params, optax.sgd(1.0), jax.random.key(0))
    mesh = zerojax.make_mesh(devices=jax.devices()[:DEVICES])
    state, partition = zerojax.shard_train_state(state, mesh=mesh, stage=0, trainable="rows")
    how = {"reduce_dtype": jnp.float32, "grad_accum": PASSES, "donate": False}
    return state, zerojax.make_train_step(loss, partition, blocks=r"layer_\d", **how)


@functools.cache
def masks(seed, step):
    """Returns what is dropped, bool[passes, devices, layers, 2 (of the model, of its adapters), width]."""
    state, train_step = masked_step()
    state = state.replace(step=jnp.int32(step), rng=jax.random.key_data(jax.random.key(seed)))
    state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, masked_step()[0]))
    tokens = np.arange(len(EACH), dtype=np.int32).reshape(PASSES, DEVICES, 1)
    rows = np.asarray(train_step(state, {"tokens": tokens})[0].params["rows"])
    return (rows == 0).reshape(PASSES, DEVICES, *rows.shape[1:])


def dropped(kind):
    return Draw(lambda seed, step, micro_batch, device, layer: masks(seed, step)[micro_batch, device, layer, kind])


@functools.cache
def first_params(seed, devices):
    built = program.build(
        runs.config(seed=seed, lora__r=4, zero__min_size=0), tokenizer_vocab=320, devices=jax.devices()[: devices + 1]
    )
    return {path: np.asarray(leaf) for path, leaf in tree.flatten(state_lib.first(built).params)}


def first(paths):
    return Draw(lambda seed, weight, devices: first_params(seed, devices)[paths[weight]], ("devices",))


@functools.cache
def summing():
    """Returns f(step, number, device) -> sums in 16 bits, of which the pass `number` alone rounds."""

    def run(step, number, device):
        def loss(params, batch, state):
            return batch * sum(jnp.sum(leaf) for leaf in params.values()) / 3, {}

        params = dict.fromkeys("ab", jnp.zeros(WIDTH))
        state = train_state.create(params, optax.sgd(1.0), jax.random.key(0)).replace(step=step)
        summed = accumulate.value_and_grad(loss, PASSES, in_16_bits=True, device=device)
        return summed(params, (jnp.arange(PASSES) == number) * 1.0, state)[1]

    return jax.jit(run)


def rounded_sum(step, micro_batch, device, weight):
    return summing()(step, micro_batch, device)["ab"[weight]]


@functools.cache
def rounded_update(step):
    tx, params = fused.fused_adamw(0.1, moments="bf16", stochastic_rounding=True), dict.fromkeys("ab", jnp.ones(WIDTH))
    params = {name: leaf.astype(jnp.bfloat16) for name, leaf in params.items()}
    state = tx.init(params)._replace(count=jnp.int32(step + 5))
    state = state._replace(**{name: dict.fromkeys("ab", jnp.full(WIDTH, 0.3, jnp.bfloat16)) for name in ("mu", "nu")})
    return tx.apply({name: jnp.full(WIDTH, 0.7) for name in "ab"}, state, params)[1].mu


@functools.cache
def picked(seed, stream, token, slot):
    rows = row_sampling.Draws.of_rows(2)
    rows.temperature[:], rows.seed[slot], rows.stream[slot] = 1.0, seed, stream
    scores = jnp.zeros((2, 2**16))
    return row_sampling.draw(scores, jax.tree.map(jnp.asarray, rows), jnp.array([token] * 2), scores > 0)[slot]


@functools.cache
def chosen_tokens(seed, token):
    picks = choice.Choice(4, family.SpecialTokens(stops=()), sampling.Sampling(1.0))
    part = choice.AnswerPart(jnp.zeros(2, jnp.int32), jnp.full(2, 4))
    found = picks.first(jnp.zeros((2, 2**16)), jnp.array([1, 1]), part, jnp.uint32(seed))
    return (picks.add(found, jnp.zeros((2, 2**16)), part, jnp.uint32(seed)) if token else found).token


@functools.cache
def asked(seed, step):
    """Returns the prompts and the settings of what `grpo` asks in a step, two prompts with two answers each."""
    config = runs.config(seed=seed, data__task="grpo", grpo__group=2, data__answer_len=4, data__train_file="none")
    sizes, aside = types.SimpleNamespace(global_batch_size=4), {"rollout_mesh": (), "rollouts": None, "model": None}
    program = types.SimpleNamespace(config=config, sizes=sizes, **aside)  # with devices aside the drawer copies nothing
    drawer = drawing.ByEngine(program, None)
    found: list[Any] = []
    submit = lambda prompt, **settings: found.append((np.array(prompt), settings))  # noqa: E731
    drawer._engine = types.SimpleNamespace(submit=submit, renew=lambda params: None, step=lambda: next(iter(())))
    own = types.SimpleNamespace(_prompts=[np.array([n]) for n in range(300)], _drawer=drawer, _program=program)
    own._tokenizer, own._look = types.SimpleNamespace(decode=lambda ids: ""), lambda: None
    own._rules = conversations.Rules(None, "", 1, 0.0, config.data.answer_len, config.seq_len + 1, None, None, None)
    with pytest.raises(StopIteration):
        rollouts.Rollouts._ask(own, step, None, 0)
    return found


def answered(seed, step, answer):
    settings = asked(seed, step)[answer][1]
    return picked(settings["seed"], settings["stream"], 0, 0)


@functools.cache
def asked_of_student(seed, step):
    """Returns the prompts and streams of the answers that a student gives in a step."""
    config, found = runs.config(seed=seed, data__answer_len=4), []
    program = types.SimpleNamespace(config=config, sizes=types.SimpleNamespace(global_batch_size=2))
    drawer = types.SimpleNamespace(renew=lambda params: None, submit=found.append, step=lambda: next(iter(())))
    own = types.SimpleNamespace(
        _prompts=[np.array([n]) for n in range(300)], _drawer=drawer, _program=program, _pairs=0
    )
    with pytest.raises(StopIteration):
        lessons.Lessons._answers(own, step + 1, None)
    return found


def drawn_tokens(seed, row, window):
    made = batches.random_batches(300, rows=[row], num_rows=2, seq_len=8, seed=seed)
    try:
        return [next(made)["tokens"] for _ in range(2)][window]
    finally:
        made.close()


def spans(seed, row, window):
    form = objectives.SpanCorruption().form(tokenizer.load_tokenizer("bytes"), 64)
    return form.arrays(np.full(form.window, 5), (seed, row, window))["inputs"]


def order(size):
    return lambda seed, epoch: [batches.shuffled(epoch * size + n, size=size, seed=seed) for n in range(size)]


DRAWS = {
    "dropout": dropped(0),
    "dropout of adapters": dropped(1),
    "first weights": first(["layer_0/mlp/up/kernel", "layer_0/mlp/gate/kernel"]),
    "first weights of adapters": first(["layer_0/attention/q/lora_a", "layer_0/attention/v/lora_a"]),
    "rounding of sums in 16 bits": Draw(rounded_sum),
    "rounding of an update": Draw(lambda step, weight: rounded_update(step)["ab"[weight]]),
    "order of examples": Draw(order(40)),
    "order of many examples": Draw(order(batches.SMALL + 1)),
    "random tokens": Draw(drawn_tokens),
    "spans that are cut out": Draw(spans),
    "a token of a request": Draw(picked, ("slot",)),
    "prompts of `grpo`": Draw(lambda seed, step: [prompt for prompt, _ in asked(seed, step)]),
    "an answer of `grpo`": Draw(answered),
    "whether a student's step learns from its own answers": Draw(lessons.drawn),
    "prompts of a student": Draw(lambda seed, step: [answer.prompt for answer in asked_of_student(seed, step)]),
    "an answer of a student": Draw(
        lambda seed, step, answer: picked(seed, asked_of_student(seed, step)[answer].stream, 0, 0)
    ),
    "a token of `generate`": Draw(lambda seed, token, row: chosen_tokens(seed, token)[row]),
}


def rows_of_table():
    """Returns {what is drawn: what it depends on} of docs/design.md."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|.*$", TABLE, re.M)[1:]
    return {name: tuple(by.replace("-", "_").split(", ")) for name, by in rows if "---" not in name}


def test_each_draw_is_in_the_table():
    assert rows_of_table().keys() == DRAWS.keys()


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_depends_on_what_the_table_says_and_on_nothing_else(name):
    own, by = DRAWS[name], rows_of_table()[name]
    drawn = {}
    for values in itertools.product((0, 1), repeat=len(by)):
        at = dict(zip(by, values))
        found = [
            np.asarray(own.by(**at, **dict(zip(own.not_by, others)))).tobytes()
            for others in itertools.product((0, 1), repeat=len(own.not_by))
        ]
        assert len(set(found)) == 1, f"{name} at {at} depends on {own.not_by}"
        assert found[0] not in drawn.values(), f"{name}: {at} draws what {drawn} does"
        drawn[values] = found[0]
    again = np.asarray(own.by(**dict.fromkeys(by, 1), **dict.fromkeys(own.not_by, 1))).tobytes()
    assert again == drawn[(1,) * len(by)]
