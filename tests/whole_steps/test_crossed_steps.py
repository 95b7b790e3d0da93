"""Crosses the options of make_train_step on three models that zerojax does not know. This module tests a covering array of them."""

import functools
from typing import Any

import covering
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.errors import UserError

WIDTH, CLASSES, EXAMPLES, STEPS = 16, 6, 48, 3
MOST = 80  # rows of the covering array, which takes seconds to make: no process makes it to collect its tests
FEW = 1  # cases that run by default, the others with -m long
# Relative, of a loss and ten times as much of a norm: what another order of sums changes in the arithmetic's last place.
TOLERANCES = {"fp32": 1e-5, "bf16": 2.0**-6, "fp16": 2.0**-9}


class State(zerojax.TrainState):
    """A train state with batch statistics."""

    batch_stats: Any = ()


class Block(nn.Module):
    """A residual layer with batch norm and dropout."""

    dropout: float
    axes: tuple[str, ...] | None

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(2 * WIDTH, name="wide")(x)
        y = nn.BatchNorm(use_running_average=False, axis_name=self.axes, name="norm")(y)
        y = nn.Dropout(self.dropout, deterministic=not self.dropout)(nn.tanh(y))
        return x + nn.Dense(WIDTH, name="narrow")(y)


class Net(nn.Module):
    """Two of them."""

    dropout: float
    axes: tuple[str, ...] | None

    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = Block(self.dropout, self.axes, name=f"block_{number}")(x)
        return nn.Dense(CLASSES, name="head")(x)


class Layer(nn.Module):
    """A residual layer of a scan."""

    dropout: float

    @nn.compact
    def __call__(self, x, _):
        y = nn.tanh(nn.Dense(2 * WIDTH, name="wide")(nn.LayerNorm(name="norm")(x)))
        y = nn.Dropout(self.dropout, deterministic=not self.dropout)(y)
        return x + nn.Dense(WIDTH, name="narrow")(y), None


class Scanned(nn.Module):
    """Two of them, stacked."""

    dropout: float

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=2)
        x, _ = stack(self.dropout, name="block")(x, None)
        return nn.Dense(CLASSES, name="head")(x)


class Module(nnx.Module):
    """The same in NNX, with layer norm."""

    def __init__(self, rngs):
        self.wide = nnx.List([nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs) for _ in range(2)])
        self.narrow = nnx.List([nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x, dropout):
        for wide, narrow, norm in zip(self.wide, self.narrow, self.norms):
            x = x + narrow(dropout(nnx.tanh(wide(norm(x)))))
        return self.head(x)


def loss_of(logits, batch, state, updated=None):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
    weights = batch["mask"] * batch["class_weights"][batch["label"]].astype(jnp.float32)
    right = zerojax.Mean(jnp.sum((logits.argmax(-1) == batch["label"]) * batch["mask"]), jnp.sum(batch["mask"]))
    changed = {} if updated is None else {"batch_stats": updated}
    return zerojax.Mean(jnp.sum(losses * weights), jnp.sum(weights)), {"state": changed, "metrics": {"right": right}}


def key_of(state):
    return jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)


def linen(dropout, axes):
    net = Net(dropout, axes)

    def loss(params, batch, state):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = net.apply(variables, batch["x"], rngs={"dropout": key_of(state)}, mutable=["batch_stats"])
        return loss_of(logits, batch, state, changed["batch_stats"])

    variables = Net(dropout, None).init(
        {"params": jax.random.key(1), "dropout": jax.random.key(0)}, jnp.ones((4, WIDTH))
    )
    return variables["params"], {"batch_stats": variables["batch_stats"]}, loss


def scanned(dropout, axes):
    net = Scanned(dropout)

    def loss(params, batch, state):
        return loss_of(net.apply({"params": params}, batch["x"], rngs={"dropout": key_of(state)}), batch, state)

    return (
        net.init({"params": jax.random.key(1), "dropout": jax.random.key(0)}, jnp.ones((4, WIDTH)))["params"],
        {},
        loss,
    )


def of_nnx(dropout, axes):
    graph, params = nnx.split(Module(nnx.Rngs(1)), nnx.Param)

    def loss(params, batch, state):
        def drop(x):
            return nnx.Dropout(dropout)(x, rngs=nnx.Rngs(key_of(state))) if dropout else x

        return loss_of(nnx.merge(graph, params)(batch["x"], drop), batch, state)

    return params, {}, loss


MODELS = {"linen": linen, "scan": scanned, "nnx": of_nnx}
ADAMW = {"learning_rate": 1e-2, "weight_decay": 0.1}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(**ADAMW),
    "fused": lambda: zerojax.fused_adamw(**ADAMW),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
}
SETTINGS = {
    "model": tuple(MODELS),
    "stage": ("0", "1", "2", "3"),
    "mesh": ("1x1", "1x8", "2x4", "1x6"),
    "reduce": ("none", "fp32", "bf16"),
    "compute": ("fp32", "bf16", "fp16"),
    "passes": ("1", "2"),
    "accum": ("fp32", "bf16"),
    "clip": ("0", "0.1"),
    "remat": ("none", "dots", "full"),
    "recompute": ("", "wide"),
    "activations": ("", "wide"),
    "blocks": ("", "block"),
    "programs": ("one", "kinds"),
    "optimizer": tuple(OPTIMIZERS),
    "optimizer_offload": ("none", "host", "nvme"),
    "params_offload": ("none", "host", "nvme"),
    "fraction": ("1", "0.5"),
    "chunk_bytes": ("256M", "300"),
    "by_block": ("auto", "on", "off"),
    "late_norm": ("no", "yes"),
    "trainable": ("all", "some"),
    "dropout": ("0", "0.1"),
    "min_size": ("0", "300"),
    "indivisible": ("whole", "pad"),
    "donate": ("yes", "no"),
    "as": ("state", "function"),
}
RULES = [
    covering.never("offload.optimizer", optimizer_offload=("host", "nvme"), stage="0"),
    covering.never("offload.params", params_offload=("host", "nvme"), stage=("0", "1", "2")),
    covering.never("offload.fraction", fraction="0.5", optimizer_offload="none"),
    covering.never("offload.chunk_bytes", chunk_bytes="300", optimizer_offload="none", params_offload="none"),
    covering.never("offload.by_block", by_block=("on", "off"), optimizer_offload="none", params_offload="none"),
    covering.never("offload.by_block", by_block="on", optimizer_offload="nvme"),
    covering.never("offload.by_block", by_block="off", params_offload=("host", "nvme")),
    covering.never("offload.late_norm", late_norm="yes", optimizer_offload=("none", "nvme")),
    covering.never("offload.by_block", late_norm="yes", by_block="off"),
    covering.never("late_norm", late_norm="yes", clip="0"),
    covering.never("late_norm", late_norm="yes", compute="fp16"),
    covering.never("offload.params", params_offload=("host", "nvme"), optimizer_offload="none", trainable="all"),
    *(
        covering.never("each block is a program", **{name: values, other: value})
        for name, values in (("params_offload", ("host", "nvme")), ("late_norm", "yes"), ("by_block", "on"))
        for other, value in (("blocks", ""), ("reduce", "none"), ("activations", "wide"))
    ),
    *(
        covering.never("programs", programs="kinds", **{other: values})
        for other, values in (
            ("blocks", ""),
            ("reduce", "none"),
            ("activations", "wide"),
            ("optimizer_offload", ("host", "nvme")),
            ("params_offload", ("host", "nvme")),
        )
    ),
    covering.never("donate", donate="no", optimizer_offload="nvme"),
    covering.never("donate", donate="no", params_offload="nvme"),
    covering.never("blocks", blocks="block", model="nnx"),
    covering.never("recompute", recompute="wide", remat=("none", "full")),
    covering.never("recompute", recompute="wide", blocks=""),
    covering.never("offload", activations="wide", remat="none"),
    covering.never("offload", activations="wide", blocks=""),
    covering.never("both match", activations="wide", recompute="wide"),
]
HOLLOW = [
    covering.never("", params_offload=("host", "nvme"), fraction="0.5", min_size="300"),  # too few weights are left
    # Adafactor's moments of these weights are factored.
    covering.never("", optimizer="adafactor", trainable="some", min_size="300", optimizer_offload=("host", "nvme")),
    covering.never("", accum="bf16", passes="1"),
    covering.never("", indivisible="pad", mesh=("1x1", "1x8", "2x4")),
]
SPACE = covering.Space(SETTINGS, [*RULES, *HOLLOW], ("optimizer_offload", "params_offload"))


def batches(passes):
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        label = rng.integers(0, CLASSES, EXAMPLES).astype(np.int32)
        x = (np.eye(CLASSES, WIDTH)[label] + rng.normal(size=(EXAMPLES, WIDTH))).astype(np.float32)
        batch = {"x": x, "label": label, "mask": (rng.random(EXAMPLES) < 0.7).astype(np.float32)}
        if passes > 1:
            batch = {name: leaf.reshape(passes, -1, *leaf.shape[1:]) for name, leaf in batch.items()}
        yield {**batch, "class_weights": np.linspace(0.5, 1.5, CLASSES, dtype=np.float32)}


def trained(row, folder):
    """Returns the losses, the norms and the last params of a row."""
    reduce = {"none": None, "fp32": jnp.float32, "bf16": jnp.bfloat16}[row["reduce"]]
    axes = None if reduce is None else ("replica", "data")
    params, fields, loss = MODELS[row["model"]](float(row["dropout"]), axes)
    replica, data = map(int, row["mesh"].split("x"))
    mesh = zerojax.make_mesh(replica=replica, data=data, devices=jax.devices()[: replica * data])
    scaler = zerojax.DynamicLossScale(init_scale=2.0**12) if row["compute"] == "fp16" else None
    if row["late_norm"] == "yes":
        fields = {**fields, "last_norm": zerojax.first_norm()}
    tx = OPTIMIZERS[row["optimizer"]]()

    def init(params, fields):
        extra = {**fields, "rng": jax.random.key_data(jax.random.key(3))}
        if scaler is not None:
            extra["loss_scale"] = scaler.init()
        return State.create(apply_fn=None, params=params, tx=tx, **extra)

    offload = {
        "optimizer": row["optimizer_offload"],
        "params": row["params_offload"],
        "fraction": float(row["fraction"]),
    }
    offload |= {"by_block": row["by_block"], "late_norm": row["late_norm"] == "yes"}
    offload |= {"chunk_bytes": 300} if row["chunk_bytes"] == "300" else {}
    offload |= {"nvme_path": str(folder)} if "nvme" in (row["optimizer_offload"], row["params_offload"]) else {}
    how = {
        "mesh": mesh,
        "stage": int(row["stage"]),
        "min_size": int(row["min_size"]),
        "indivisible": row["indivisible"],
    }
    how |= {"trainable": "wide|head" if row["trainable"] == "some" else "", "offload": offload}
    if row["model"] == "scan":
        how["overrides"] = [("block/.*kernel", P(None, None, "data" if WIDTH % data == 0 else None))]
    state, partition = (
        zerojax.shard_train_state(init, params, fields, **how)
        if row["as"] == "function"
        else zerojax.shard_train_state(init(params, fields), **how)
    )
    dtype = {"fp32": None, "bf16": jnp.bfloat16, "fp16": jnp.float16}[row["compute"]]
    step = zerojax.make_train_step(
        loss,
        partition,
        clip_norm=float(row["clip"]),
        grad_accum=int(row["passes"]),
        compute_dtype=dtype,
        loss_scale=scaler,
        blocks=row["blocks"] and r"block(_\d+)?",
        programs=row["programs"],
        remat=row["remat"],
        recompute=row["recompute"] and r"block(_\d+)?/wide",
        offload=row["activations"] and r"block(_\d+)?/wide",
        reduce_dtype=reduce,
        accum_dtype=jnp.bfloat16 if row["accum"] == "bf16" else None,
        batch_specs=[("class_weights", P())],
        donate=row["donate"] == "yes",
    )
    losses, norms = [], []
    for batch in batches(int(row["passes"])):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return losses, norms


def baseline(row):
    """Returns the row of the same losses on one device, without what must not change them."""
    kept = ["model", "compute", "clip", "optimizer", "late_norm", "trainable", "dropout"]
    kept += ["passes"] if row["model"] == "linen" else []  # batch norm's statistics are those of a pass
    kept += ["passes", "mesh", "reduce"] if row["dropout"] != "0" else []  # devices and passes draw their own masks
    plain = {**SPACE.plain, **{name: row[name] for name in kept}}
    if row["late_norm"] == "yes":
        plain |= {"stage": "1", "optimizer_offload": "host", "reduce": "fp32", "blocks": "block", "by_block": "on"}
    return plain


@functools.cache
def of_baseline(items):
    return trained(dict(items), "")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("number", runs.cases(range(MOST), long=range(FEW, MOST)))
def test_a_crossed_step_has_the_losses_of_the_same_options_on_one_device(number, tmp_path):
    assert len(SPACE.rows) <= MOST
    if number >= len(SPACE.rows):
        pytest.skip("the array has fewer rows")
    row = SPACE.rows[number]
    found, expected = trained(row, tmp_path), of_baseline(tuple(baseline(row).items()))
    rounded = [row["compute"], *(["bf16"] if "bf16" in (row["reduce"], row["accum"]) else [])]
    allowed = max(TOLERANCES[name] for name in rounded)
    for mine, theirs, factor in zip(found, expected, (1, 10)):
        np.testing.assert_allclose(mine, theirs, rtol=factor * allowed, err_msg=str(row))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "rule", RULES, ids=[f"{number} {' '.join(rule.settings)}" for number, rule in enumerate(RULES)]
)
def test_what_is_exclusive_is_refused_in_one_line(rule, tmp_path):
    with pytest.raises(UserError) as refused:
        trained(SPACE.breaking(rule), tmp_path)
    assert rule.words in str(refused.value) and "\n" not in str(refused.value)
