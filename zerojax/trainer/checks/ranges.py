"""The values that each field of a config may have. This module holds them as tables by dotted place, and checks settings against them."""

import math
from typing import Any

import numpy as np

from zerojax import errors, precision
from zerojax.data import batches
from zerojax.data.pairs import tasks, templates
from zerojax.errors import UserError
from zerojax.interop import huggingface
from zerojax.launch import devices
from zerojax.models import families
from zerojax.ops import fp8, quantized
from zerojax.optim import fused, registry, schedules
from zerojax.zero import loss_scale as loss_scale_lib
from zerojax.zero import remat, stages
from zerojax.zero.offload import settings as offload_lib

# place -> the values allowed there, from the table of the module that uses them
CHOICES: dict[str, tuple] = {
    "zero.stage": tuple(stages.STAGES),
    "zero.indivisible": stages.INDIVISIBLE,
    "precision": tuple(precision.PRECISIONS),
    "fp8.recipe": fp8.RECIPES,
    "optimizer.name": tuple(registry.OPTIMIZERS),
    "optimizer.schedule": (*schedules.SCHEDULES, *schedules.DEEPSPEED),
    "optimizer.moments": tuple(fused.MOMENTS),
    "optimizer.warmup": schedules.WARMUPS,
    "optimizer.weight_decay_on": tuple(registry.DECAYS),
    "loss_scale.on_minimum": loss_scale_lib.ON_MINIMUM,
    "offload.optimizer": offload_lib.KINDS,
    "offload.params": offload_lib.KINDS,
    "offload.by_block": offload_lib.BY_BLOCK,
    "reduce_dtype": tuple(precision.DTYPES),
    "accum_dtype": tuple(precision.DTYPES),
    "model.preset": tuple(families.PRESETS),
    "model.remat": tuple(remat.REMAT),
    "model.attention": ("auto", "xla", "cudnn", "splash"),
    "data.task": tasks.TASKS,
    "data.chat_template": templates.CHOICES,
    "lora.quantize": quantized.KINDS,
    "lora.frozen_dtype": ("auto", *huggingface.DTYPES),
    "export.format": ("none", "huggingface", "peft"),
    "export.dtype": ("auto", *huggingface.DTYPES),
}
POSITIVE = tuple(
    "steps seq_len log_every emulate_devices mesh.replica mesh.model optimizer.learning_rate optimizer.eps loss_scale.init_scale "
    "fp8.history loss_scale.window loss_scale.hysteresis loss_scale.min_scale offload.fraction offload.params_fraction offload.chunk_bytes "
    "offload.in_flight offload.nvme_buffers data.answer_len checkpoint.keep_last profile.start".split()
)
NOT_NEGATIVE = tuple(
    "seed global_batch_size micro_batch_size grad_accum zero.min_size model.vocab_size model.num_layers "
    "fp8.first fp8.last lora.r lora.alpha "
    "optimizer.warmup_steps optimizer.initial_fraction optimizer.final_fraction optimizer.weight_decay "
    "optimizer.clip_norm loss_scale.static epochs evaluate.every evaluate.batches evaluate.answers evaluate.patience "
    "checkpoint.every "
    "checkpoint.keep_best sample.length sample.temperature profile.steps".split()
)
OWN = -1.0  # of a setting that the optimizer or the model then chooses
OWN_ALLOWED = {"optimizer.weight_decay": "the optimizer's own", "sample.length": "as many as fit, up to 160"}
BELOW_ONE = ("optimizer.b1", "optimizer.b2", "lora.dropout", "model.dropout")

# place -> (the largest value, why). Without these bounds XLA aborts the process where an array has 2**63 bytes, and Python traces or
# lists for hours. The largest arrays, scores of attention and logits, stay below 2**63 bytes.
MOST: dict[str, tuple[float, str]] = {
    "seq_len": (2**22, "attention is quadratic in it"),
    "global_batch_size": (2**20, "each sequence of a batch has a position in the data"),
    "micro_batch_size": (2**20, "each sequence of a batch has a position in the data"),
    "grad_accum": (2**20, "each sequence of a batch has a position in the data"),
    "emulate_devices": (devices.MOST_EMULATED, "each has threads of its own"),
    "mesh.replica": (2**20, "no machine has as many devices"),
    "mesh.data": (2**20, "no machine has as many devices"),
    "mesh.model": (2**20, "no machine has as many devices"),
    "lora.r": (2**16, "it is a share of a kernel's inputs"),
    "model.num_layers": (512, "each layer is traced on its own"),
    "model.vocab_size": (2**24, "each position has a logit for every id"),
    "optimizer.warmup_steps": (2**31 - 1, "no run has as many steps"),
    "optimizer.initial_fraction": (1, "a warm-up rises to the peak"),
    "optimizer.final_fraction": (1, "a schedule falls from its peak"),
    "optimizer.eps": (1, "gradients are far smaller, and the weights would hardly change"),
    "offload.fraction": (1, "it is a share of the optimizer state"),
    "offload.params_fraction": (1, "it is a share of the params"),
    "data.answer_len": (2**16, "a decoder reads it token by token"),
    "sample.length": (2**16, "each token runs the model over the full text"),
}
# place -> (the smallest value but 0, why)
LEAST: dict[str, tuple[float, str]] = {
    "optimizer.learning_rate": (1e-12, "no float32 weight would change"),
    "optimizer.clip_norm": (1e-6, "gradients of that norm change nothing; 0 turns clipping off"),
}
_FLOAT32 = np.finfo(np.float32)
_LARGEST = float(_FLOAT32.max)
MOST_TOKENS = 2**31 - 1  # in a batch


def check(config: Any) -> None:
    """Raises a UserError that names the first setting with a value that is not allowed."""
    for place, choices in CHOICES.items():
        value = lookup(config, place)
        if value not in choices:
            raise UserError(f"config.{place}: {not_a_choice(place, value)}")
    for place in (*POSITIVE, *NOT_NEGATIVE, *BELOW_ONE, "mesh.data"):
        flaw = _flaw(place, lookup(config, place))
        if flaw:
            raise UserError(f"config.{place}: {flaw}, and is {errors.shown(lookup(config, place))}")
    _check_task(config)
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


def _check_task(config: Any) -> None:
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
    if data.task == tasks.TEXT:
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


def not_a_choice(place: str, value: Any) -> str:
    """Returns the rule, the value and the way out for a value that is not among the choices of its place."""
    near = errors.choose(value, CHOICES[place])
    way_out = near if near.startswith("did") else f"set --config.{place}=..."
    return f"must be one of {', '.join(map(str, CHOICES[place]))}, and is {errors.shown(value)}; {way_out}"


def lookup(config: Any, place: str) -> Any:
    """Returns the setting at a dotted place."""
    value: Any = config
    for name in place.split("."):
        value = getattr(value, name)
    return value


def _flaw(place: str, value: float) -> str:
    """Returns the rule that a number breaks, or ""."""
    if isinstance(value, int) and abs(value) >= 2**31:
        return "must be below 2**31"
    if isinstance(value, float) and not abs(value) <= _LARGEST:
        return f"must be at most {_LARGEST:.2g}, above which float32 has only infinity"
    if place == "mesh.data" and value != -1 and value <= 0:
        return "must be above 0, or -1 for all devices left"
    if place in POSITIVE and value <= 0:
        return "must be above 0"
    if place in POSITIVE and value < _FLOAT32.tiny:
        return f"must be above {_FLOAT32.tiny:.2g}, below which float32 has only 0"
    if place in OWN_ALLOWED and value < 0 and value != OWN:
        return f"must not be negative, or -1 for {OWN_ALLOWED[place]}"
    if place in NOT_NEGATIVE and value < 0 and place not in OWN_ALLOWED:
        return "must not be negative"
    if place == "optimizer.warmup_steps" and value > 1 and value != int(value):
        return "must be a whole number of steps, or a share of them below 1"
    if place in BELOW_ONE and not 0 <= value < 1:
        return "must be at least 0 and below 1"
    if place in BELOW_ONE and np.float32(value) >= 1:
        return f"must be at most {math.nextafter(1 - _FLOAT32.epsneg, 0):.8g}, above which it is 1 in float32"
    most, why = MOST.get(place, (math.inf, ""))
    if value > most:
        return f"must be at most {most}, since {why}"
    least, why = LEAST.get(place, (0, ""))
    return f"must be at least {least}, since {why}" if 0 < value < least else ""
