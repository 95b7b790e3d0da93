"""Checks the values of a config. This module compares each with what its declaration allows, and some with each other."""

from collections.abc import Mapping

from zerojax import errors
from zerojax.data import locations
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
    _check_answers(config)
    _check_distilled(config)
    if config.policy.has_fp8 and config.lora.is_on:
        _refuse(config, f"config.precision={config.precision}", {"lora.quantize": "kernels are dequantized to bf16"})
    if config.evaluate.patience and not config.checkpoint.keep_best:
        raise UserError(
            f"config.evaluate.patience: is {config.evaluate.patience}, and the results are then those of the best checkpoint, of which "
            "config.checkpoint.keep_best=0 keeps none; set --config.checkpoint.keep_best=1"
        )
    chosen = config.optimizer
    if "eps" in registry.READS[chosen.name] and 0 < chosen.clip_norm <= chosen.eps:
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
    if not all(isinstance(label, str) for label in data.labels) or len(set(data.labels)) < len(data.labels):
        raise UserError(
            f"config.data.labels: must be texts, another for each number, and are {errors.shown(data.labels)}"
        )
    streamed = "sources" if data.sources else "windows of text" if data.task == tasks.TEXT else ""
    if streamed and config.epochs:
        raise UserError(f"config.epochs: is {config.epochs}, and {streamed} have no epochs; set config.steps")
    if streamed and not config.evaluate.batches:
        raise UserError(f"config.evaluate.batches: must be above 0, since {streamed} are read without end, and is 0")
    if not streamed and data.places().is_random:
        raise UserError(
            f'config.data.name: is "random", and the task {data.task} needs examples; name a dataset ("short_reviews") or a file'
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
    if data.task in tasks.PAIRED and data.answer == data.rejected:
        raise UserError(
            f"config.data.rejected: is {data.rejected!r}, as config.data.answer, so no answer is better; name the field of the worse one"
        )


def _check_answers(config: settings.Config) -> None:
    """Raises a UserError if a setting does not go with a task whose answers are compared, or given by the model while it trains."""
    task, steps = config.data.task, config.grpo.inner_steps
    if task not in tasks.ANSWERS:
        return
    wrong = {
        "mesh.context": "the loss of an answer reads all its tokens, so a device has all tokens of its rows",
        "model.by_columns": "each token's own loss needs the gathered kernel",
    }
    if config.policy.has_fp8:
        wrong["precision"] = "fp8 rounds the log-probabilities too much that are compared"
    if task == tasks.GRPO:
        wrong["epochs"] = "rollouts have no epochs"
    _refuse(config, f"the task {task}", wrong)
    if task != tasks.GRPO:
        return
    if config.grpo.replay:
        own = {
            "model.tile_tokens": "a tile has the experts of some tokens",
            "grpo.exact": "a step chooses the same experts anyway",
        }
        _refuse(
            config,
            "config.grpo.replay=True",
            {**own, "grpo.environment": "each answer of a conversation has a slot of its own"},
        )
    if config.grpo.exact:
        dropped = dict.fromkeys(("model.dropout", "lora.dropout"), "a step drops what rollouts keep")
        sums = {
            "mesh.model": "a step adds up in another order than rollouts",
            "mesh.pipe": "a step runs other programs than rollouts",
            "grpo.rollout_devices": "the weights of a step are newer than those of its answers",
        }
        _refuse(config, "config.grpo.exact=True", sums | dropped)
    if config.grpo.kl and (not config.lora.is_on or config.lora.modules_to_save):
        raise UserError(
            f"config.grpo.kl: is {config.grpo.kl}, and its reference is the model without adapters, of which no copy is kept; set it to 0, "
            "or train adapters alone"
        )
    for place, count in (("checkpoint.every", config.checkpoint.every), ("steps", config.steps)):
        if count % steps and (place != "steps" or config.checkpoint.at_end):
            raise UserError(
                f"config.{place}: is {count}, and a run that resumes asks its weights anew after each {steps} inner steps; set "
                f"--config.{place}={count + -count % steps}"
            )


def _check_distilled(config: settings.Config) -> None:
    """Raises a UserError if a setting does not go with a teacher."""
    if not config.distill.teacher:
        return
    task, place = config.data.task, "config.distill.teacher"
    if task in tasks.ANSWERS:
        raise UserError(
            f"{place}: is set, and the task {task} compares answers, where a teacher's probabilities are learned; omit it"
        )
    wrong = {
        "mesh.pipe": "the teacher's layers run on every device",
        "mesh.context": "the teacher reads all tokens of a row on one device",
        "model.by_columns": "a divergence reads all logits of a token",
        "data.sources": "the losses of sources are those of labels",
        "optimizer.router_bias_rate": "the teacher's head is frozen",
    }
    _refuse(config, place, wrong)
    if not config.distill.own:
        return
    if task == tasks.TEXT:
        raise UserError(
            f"config.distill.own: is {config.distill.own}, and windows of text have no prompts that the student could answer; set it to 0, "
            "or --config.data.task=seq2seq"
        )
    _refuse(config, f"config.distill.own={config.distill.own}", {"epochs": "answers of the student have no epochs"})


def check_router_bias(config: settings.Config, model: ModelConfig) -> None:
    """Raises a UserError if the biases by which experts are chosen cannot be moved by the load."""
    mixture, name = family_lib.mixture(model), "config.optimizer.router_bias_rate"
    if mixture is None or not mixture.has_choice_bias:
        raise UserError(
            f"{name}: is {config.optimizer.router_bias_rate}, and no experts are chosen by a bias; set it to 0"
        )
    wrong = {
        **dict.fromkeys(("lora.r", "lora.init_from"), "biases are frozen beside adapters"),
        "mesh.pipe": "the stages of a pipeline do not count rows",
        "offload.optimizer": "pieces of an offloaded state do not count rows",
        "offload.params": "blocks with fetched weights do not count rows",
        "zero.indivisible": "an expert that pads a bias would count",
        **dict.fromkeys(("reduce_dtype", "accum_dtype", "wire.gradients"), "counts are not exact in few bits"),
    }
    if config.policy.rounds_stochastically:
        wrong["precision"] = "a bias in 16 bits does not move by so little"
    _refuse(config, name, wrong)


def check_replay(model: ModelConfig) -> None:
    """Raises a UserError if there are no experts that an engine could choose for a step."""
    mixture = family_lib.mixture(model)
    if mixture is None or not hasattr(mixture, "remembers_choices") or mixture.score == "sparsemixer":
        why = (
            "there are no experts"
            if mixture is None
            else "the weights of its experts depend on the order of their choice"
        )
        raise UserError(f"config.grpo.replay: is True, and {why}; set it to False")
    if model.branches or model.sharing_layers:
        raise UserError(
            "config.grpo.replay: is True, and layers are branches, or share keys with others; set it to False"
        )


def _refuse(config: settings.Config, chosen: str, wrong: Mapping[str, str]) -> None:
    """Raises a UserError for the first of some settings, {place: why}, that is not at its default, with which `chosen` does not go."""
    for place, why in wrong.items():
        value, default = settings.lookup(config, place), settings.table()[place].default
        if value != default:
            way_out = "omit it" if default == "" else f"set --config.{place}={default}"
            raise UserError(f"config.{place}: is {errors.shown(value)}, and with {chosen} {why}; {way_out}")


def not_a_choice(place: str, value: object) -> str:
    """Returns the rule, the value and the way out for a value that is not among the choices of its place."""
    choices = settings.table()[place].choices
    near = errors.choose(value, choices)
    way_out = near if near.startswith("did") else f"set --config.{place}=..."
    if len(choices) > MOST_LISTED:
        few = ", ".join(map(str, choices[:3]))
        return f"is {errors.shown(value)}; {way_out} (one of {len(choices)} names such as {few}; `zerojax train --help` lists them)"
    return f"must be one of {', '.join(map(str, choices))}, and is {errors.shown(value)}; {way_out}"
