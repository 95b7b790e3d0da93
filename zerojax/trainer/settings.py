"""Every setting of a run. This module declares each once: its type, its default, its unit and effect, and the values that it may have.

configs/base.py, what reads a config and checks it, `zerojax train --help` and the shell's completion follow from these declarations.
In a setting that can be derived, 0 or -1 means "derive".
"""

import dataclasses
import functools
import math
import os
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from zerojax import precision as precision_lib
from zerojax.data import batches, damaged, mixture
from zerojax.data.pairs import spans, tasks, templates
from zerojax.interop import huggingface
from zerojax.launch import devices
from zerojax.models import families
from zerojax.ops import contrastive, divergences, fp8, preferences, quantized, ratios
from zerojax.optim import fused, registry, schedules
from zerojax.zero import stages
from zerojax.zero.blocks import block_settings, remat
from zerojax.zero.host import settings as offload_lib
from zerojax.zero.pipeline import order
from zerojax.zero.update import loss_scale as loss_scale_lib
from zerojax.zero.wires import packed

OWN = -1.0  # of a setting that the optimizer or the model then chooses
MOST_ROWS = 2**20
OFF = {"sample.length": 0}  # values that ask for nothing
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    tuple: "texts with commas, or a tuple or list of Python",
}
_FLOAT32 = np.finfo(np.float32)
_LARGEST = float(_FLOAT32.max)
_INDENT = " " * 6


class Range(NamedTuple):
    """The numbers that a setting may have: at least 0, below 2**31 or finite in float32.

    Without the bounds XLA aborts the process where an array has 2**63 bytes, and Python traces or lists for hours. The largest arrays,
    scores of attention and logits, stay below 2**63 bytes.
    """

    is_positive: bool = False  # whether it must be above 0
    is_share: bool = False  # whether it must be below 1
    counts_steps: bool = False  # whether it must be whole above 1
    minus_one: str = ""  # what -1 stands for; "" if it is refused
    most: tuple[float, str] = (math.inf, "")  # the largest number, and why
    least: tuple[float, str] = (0, "")  # the smallest number but 0, and why

    def up_to(self, number: float, why: str) -> "Range":
        """Returns these numbers up to `number`."""
        return self._replace(most=(number, why))

    def at_least(self, number: float, why: str) -> "Range":
        """Returns these numbers from `number`, and 0 if it is one."""
        return self._replace(least=(number, why))

    def or_minus_one(self, meaning: str) -> "Range":
        """Returns these numbers and -1."""
        return self._replace(minus_one=meaning)

    def flaw(self, value: float) -> str:
        """Returns the rule that a number breaks, or ""."""
        if isinstance(value, int) and abs(value) >= 2**31:
            return "must be below 2**31"
        if isinstance(value, float) and not abs(value) <= _LARGEST:
            return f"must be at most {_LARGEST:.2g}, above which float32 has only infinity"
        if self.minus_one and value == OWN:
            return ""
        if self.is_share and not 0 <= value < 1:
            return "must be at least 0 and below 1"
        if value < 0 or (self.is_positive and value == 0):
            or_else = f", or -1 for {self.minus_one}" if self.minus_one else ""
            return ("must be above 0" if self.is_positive else "must not be negative") + or_else
        if self.is_positive and value < _FLOAT32.tiny:
            return f"must be above {_FLOAT32.tiny:.2g}, below which float32 has only 0"
        if self.counts_steps and value > 1 and value != int(value):
            return "must be a whole number of steps, or a share of them below 1"
        if self.is_share and np.float32(value) >= 1:
            return f"must be at most {math.nextafter(1 - _FLOAT32.epsneg, 0):.8g}, above which it is 1 in float32"
        if value > self.most[0]:
            return f"must be at most {self.most[0]}, since {self.most[1]}"
        return f"must be at least {self.least[0]}, since {self.least[1]}" if 0 < value < self.least[0] else ""


POSITIVE, NOT_NEGATIVE, SHARE = Range(is_positive=True), Range(), Range(is_share=True)
ANY = ()  # value of the type


class Declared(NamedTuple):
    """A setting, or a group of settings."""

    default: Any  # None for a group
    values: Range | tuple  # the numbers or the choices that are allowed; () for all of its type
    line: str  # its unit and effect
    hint: type  # its type; of a group its dataclass
    unread: tuple["Reason", ...] = ()  # why nothing may read it, the group's reasons first

    @property
    def choices(self) -> tuple:
        """Returns the values that are allowed, () if they are not listed."""
        return () if isinstance(self.values, Range) else self.values


# (all settings, the place of one) -> why nothing reads that one; "" if it is read
Reason = Callable[["Config", str], str]


def setting(default: Any, values: Range | tuple, line: str, *unread: Reason) -> Any:
    """Declares a field of a dataclass; see `Declared`."""
    return dataclasses.field(default=default, metadata={"values": values, "line": line, "unread": unread})


def if_on(is_read: Callable[["Config"], Any], why: str) -> Reason:
    """Returns the reason `why`, in which {c} are all settings, not to read a setting."""
    return lambda config, place: "" if is_read(config) else why.format(c=config)


def beside(other: str, why: str = "") -> Reason:
    """Returns the reason not to read a setting: `other` is off, which is 0, empty or a default of 1."""

    def reason(config: "Config", place: str) -> str:
        value = lookup(config, other)
        is_off = not value or value == 1 == table()[other].default
        return f"config.{other}={value!r}{why}" if is_off else ""

    return reason


def of_task(config: "Config", place: str) -> str:
    """Returns the reason not to read what other tasks read. Sources have tasks of their own."""
    reads = {name: any(f"{place}.".startswith(f"{own}.") for own in task.reads) for name, task in tasks.TASKS.items()}
    is_read = reads[config.data.task] or not any(reads.values()) or config.data.sources
    return "" if is_read else f"config.data.task={config.data.task} does not read it"


def of_optimizer(config: "Config", place: str) -> str:
    """Returns the reason not to read what other optimizers read. A weight decay that is not read is refused instead."""
    chosen, name = config.optimizer.name, place.removeprefix("optimizer.")
    is_read = name not in registry.READ_BY_SOME or name in (*registry.READS[chosen], "weight_decay")
    return "" if is_read else f"the optimizer {chosen} does not read it"


def of_loss(config: "Config", place: str) -> str:
    """Returns the reason not to read what other losses of pairs read."""
    chosen = config.dpo.loss
    is_read = place.removeprefix("dpo.") in ("loss", *preferences.READS[chosen])
    return "" if is_read else f"config.dpo.loss={chosen} does not read it"


# fmt: off
IN_FP8 = if_on(lambda c: c.policy.has_fp8, "config.precision={c.precision!r} computes nothing in fp8")
HAS_ADAPTERS = if_on(lambda c: c.lora.is_on, "config.lora.r=0 trains no adapters")
OF_SHARDS = beside("zero.stage", " shards nothing")
OF_CLIENT = if_on(lambda c: re.search("wandb|mlflow", f"{c.metrics.to}"), "config.metrics.to names neither wandb nor mlflow")
OF_FILES = if_on(lambda c: not c.data.places().is_random, "random tokens are not read from files")
OF_DATASET = if_on(lambda c: not c.data.train_file, "config.data.train_file is read instead")
DISTILLED = beside("distill.teacher")
OF_STEPS = if_on(lambda c: not c.epochs, "config.epochs={c.epochs:g} counts")
OF_CHECKPOINTS = if_on(lambda c: c.checkpoint.every or c.checkpoint.at_end, "no checkpoint is saved")
OF_OLD_ANSWERS = if_on(lambda c: c.grpo.inner_steps > 1 or c.grpo.rollout_devices,
    "config.grpo.inner_steps=1, and config.grpo.rollout_devices=0")
SKIPPED = if_on(
    lambda c: c.data.sources or c.data.task == tasks.TEXT or (c.data.train_file and not c.epochs and c.data.task not in tasks.ANSWERS),
    "the examples are all encoded before the first step, where one that cannot be read ends the run")
EVALUATED = if_on(lambda c: c.data.has_held_out, "nothing is held out, so nothing is evaluated")


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """The devices are pipe x replica x data x context x model."""

    pipe: int = setting(1, POSITIVE.up_to(2**10, "each is a stage with layers of its own"),
        "groups of devices that hold other layers and work on other micro-batches (pipeline parallelism); config.grad_accum counts these")
    replica: int = setting(1, POSITIVE.up_to(2**20, "no machine has as many devices"), "replicas of the sharded state (hybrid sharding)")
    data: int = setting(-1, POSITIVE.or_minus_one("all devices left").up_to(2**20, "no machine has as many devices"),
        "ZeRO shards over it; -1: all remaining devices")
    context: int = setting(1, POSITIVE.up_to(2**20, "no machine has as many devices"),
        "parts of each sequence, one a device (context parallelism); ZeRO shards over it too")
    model: int = setting(1, POSITIVE.up_to(2**20, "no machine has as many devices"),
        "tensor parallelism over it: heads, MLP width, vocabulary and, between matmuls, tokens")
    expert: int = setting(1, POSITIVE.up_to(2**20, "no machine has as many devices"),
        "devices of data x context that hold different experts each, to which tokens travel (expert parallelism)")


@dataclasses.dataclass(frozen=True)
class PipelineSettings:
    """The order in which the groups of a pipeline work; read with mesh.pipe above 1."""

    schedule: str = setting("1f1b", tuple(order.KINDS),
        '"1f1b": a group keeps few micro-batches; "interleaved": the same with several chunks of layers a group, and idles less; "gpipe": '
        'all forward passes first; "zero_bubble": 1f1b that idles less, because gradients of weights are computed later, and keeps more')
    chunks: int = setting(1, POSITIVE.up_to(512, "each has layers of its own"),
        'of consecutive layers in a group; 2 or more for "interleaved"')


@dataclasses.dataclass(frozen=True)
class ZeroSettings:
    """What is sharded over the devices."""

    stage: int = setting(3, tuple(stages.STAGES), "sharded: 0 nothing, 1 optimizer state, 2 + gradients, 3 + params")
    min_size: int = setting(1024, NOT_NEGATIVE, "elements; a smaller leaf is replicated", OF_SHARDS)
    indivisible: str = setting("whole", stages.INDIVISIBLE,
        'a leaf with no divisible dim: "whole" replicates it, "pad" pads one dim and shards it', OF_SHARDS)
    overrides: tuple = setting((), ANY, "ordered ((path regex, (mesh axis or None for each dim)), ...); the first match wins")


@dataclasses.dataclass(frozen=True)
class OffloadSettings:
    """What lives outside of device memory between its uses (docs/offload.md)."""

    optimizer: str = setting("none", offload_lib.KINDS,
        'moments and master weights: "host" keeps them in pinned host memory, "nvme" in a file (stages 1 to 3)')
    params: str = setting("none", offload_lib.KINDS, "weights, with an offloaded optimizer at stage 3: the same; fetched block by block")
    fraction: float = setting(1.0, POSITIVE.up_to(1, "it is a share of the optimizer state"),
        "of the optimizer state that is offloaded, above 0")
    params_fraction: float = setting(1.0, POSITIVE.up_to(1, "it is a share of the params"), "of the params that may be offloaded, above 0")
    params_on_device: str = setting("", ANY, 'a regex of params that stay on the device ("embed|head")')
    chunk_bytes: int = setting(256 << 20, POSITIVE, "copied and updated together on each device")
    in_flight: int = setting(0, NOT_NEGATIVE, "chunks on a device at once; half of them arrive before the forward pass; 0: derived")
    by_block: str = setting("auto", offload_lib.BY_BLOCK,
        '"on": each block a program of its own, so that updates run beside the backward pass; "off"')
    late_norm: bool = setting(False, ANY, "clip by the norm of the step before, so that no update waits for its own")
    nvme_path: str = setting("", ANY, 'the folder of the files, on a local disk; "": WORKDIR/offload')
    nvme_buffers: int = setting(0, NOT_NEGATIVE, "chunks of each file, for each device, that are read into host memory ahead; 0: derived")


@dataclasses.dataclass(frozen=True)
class WireSettings:
    """How weights and gradients travel between devices, for links slower than NVLink (docs/multi_host.md)."""

    weights: str = setting(packed.PLAIN, packed.WEIGHTS,
        '"plain": in the precision\'s dtype; "int8": in blocks of 256 with a scale each, half the bytes (stage 3)')
    gradients: str = setting(packed.PLAIN, packed.GRADIENTS,
        '"plain": in config.reduce_dtype; "int8": in such blocks; "int4": so inside a host, and in 4 bits, rotated, between hosts')
    second_copy: bool = setting(False, ANY,
        "each host keeps a copy of the weights from the forward to the backward pass, divided among its devices")
    host_devices: int = setting(0, NOT_NEGATIVE, "neighbouring devices of the mesh that are a host; 0: those of a process",
        if_on(lambda c: c.wire.second_copy or c.wire.gradients != packed.PLAIN, "gradients travel plain, and no host keeps a copy"))
    error_feedback: bool = setting(False, ANY, "what packing loses of gradients between hosts is added to those of the next pass; for "
        "optimizers like sgd; 4 bytes for each weight over host_devices on every device")


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The model's shapes, and what its backward pass keeps."""

    preset: str = setting("tiny", tuple(families.PRESETS), "a name in a PRESETS table in zerojax/models; not read with init_from")
    vocab_size: int = setting(0, NOT_NEGATIVE.up_to(2**24, "each position has a logit for every id"),
        "rows of the embedding; 0: the preset's, or the tokenizer's if the preset has none")
    num_layers: int = setting(0, NOT_NEGATIVE.up_to(512, "each layer is traced on its own"), "0: the preset's")
    remat: str = setting("dots", tuple(remat.REMAT), 'residuals kept: "none" all but weights, "dots" matmuls, "attention" layer '
        'inputs and what fused attention returns, "full" only layer inputs')
    recompute: str = setting("", ANY, 'a regex of modules in layers whose matmuls "dots" recomputes (r"layer_\\d+/mlp/up")')
    programs: str = setting(block_settings.ONE, block_settings.PROGRAMS, 'the compiled step: "one" program, or a program for each of the '
        '"kinds" of layers, which compile as fast whatever the depth')
    by_columns: str = setting("", ANY,
        'a regex of the embedding and the output projection ("embed|head"), if no device shall gather them: activations are sent instead,'
        " which takes less memory, and less time where a device's tokens are fewer than the vocabulary; stage 3, untied, with labels on "
        "all tokens")
    ring: bool = setting(False, ANY, "with mesh.model, a module's activations travel along a ring beside its own matmuls, where the axis "
        "divides a device's examples",
        beside("mesh.model"),
        if_on(lambda c: not c.policy.has_fp8 and not (c.lora.is_on and (c.lora.quantize != "none" or c.lora.dora)),
        "modules in fp8, with quantized weights, and with DoRA, run for all examples at once"))
    offload: str = setting("", ANY, "a regex of modules whose outputs, and of layers whose inputs, are offloaded to host memory until "
        "the backward pass")
    tile_tokens: int = setting(0, NOT_NEGATIVE,
        "tokens for which a layer's MLP, with its norm, runs at a time, forward and backward, so that long texts take less memory (8192); "
        "0: all")
    long_texts: bool = setting(False, ANY,
        'True: room for texts of hundreds of thousands of tokens, by tile_tokens=8192, remat="attention" and offload=r"layer_\\d+", where '
        "these have their defaults")
    attention: str = setting("auto", ("auto", "xla", "cudnn", "splash"),
        '"xla", "cudnn" (from Ampere on, 16 bits, heads of 128 or 256 dims), "splash" (TPUs, bf16), or "auto": by device and precision')
    dropout: float = setting(0.0, SHARE,
        "in training, of encoder-decoders: the share of embeddings and of outputs of residual branches that is set to 0")


@dataclasses.dataclass(frozen=True)
class ExpertsSettings:
    """How tokens travel to experts on other devices; read with mesh.expert above 1 (docs/configuration.md)."""

    load: float = setting(1.5, POSITIVE.at_least(1, "a balanced router sends as many").up_to(2**20, "no mesh has as many devices"),
        "the rows that one exchange has room for, over those of a balanced router: memory and bytes follow it; a router that sends more "
        "takes further exchanges, and drops nothing")
    parts: int = setting(1, POSITIVE.up_to(64, "each has matmuls of its own"),
        "of a device's tokens, one of which travels beside the matmuls of another")


@dataclasses.dataclass(frozen=True)
class Fp8Settings:
    """Which matmuls run in fp8, and how; read with precision "fp8" (docs/precision.md)."""

    recipe: str = setting("tensorwise", tuple(fp8.RECIPES),
        "scales from each array's largest magnitude: \"tensorwise\"; from those of earlier steps: \"delayed\"; for each row and column: "
        '"rowwise"')
    filter: str = setting("", ANY, 'a regex of the modules whose matmuls run in fp8 (r"layer_\\d+/mlp/.*"); "": all in blocks')
    first: int = setting(0, NOT_NEGATIVE, "blocks at the beginning whose matmuls stay in bf16")
    last: int = setting(0, NOT_NEGATIVE, "blocks at the end")
    history: int = setting(16, POSITIVE, 'steps that "delayed" remembers',
        if_on(lambda c: fp8.RECIPES[c.fp8.recipe].remembers, "the recipe {c.fp8.recipe} remembers no step"))
    experts: bool = setting(False, ANY, "whether the matmuls of a mixture's experts run in fp8 too (docs/precision.md)")


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Adapters (LoRA); the other weights are frozen (docs/fine_tuning.md)."""

    r: int = setting(0, NOT_NEGATIVE.up_to(2**16, "it is a share of a kernel's inputs"), "the rank; 0: no adapters, or that of init_from")
    alpha: float = setting(0.0, NOT_NEGATIVE, "the adapter's output is multiplied by alpha / r; 0: as r, or that of init_from")
    dropout: float = setting(0.0, SHARE, "the share of an adapter's inputs that is set to 0 in a training step")
    target_modules: str = setting("", ANY,
        'ends of names of modules in transformers, with commas ("q_proj,v_proj"); a regex of full names; "all-linear": all but the output'
        " projection; \"\": the family's usual ones (PEFT's), or those of init_from")
    exclude_modules: str = setting("", ANY, "those that get no adapter, in the same form")
    target_parameters: str = setting("", ANY,
        'ends of names of weights of a mixture, with commas ("gate_up_proj,down_proj,gate.weight"): stacked experts and the router, as '
        "PEFT adapts them")
    rslora: bool = setting(False, ANY, "True: alpha / sqrt(r)")
    dora: bool = setting(False, ANY, "True: a trained magnitude for each output of an adapted module (DoRA)")
    modules_to_save: str = setting("", ANY, 'ends of names of modules that are trained in full, with commas ("lm_head")')
    init_from: str = setting("", ANY, "a folder of PEFT, or a name on the hub: the adapters that the run starts from")
    quantize: str = setting("none", quantized.KINDS, 'how frozen kernels are stored: "none", "int8", "nf4" (QLoRA); "mxfp4": '
        "gpt-oss's experts alone, as its files hold them; \"fp8_block\": as files of DeepSeek-V3 in fp8 hold theirs")
    frozen_dtype: str = setting("auto", ("auto", *huggingface.DTYPES),
        "of other frozen weights: \"fp32\", \"bf16\", \"fp16\"; \"auto\": as in config.init_from, or the precision's")

    @property
    def is_on(self) -> bool:
        """Returns whether adapters are trained."""
        return bool(self.r or self.init_from)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer with its schedule."""

    name: str = setting("adamw", tuple(registry.OPTIMIZERS), "adam, adamw, adafactor, lamb, lion, sgd, muon (matrices; the rest by adamw)")
    learning_rate: float = setting(3e-3, POSITIVE.at_least(1e-12, "no float32 weight would change"), "the schedule's peak")
    schedule: str = setting("cosine", (*schedules.SCHEDULES, *schedules.DEEPSPEED),
        "constant, linear, cosine; WarmupLR, WarmupDecayLR, WarmupCosineLR as in DeepSpeed")
    warmup_steps: float = setting(20.0, NOT_NEGATIVE.up_to(2**31 - 1, "no run has as many steps")._replace(counts_steps=True),
        "steps of the warm-up; in a run with fewer, a tenth of these. Below 1: a share of the steps (those of epochs too)")
    warmup: str = setting("linear", schedules.WARMUPS, 'the form of the warm-up: "linear", "log"', beside("optimizer.warmup_steps"))
    initial_fraction: float = setting(0.0, NOT_NEGATIVE.up_to(1, "a warm-up rises to the peak"), "of the peak, at step 0 of a warm-up",
        beside("optimizer.warmup_steps"))
    final_fraction: float = setting(0.1, NOT_NEGATIVE.up_to(1, "a schedule falls from its peak"),
        "of the peak, at the last step (linear, cosine, WarmupCosineLR); at most 1",
        if_on(lambda c: c.optimizer.schedule in schedules.FALLING, "the schedule {c.optimizer.schedule} does not read it"))
    b1: float = setting(0.9, SHARE, "decay of the mean of gradients; of sgd: the momentum")
    b2: float = setting(0.95, SHARE, "decay of the mean of their squares")
    eps: float = setting(1e-8, POSITIVE.up_to(1, "gradients are far smaller, and the weights would hardly change"),
        "added to the root of that mean")
    weight_decay: float = setting(-1.0, NOT_NEGATIVE.or_minus_one("the optimizer's own"),
        "decoupled from the gradient; -1: 0.1, or 0 where the optimizer has none (adam, sgd)")
    momentum: float = setting(0.95, SHARE, "of muon: decay of a matrix' momentum")
    adamw_on: str = setting("", ANY,
        'of muon: a regex of matrices that adamw updates; "": embeddings, output projections, adapters')
    weight_decay_on: str = setting("matrices", tuple(registry.DECAYS),
        'all but biases and norms, as transformers\' Trainer; "all": these too', beside("optimizer.weight_decay"))
    rates: str = setting("", ANY,
        'factors of the learning rate by kinds of weights (docs/configuration.md#optimizer): "embedding=0.1,head=0.1"')
    clip_norm: float = setting(1.0, NOT_NEGATIVE.at_least(1e-6, "gradients of that norm change nothing; 0 turns clipping off"),
        "maximum of the global gradient norm, above eps; 0: no clipping")
    router_bias_rate: float = setting(0.0, NOT_NEGATIVE.up_to(1, "scores are at most 1"),
        "a step's change of a bias by which experts are chosen (DeepSeek-V3: 0.001), towards a balanced load; 0: it stays")
    moments: str = setting("fp32", tuple(fused.MOMENTS),
        'stored in "fp32", "bf16" or "int8": 4, 2 or 1 bytes; only for adam, adamw and lion')


@dataclasses.dataclass(frozen=True)
class LossScaleSettings:
    """What multiplies the loss with precision "fp16" (docs/precision.md)."""

    static: float = setting(0.0, NOT_NEGATIVE, "a constant scale; 0: dynamic, by the fields below")
    init_scale: float = setting(2.0**16, POSITIVE, "the initial scale")
    window: int = setting(1000, POSITIVE, "steps without an overflow before it doubles")
    hysteresis: int = setting(2, POSITIVE, "overflows before it halves; each skips its step")
    consecutive_hysteresis: bool = setting(False, ANY, "True: counts only consecutive overflows")
    min_scale: float = setting(1.0, POSITIVE, "the smallest scale")
    on_minimum: str = setting("raise", loss_scale_lib.ON_MINIMUM,
        'an overflow at the smallest scale ends the run; "hold": the run continues')


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """What is learned: a dataset or files, the tokenizer and the task."""

    name: str = setting("python_stdlib", ANY,
        'a tensorflow-datasets name ("lm1b"), one of the Hugging Face hub ("hf:USER/DATASET"), or "random"', OF_DATASET)
    train_split: str = setting("train", ANY, "the split of data.name that is learned", OF_FILES, OF_DATASET)
    eval_split: str = setting("validation", ANY, 'held-out split, no part of train_split; "": none',
        OF_DATASET, if_on(lambda c: not c.data.sources, "config.data.sources name their own"))
    text_key: str = setting("text", ANY, "the name of the text feature", OF_FILES)
    tokenizer: str = setting("auto", ANY, '"bytes", the path of a Hugging Face tokenizer.json, or "auto": that of init_from, else "bytes"')
    dir: str = setting("", ANY, 'folder of prepared datasets; "": WORKDIR/datasets', OF_FILES, OF_DATASET)
    train_file: str = setting("", ANY,
        'files instead of a dataset: a path, a URL (gs://, s3://, hf://datasets/) or a pattern with *, of .jsonl, .json, .csv, .tsv or '
        '.parquet; "": config.data.name is read')
    eval_file: str = setting("", ANY, 'held-out examples beside train_file; "": none')
    task: str = setting("text", tuple(tasks.TASKS),
        '"text" learns windows of documents; "seq2seq", "classification" and "chat" learn answers (docs/fine_tuning.md), "dpo" which of '
        "two is better (config.dpo), \"reward\" values of texts by such pairs, \"grpo\" what is rewarded (config.grpo), "
        "\"embed\" vectors of texts that belong together (config.embedding), and read the rest")
    prompt: str = setting("{text}", ANY,
        'a template with fields in braces; one field alone may hold messages, as of a chat. Of dpo: "" takes what both answers begin with')
    answer: str = setting("{label}", ANY, "a template of the answer; of dpo: of the chosen one")
    rejected: str = setting("{rejected}", ANY, "of dpo: a template of the other answer")
    labels: tuple = setting((), ANY,
        "the text of each number in the answer's field (or texts among these); (): the dataset's own, else as it is")
    messages: str = setting("messages", ANY, 'the field of a chat: [{"role": "user", "content": "..."}, ...]')
    chat_template: str = setting("auto", templates.CHOICES,
        "\"own\": the tokenizer's (needs jinja2), \"plain\": zerojax's, \"auto\": the first that there is")
    learn: str = setting(spans.ALL, spans.LEARNED,
        'of conversations: "all" answers, the "last" one alone, or with "reasoning off" all answers without the reasoning before them')
    answer_len: int = setting(32, POSITIVE.up_to(2**16, "a decoder reads it token by token"),
        "tokens of an answer, with its end: of an encoder-decoder's targets, and of generated answers")
    pack: bool = setting(True, ANY, "a decoder's row holds several short examples, which do not see each other")
    sources: tuple = setting((), ANY,
        'several sources instead, which are mixed: ({"train_file": ..., "weight": 2.0}, {"name": ..., "task": ...}); their other keys are '
        "those of config.data, \"title\", and weights by step ((0, 1.0), (1000, 0.2)), linear between (docs/configuration.md)")
    mix_by: str = setting(mixture.TOKENS, mixture.BY, 'what weights of sources are shares of: "tokens" or "examples"',
        beside("data.sources"))
    on_bad: str = setting(damaged.STOP, damaged.ON_BAD,
        'a document, or one of the sources, that cannot be read: "stop" saves and ends the run, "skip" goes on without it and counts it',
        SKIPPED)

    def places(self, data_dir: str | os.PathLike[str] = "") -> batches.Places:
        """Returns where the examples come from, with the folder of prepared datasets."""
        return batches.Places(self.name, data_dir, self.train_split, self.eval_split, self.train_file, self.eval_file)

    @property
    def has_held_out(self) -> bool:
        """Returns whether examples are held out."""
        if self.sources:
            return any(source.get("eval_file") or source.get("eval_split") for source in self.sources)
        return self.places().has_held_out


@dataclasses.dataclass(frozen=True)
class DpoSettings:
    """What is learned of two answers, the task "dpo" (docs/fine_tuning.md)."""

    beta: float = setting(-1.0, POSITIVE.or_minus_one("the loss's own"), "rewards are this times the gain of log-probability over the "
        "weights that the run starts from, or of orpo and simpo the mean log-probability of a token; -1: 0.1, of simpo 2")
    loss: str = setting("sigmoid", tuple(preferences.LOSSES), '"sigmoid": DPO; "ipo": a squared distance to a margin of 1 / (2 beta); '
        '"kto": each answer alone; without a reference "orpo", which learns the chosen one too, and "simpo"')
    label_smoothing: float = setting(0.0, SHARE.up_to(0.5, "more would prefer the rejected answers"),
        'of "sigmoid": the share of pairs that are taken to be in the wrong order')
    desirable: float = setting(1.0, NOT_NEGATIVE, 'of "kto": the weight of chosen answers')
    undesirable: float = setting(1.0, NOT_NEGATIVE, "and of rejected ones")
    gamma: float = setting(1.0, NOT_NEGATIVE, 'of "simpo": the margin of rewards that is asked for')


@dataclasses.dataclass(frozen=True)
class GrpoSettings:
    """What is learned of the model's own answers, the task "grpo" (docs/fine_tuning.md)."""

    reward: str = setting("exact", ANY,
        'of an answer: "exact" (the label), "letters" (the share of its letters), "regex" (the label is one), "module:function" of '
        "(prompt, answer, label), or the folder of a reward model")
    group: int = setting(8, POSITIVE.at_least(2, "an answer is compared with others to its prompt"),
        "answers to a prompt; config.global_batch_size counts answers")
    inner_steps: int = setting(1, POSITIVE, "steps on the same answers")
    variant: str = setting("grpo", tuple(ratios.VARIANTS),
        '"grpo"; "dr_grpo": not divided by the deviation; "dapo": the mean over tokens, more room above; "gspo": one ratio for an answer; '
        '"rloo": the reward less the mean of the others')
    clip: float = setting(-1.0, SHARE.or_minus_one("the variant's own"),
        "with inner steps or rollout devices: how far below 1 the ratio of a probability to that when it was drawn counts; -1: 0.2, of "
        "gspo 0.0003", OF_OLD_ANSWERS)
    clip_high: float = setting(-1.0, NOT_NEGATIVE.or_minus_one("the variant's own"),
        "how far above 1 it counts; -1: as grpo.clip, of dapo 0.28, of gspo 0.0004", OF_OLD_ANSWERS)
    kl: float = setting(0.0, NOT_NEGATIVE, "with adapters: the weight of the divergence from the model without them")
    environment: str = setting("", ANY, 'what speaks between answers: "calculator" (an example), or "module:function" of the messages so '
        'far, which returns (messages or None, reward); "": an answer ends its conversation')
    turns: int = setting(4, POSITIVE.up_to(1024, "each is read with all before it"), "answers of a conversation, at most",
        beside("grpo.environment"))
    time_limit: float = setting(30.0, POSITIVE.up_to(1e6, "a run would hang"),
        "seconds that one call of the environment may take, else the conversation ends", beside("grpo.environment"))
    rollout_devices: int = setting(0, NOT_NEGATIVE.up_to(2**20, "no machine has as many devices"),
        "devices, the last ones, that draw the answers of the next step while the others, those of config.mesh, train; answers are then of "
        "weights one update old; 0: all devices draw, and then train")
    replay: bool = setting(False, ANY, "of a mixture: True: a step takes the experts that the engine chose for each token of an answer, so "
        "that rounding chooses no others (arXiv:2510.11370)")
    exact: bool = setting(False, ANY, "True: answers are drawn by the forward pass of training, so that log-probabilities are equal bit "
        "for bit (on CPU devices; not measured on GPUs); a token costs a forward pass of the whole batch")


@dataclasses.dataclass(frozen=True)
class DistillSettings:
    """What is learned of a teacher's probabilities in place of labels (docs/fine_tuning.md)."""

    teacher: str = setting("", ANY,
        "a folder of transformers, a name on the Hugging Face hub, or the WORKDIR of a run: a decoder of the same vocabulary, which stays "
        'as it is; "": labels are learned')
    loss: str = setting("forward_kl", tuple(divergences.KINDS),
        'of a token\'s probabilities: "forward_kl" KL(teacher | student), "reverse_kl", "jsd" to a mixture of both', DISTILLED)
    share: float = setting(0.5, POSITIVE.up_to(1 - 1e-6, "at 1 it would be 0"), 'of "jsd": the share of the teacher in the mixture',
        DISTILLED, if_on(lambda c: c.distill.loss == divergences.JSD, "the loss {c.distill.loss} mixes nothing"))
    temperature: float = setting(1.0, POSITIVE.up_to(1e3, "all tokens would be as likely"), "divides the logits of both", DISTILLED)
    own: float = setting(0.0, NOT_NEGATIVE.up_to(1, "it is a share of the steps"),
        "the share of the steps that learn from the student's own answers to the prompts of a task, not from given ones", DISTILLED)


@dataclasses.dataclass(frozen=True)
class EmbeddingSettings:
    """What is learned of texts that belong together, the task "embed" (docs/fine_tuning.md)."""

    negative: str = setting("", ANY, 'a template of a text that is no answer to the query; "": those of other queries alone')
    pooling: str = setting("last", contrastive.OF_DECODERS, 'a text\'s vector: the state of its "last" token, or the "mean" of all')
    temperature: float = setting(0.05, POSITIVE.up_to(1e3, "all texts would be as near"),
        "divides the cosines of a query and all texts of a batch")


@dataclasses.dataclass(frozen=True)
class EvaluateSettings:
    """Evaluation on held-out examples."""

    every: int = setting(50, NOT_NEGATIVE, "steps between evaluations; 0: only after the last step; not read with epochs", OF_STEPS)
    batches: int = setting(16, NOT_NEGATIVE, "of global_batch_size sequences, at most; 0, with a task: all held-out examples")
    patience: int = setting(0, NOT_NEGATIVE,
        "evaluations without a lower loss that end the run, with the best checkpoint's results; 0: none",
        if_on(lambda c: c.evaluate.every or c.epochs, "config.evaluate.every=0 evaluates after the last step alone"))
    answers: int = setting(64, NOT_NEGATIVE, "held-out examples of a task whose answers are generated at an evaluation, at most; 0: none",
        if_on(lambda c: not c.data.sources, "no answers to sources are generated"))


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """What WORKDIR/checkpoints holds."""

    every: int = setting(50, NOT_NEGATIVE, "steps between checkpoints; 0: none before the last step")
    at_end: bool = setting(True, ANY, "False: the last step is not saved (a stop by a signal is always saved)")
    keep_last: int = setting(2, POSITIVE, "newest checkpoints kept", OF_CHECKPOINTS)
    keep_best: int = setting(1, NOT_NEGATIVE, "checkpoints of the lowest evaluation loss, also kept", EVALUATED, of_task, OF_CHECKPOINTS)


@dataclasses.dataclass(frozen=True)
class SampleSettings:
    """A text that the model writes at the end."""

    prompt: str = setting("def ", ANY, "an encoder-decoder fills in each ___")
    length: int = setting(-1, NOT_NEGATIVE.or_minus_one("as many as fit, up to 160")
        .up_to(2**16, "each token runs the model over the full text"),
        "tokens; 0: none; -1: 160, or as many as the model has positions for")
    temperature: float = setting(0.8, NOT_NEGATIVE, "0: the likeliest token")


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """The weights in the form of other libraries."""

    format: str = setting("none", ("none", "huggingface", "peft"),
        '"huggingface" writes safetensors and config.json to WORKDIR/export, with adapters merged; "peft" writes the adapters alone')
    push_to: str = setting("", ANY, "a name on the Hugging Face hub (user/model) that the export is written to; a new one is private")
    dtype: str = setting("auto", ("auto", *huggingface.DTYPES),
        '"fp32", "bf16", "fp16"; "auto": that of each tensor in init_from, or bf16 without one',
        if_on(lambda c: c.export.format == "huggingface" or c.export.deltas_every,
        "config.export.format={c.export.format!r} converts nothing"))
    deltas_every: int = setting(0, NOT_NEGATIVE,
        "steps between publications of the tensors that changed, in WORKDIR/deltas, for scripts/read_deltas.py of the repository; 0: never")
    deltas_to: str = setting("", ANY,
        "the address of a server of vLLM that is told of each publication, and reads it; what it refuses is told, and the run goes on",
        if_on(lambda c: c.export.deltas_every, "config.export.deltas_every=0 publishes nothing"))


@dataclasses.dataclass(frozen=True)
class ProfileSettings:
    """A trace of some steps."""

    start: int = setting(10, POSITIVE, "the first step to trace; the first two steps of a run are slower")
    steps: int = setting(0, NOT_NEGATIVE, "steps to trace into WORKDIR/profile, with a table of their time by phase; 0: none")


@dataclasses.dataclass(frozen=True)
class MetricsSettings:
    """Where metrics go, beside WORKDIR/metrics.jsonl."""

    to: tuple = setting(("tensorboard",), ANY, 'and to these: "tensorboard", "wandb", "mlflow"')
    project: str = setting("zerojax", ANY, "of wandb; the experiment of mlflow", OF_CLIENT)
    name: str = setting("", ANY, "of the run there; \"\": the workdir's", OF_CLIENT)
    dir: str = setting("", ANY, 'folder of the files of wandb and mlflow; "": WORKDIR', OF_CLIENT)
    resume_id: str = setting("", ANY, 'the run to continue there; "": that of this workdir, or a new one', OF_CLIENT)


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run, in the order of --help."""

    seed: int = setting(0, NOT_NEGATIVE, "of the weights, the data order and the sample")
    deterministic: bool = setting(False, ANY,
        "GPUs add in the same order each time: two runs on one machine, or a run that was killed, are equal bit for bit; slower")
    init_from: str = setting("", ANY,
        'a folder of transformers (config.json and safetensors), or a name on the Hugging Face hub: the model and its first weights; "": '
        "config.model's, drawn at random")
    steps: int = setting(150, POSITIVE, "optimizer steps; not read with epochs", OF_STEPS)
    epochs: float = setting(0.0, NOT_NEGATIVE,
        "times that the training examples of a task are read, with an evaluation after each; 0: config.steps counts")
    global_batch_size: int = setting(32, NOT_NEGATIVE.up_to(MOST_ROWS, "each sequence of a batch has a position in the data"),
        "sequences per optimizer step, over all devices: micro_batch_size * grad_accum * data * replica; one of the three may be 0, and "
        "is then derived")
    micro_batch_size: int = setting(0, NOT_NEGATIVE.up_to(MOST_ROWS, "each sequence of a batch has a position in the data"),
        "sequences per device and forward pass")
    grad_accum: int = setting(1, NOT_NEGATIVE.up_to(MOST_ROWS, "each sequence of a batch has a position in the data"),
        "forward and backward passes per optimizer step")
    seq_len: int = setting(128, POSITIVE.up_to(2**22, "attention is quadratic in it"), "tokens per sequence")
    precision: str = setting("bf16", tuple(precision_lib.PRECISIONS),
        '"fp32"; "bf16" and "fp16": 16-bit arithmetic, float32 master weights (fp16: see loss_scale); "bf16_sr": 16-bit weights without '
        'master weights, rounded stochastically; "fp8": as "bf16", but the matmuls of blocks run in fp8 (see fp8)')
    reduce_dtype: str = setting("fp32", tuple(precision_lib.DTYPES),
        'of the gradient reduction over devices: "fp32", or "bf16" (half the bytes, rounded sums)')
    accum_dtype: str = setting("fp32", tuple(precision_lib.DTYPES),
        'of the sums over the passes of a step: "fp32", or "bf16" (half the memory, rounded at random)')
    log_every: int = setting(10, POSITIVE, "steps between lines of metrics.jsonl")
    emulate_devices: int = setting(8, POSITIVE.up_to(devices.MOST_EMULATED, "each has threads of its own"),
        "CPU devices to emulate if there is no accelerator")
    mesh: MeshSettings = dataclasses.field(default_factory=MeshSettings)
    pipeline: PipelineSettings = dataclasses.field(default_factory=PipelineSettings, metadata={"unread": (beside("mesh.pipe"),)})
    zero: ZeroSettings = dataclasses.field(default_factory=ZeroSettings)
    offload: OffloadSettings = dataclasses.field(default_factory=OffloadSettings)
    wire: WireSettings = dataclasses.field(default_factory=WireSettings)
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    experts: ExpertsSettings = dataclasses.field(default_factory=ExpertsSettings, metadata={"unread": (beside("mesh.expert"),)})
    fp8: Fp8Settings = dataclasses.field(default_factory=Fp8Settings, metadata={"unread": (IN_FP8,)})
    lora: LoraSettings = dataclasses.field(default_factory=LoraSettings, metadata={"unread": (HAS_ADAPTERS,)})
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings, metadata={"unread": (of_optimizer,)})
    loss_scale: LossScaleSettings = dataclasses.field(default_factory=LossScaleSettings)
    data: DataSettings = dataclasses.field(default_factory=DataSettings, metadata={"unread": (of_task,)})
    dpo: DpoSettings = dataclasses.field(default_factory=DpoSettings, metadata={"unread": (of_task, of_loss)})
    grpo: GrpoSettings = dataclasses.field(default_factory=GrpoSettings, metadata={"unread": (of_task,)})
    distill: DistillSettings = dataclasses.field(default_factory=DistillSettings, metadata={"unread": (of_task,)})
    embedding: EmbeddingSettings = dataclasses.field(default_factory=EmbeddingSettings, metadata={"unread": (of_task,)})
    evaluate: EvaluateSettings = dataclasses.field(default_factory=EvaluateSettings, metadata={"unread": (EVALUATED, of_task)})
    checkpoint: CheckpointSettings = dataclasses.field(default_factory=CheckpointSettings)
    sample: SampleSettings = dataclasses.field(default_factory=SampleSettings, metadata={"unread": (of_task, beside("sample.length"))})
    export: ExportSettings = dataclasses.field(default_factory=ExportSettings)
    profile: ProfileSettings = dataclasses.field(default_factory=ProfileSettings, metadata={"unread": (beside("profile.steps"),)})
    metrics: MetricsSettings = dataclasses.field(default_factory=MetricsSettings)

    @property
    def policy(self) -> precision_lib.Precision:
        """Returns the dtypes of the precision."""
        return precision_lib.PRECISIONS[self.precision]

    @property
    def group(self) -> int:
        """Returns the answers to a prompt that are drawn for a step."""
        return self.grpo.group if self.data.task == tasks.GRPO else 1

    @property
    def rollout_devices(self) -> int:
        """Returns the devices that draw answers while the others train."""
        return self.grpo.rollout_devices if self.data.task == tasks.GRPO else 0

    @property
    def draws_by_engine(self) -> bool:
        """Returns whether texts to learn from are drawn by an engine."""
        is_rewarded = self.data.task == tasks.GRPO and not self.grpo.exact
        return is_rewarded or (bool(self.distill.teacher) and self.distill.own > 0)

    @property
    def keeps_roundings(self) -> bool:
        """Returns whether programs must round alike: those of exact rollouts in 16 bits."""
        return self.data.task == tasks.GRPO and self.grpo.exact and self.precision != "fp32"

    @property
    def length(self) -> str:
        """Returns the setting that ends the run, with its value."""
        return f"config.epochs={self.epochs:g} ({self.steps} steps)" if self.epochs else f"config.steps={self.steps}"
# fmt: on


@functools.cache
def table() -> Mapping[str, Declared]:
    """Returns {place: its setting}, groups too: {"zero": ..., "zero.stage": ...}."""
    return dict(_declared(Config, ""))


def _declared(cls: type, prefix: str, unread: tuple[Reason, ...] = ()) -> Iterator[tuple[str, Declared]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        place, hint = prefix + field.name, hints[field.name]
        about = {**field.metadata, "unread": (*unread, *field.metadata.get("unread", ()))}
        if hint not in KINDS:
            yield place, Declared(None, ANY, (hint.__doc__ or "").rstrip("."), hint)
            yield from _declared(hint, f"{place}.", about["unread"])
        else:
            yield place, Declared(field.default, hint=hint, **about)


def defaults() -> dict[str, Any]:
    """Returns all settings at their defaults, as nested dicts."""
    return dataclasses.asdict(Config())


def lookup(config: "Config", place: str) -> Any:
    """Returns the setting at a dotted place."""
    return functools.reduce(getattr, place.split("."), config)


def why_unread(config: "Config", place: str) -> str:
    """Returns the first reason why nothing reads a setting, "" if it is read."""
    return next(filter(None, (reason(config, place) for reason in table()[place].unread)), "")


def told(config: "Config", place: str, why: str) -> list[str]:
    """Returns a line about a setting that has no effect for a reason, if there is one and it asks for something else than its default."""
    value, default = lookup(config, place), table()[place].default
    is_told = why and value not in (default, OFF.get(place, default), own_values(config).get(place, default))
    return [f"config.{place}={value!r} has no effect: {why}"] if is_told else []


def own_values(config: "Config") -> dict[str, float]:
    """Returns the numbers that OWN stands for, since a choice has its own: {dotted place: number}."""
    bounds = vars(ratios.VARIANTS[config.grpo.variant]())
    return {
        "optimizer.weight_decay": registry.own_weight_decay(config.optimizer.name),
        "dpo.beta": preferences.LOSSES[config.dpo.loss].beta,
        **{f"grpo.{name}": bounds[name] for name in ("clip", "clip_high")},
    }


def changed(config: "Config", values: Mapping[str, Any]) -> "Config":
    """Returns the settings with other values, {dotted place: value}."""
    fields: dict[str, Any] = {}
    for place, value in values.items():
        group, _, name = place.rpartition(".")
        if group:
            fields[group] = dataclasses.replace(fields.get(group, getattr(config, group)), **{name: value})
        else:
            fields[place] = value
    return dataclasses.replace(config, **fields)


def kind(hint: type) -> str:
    """Returns a field's type in words."""
    if dataclasses.is_dataclass(hint):
        return f"a group of settings ({', '.join(typing.get_type_hints(hint))})"
    return KINDS[hint]


def expected(place: str) -> str:
    """Returns the type of the setting at a place in words, "" if there is no such setting."""
    return kind(table()[place].hint) if place in table() else ""


def text(width: int) -> str:
    """Returns a list of all settings with their defaults and lines, for a terminal of `width` columns."""
    lines = ["settings (--config.KEY=VALUE), each as it is in `base`:", "docs/ and scripts/ are in the repository.", ""]
    for place, found in table().items():
        about = found.line
        if found.default is None:
            lines += ["", *textwrap.wrap(f"{place}: {about}", width, subsequent_indent=_INDENT)]
            continue
        if not all(re.search(rf"\b{choice}\b", f"{about} {found.default!r}") for choice in found.choices):
            about += f" (one of {', '.join(map(str, found.choices))})"
        lines.append(f"  --config.{place}={_shown(found.default)}")
        lines += textwrap.wrap(
            f"{about} [{kind(found.hint)}]", width, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
    return "\n".join(lines)


def _shown(value: object) -> str:
    """Returns a default as one would give it on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"'{value}'" if isinstance(value, str) and re.search(r"[^\w./,:-]", value) else str(value)
