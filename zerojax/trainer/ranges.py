"""Checks the values of a config. This module compares each with what its declaration allows, and some with each other."""

from zerojax import errors
from zerojax.data import batches, locations
from zerojax.data.pairs import tasks
from zerojax.errors import UserError
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.optim import registry
from zerojax.trainer import settings

MOST_TOKENS = 2**31 - 1  # in a batch
MOST_LISTED = 20  # choices that an error lists


def check(config: settings.Config) -> None:
    """Raises a UserError that names the first setting with a value that is not allowed."""
    values = {place: settings.lookup(config, place) for place in settings.table()}
    for place, value in values.items():
        if (choices := settings.table()[place].choices) and value not in choices:
            raise UserError(f"config.{place}: {not_a_choice(place, value)}")
    for place, value in values.items():
        allowed = settings.table()[place].values
        if isinstance(allowed, settings.Range) and (flaw := allowed.flaw(value)):
            default = errors.shown(settings.table()[place].default)
            raise UserError(
                f"config.{place}: {flaw}, and is {errors.shown(value)}; omit it, or set --config.{place}={default}, its default"
            )
    _check_task(config)
    _check_compared(config)
    _check_rollouts(config)
    if config.evaluate.patience and not config.checkpoint.keep_best:
        raise UserError(
            f"config.evaluate.patience: is {config.evaluate.patience}, and the results are then those of the best checkpoint, of which "
            "config.checkpoint.keep_best=0 keeps none; set --config.checkpoint.keep_best=1"
        )
    chosen = config.optimizer
    if "eps" in registry.reads(chosen.name) and 0 < chosen.clip_norm <= chosen.eps:
        raise UserError(
            f"config.optimizer.clip_norm: {chosen.clip_norm} is not above config.optimizer.eps={chosen.eps}, so clipped gradients are "
            "below eps and the weights would hardly change; set --config.optimizer.clip_norm=1.0, or 0 for no clipping"
        )


def _check_task(config: settings.Config) -> None:
    """Raises a UserError if settings of examples and of text contradict each other."""
    data = config.data
    if data.eval_file and not data.train_file:
        raise UserError(
            f"config.data.eval_file: is {data.eval_file!r}, and config.data.train_file is empty; name both, or neither"
        )
    if not all(isinstance(label, str) for label in data.labels):
        raise UserError(f"config.data.labels: must be texts, and are {errors.shown(data.labels)}")
    if len(set(data.labels)) < len(data.labels):
        raise UserError(
            f"config.data.labels: are {errors.shown(tuple(data.labels))}, and two numbers cannot share a text; give each its own"
        )
    if data.sources:
        if config.epochs:
            raise UserError(
                f"config.epochs: is {config.epochs}, and sources are read as they are needed, so none is counted before; set config.steps: "
                "a line at the start says how often each is read"
            )
        if not config.evaluate.batches:
            raise UserError("config.evaluate.batches: must be above 0 with config.data.sources, and is 0")
    elif data.task == tasks.TEXT:
        if config.epochs:
            raise UserError(
                f"config.epochs: is {config.epochs}, and windows of text have no epochs; set config.steps, or another config.data.task"
            )
        if not config.evaluate.batches:
            raise UserError("config.evaluate.batches: must be above 0 with config.data.task=text, and is 0")
    elif data.name == batches.RANDOM and not data.train_file:
        raise UserError(
            f'config.data.name: is "random", and the task {data.task} needs examples; name a dataset ("short_reviews") or '
            "config.data.train_file"
        )
    remote = next((name for name in ("train_file", "eval_file") if locations.is_remote(getattr(data, name))), None)
    if remote and (config.epochs or data.task in tasks.ANSWERS):
        why = (
            "config.epochs counts examples before"
            if config.epochs
            else f"the task {data.task} reads all examples before"
        )
        raise UserError(
            f"config.data.{remote}: is a URL, which is read as it is needed, and {why} the first step; copy the file to this host"
        )
    if data.task == tasks.DPO and data.answer == data.rejected:
        raise UserError(
            f"config.data.rejected: is {data.rejected!r}, as config.data.answer, so no answer is better; name the field of the worse one"
        )


def _check_compared(config: settings.Config) -> None:
    """Raises a UserError if a setting does not go with a task whose answers are compared."""
    task = config.data.task
    if task not in tasks.ANSWERS:
        return
    if config.policy.has_fp8:
        raise UserError(
            f"config.precision: is {config.precision!r}, and the task {task} compares log-probabilities that fp8 rounds too much; "
            "set --config.precision=bf16"
        )
    if config.model.by_columns:
        raise UserError(
            f"config.model.by_columns: is {config.model.by_columns!r}, and the task {task} reads each token's own loss, which needs the "
            "gathered kernel; omit it"
        )


def _check_rollouts(config: settings.Config) -> None:
    """Raises a UserError if a setting does not go with answers that the model gives while it trains."""
    if config.data.task != tasks.GRPO:
        return
    steps, every = config.grpo.inner_steps, config.checkpoint.every
    last = config.steps if config.checkpoint.at_end else 0
    asks = f"a run that resumes asks its weights anew after each {steps} inner steps"
    for place, is_wrong, why, way_out in (
        ("epochs", config.epochs > 0, "rollouts have no epochs", "set config.steps"),
        ("grpo.kl", config.grpo.kl > 0 and not config.lora.is_on, "its reference is the model without adapters, and there are none; a copy "
         "of the weights is not kept", "set --config.lora.r=8, or --config.grpo.kl=0"),
        ("grpo.kl", config.grpo.kl > 0 and bool(config.lora.modules_to_save), "its reference lacks the modules that are trained in full",
         "omit config.lora.modules_to_save, or set --config.grpo.kl=0"),
        ("offload.params", config.offload.params != "none", "the engine reads weights on the devices for each token",
         "set --config.offload.params=none (config.offload.optimizer may stay)"),
        ("mesh.pipe", config.mesh.pipe > 1, "the engine runs all layers on every device", "set --config.mesh.pipe=1"),
        ("mesh.expert", config.mesh.expert > 1, "the engine gathers experts", "set --config.mesh.expert=1"),
        ("checkpoint.every", every % steps > 0, asks, f"set --config.checkpoint.every={every + -every % steps}"),
        ("steps", last % steps > 0, asks, f"set --config.steps={last + -last % steps}"),
    ):  # fmt: skip
        if is_wrong:
            raise UserError(
                f"config.{place}: is {settings.lookup(config, place)}, and with the task grpo {why}; {way_out}"
            )


def check_router_bias(config: settings.Config, model: ModelConfig) -> None:
    """Raises a UserError if the biases by which experts are chosen cannot be moved by the load."""
    mixture = family_lib.mixture(model)
    for place, is_wrong, why, way_out in (
        ("model.preset", mixture is None or not mixture.has_choice_bias, "its experts are chosen without a bias", "set it to 0"),
        ("precision", config.precision == "bf16_sr", "a bias in 16 bits does not move by so little", "set --config.precision=bf16"),
        ("lora.r", config.lora.is_on, "biases are frozen beside adapters", "set it to 0"),
        ("mesh.pipe", config.mesh.pipe > 1, "the stages of a pipeline do not count rows", "set --config.mesh.pipe=1"),
        ("offload.optimizer", config.offload.optimizer != "none", "pieces of an offloaded state do not count rows",
         "set --config.offload.optimizer=none"),
        ("offload.params", config.offload.params != "none", "blocks with fetched weights do not count rows",
         "set --config.offload.params=none"),
        ("zero.indivisible", config.zero.indivisible == "pad", "an expert that pads a bias would count",
         "set --config.zero.indivisible=whole"),
        ("reduce_dtype", config.reduce_dtype == "bf16", "counts are not exact in 16 bits", "set --config.reduce_dtype=fp32"),
        ("accum_dtype", config.accum_dtype == "bf16", "counts are not exact in 16 bits", "set --config.accum_dtype=fp32"),
        ("wire.gradients", config.wire.gradients != "plain", "counts are not exact in few bits", "omit it"),
    ):  # fmt: skip
        if is_wrong:
            rate, found = config.optimizer.router_bias_rate, errors.shown(settings.lookup(config, place))
            raise UserError(
                f"config.optimizer.router_bias_rate: is {rate}, and config.{place} is {found}: {why}; {way_out}"
            )


def not_a_choice(place: str, value: object) -> str:
    """Returns the rule, the value and the way out for a value that is not among the choices of its place."""
    choices = settings.table()[place].choices
    near = errors.choose(value, choices)
    way_out = near if near.startswith("did") else f"set --config.{place}=..."
    if len(choices) > MOST_LISTED:
        few = ", ".join(map(str, choices[:3]))
        return f"is {errors.shown(value)}; {way_out} (one of {len(choices)} names such as {few}; `zerojax train --help` lists them)"
    return f"must be one of {', '.join(map(str, choices))}, and is {errors.shown(value)}; {way_out}"
