"""Asks a dozen questions and writes a config that runs. This module is the command line `zerojax config`.

zerojax config                                 asks on a terminal, with the plan's answer beside the question of the stage
zerojax config --yes --target h200 --topology 1x8 --out mine.py     asks nothing
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import re
import select
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_collections
from rich.table import Table

from zerojax import configs, display, errors, precision
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import hub
from zerojax.launch import devices as devices_lib
from zerojax.migration import config_file
from zerojax.models import families
from zerojax.ops import tiles
from zerojax.plan import scale, search, targets
from zerojax.trainer import activations, plans
from zerojax.trainer import config as config_lib
from zerojax.trainer import program as program_lib
from zerojax.trainer import settings as settings_lib
from zerojax.zero import stages, state_bytes
from zerojax.zero.host import settings as offload_lib

MOST_PLANS = 3
REMATS = ("dots", "full")  # the base config's, and one that keeps less
# Layers of the two steps that are compiled for a deeper model: each further layer adds as much as those between them.
SMALL = (2, 4)


@dataclasses.dataclass(frozen=True)
class Question:
    """One question."""

    name: str  # of its flag
    text: str  # what is asked
    place: str  # the setting that it decides; "" if it decides none by itself
    check: Callable[[str], Any]  # (answer) -> the value. Raises UserError for one that is not allowed


def _one_of(name: str, choices: Any) -> Callable[[str], str]:
    """Returns a check that an answer is one of some words."""
    known = [str(choice) for choice in choices]

    def check(answer: str) -> str:
        if answer not in known:
            raise UserError(f"{name}: {answer!r} is not known; {errors.choose(answer, known)}")
        return answer

    return check


def _weights(answer: str) -> str:
    """Checks a folder of weights, or the form of a name on the hub."""
    answer = answer.strip()
    if answer and (pathlib.Path(answer).exists() or not hub.NAME.fullmatch(answer)):
        with errors.below("config.init_from: "):
            folder_lib.check_folder(pathlib.Path(answer))
    return answer


def _count(name: str) -> Callable[[str], int]:
    """Returns a check that an answer is a whole number above 0."""

    def check(answer: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", answer) or not 0 < int(answer) < 2**31:
            raise UserError(f"{name}: must be a whole number above 0 and below 2**31, and is {errors.shown(answer)}")
        return int(answer)

    return check


def _topology(answer: str) -> str:
    """Checks the form of a topology. Whether the devices can have it is checked with the devices."""
    answer = answer.strip()
    if answer and not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}", answer):
        raise UserError(f"topology: must be numbers joined by x, such as 1x8 or 4x4x8, and is {errors.shown(answer)}")
    return answer


def _number(name: str) -> Callable[[str], float]:
    """Returns a check that an answer is a number that is not negative."""

    def check(answer: str) -> float:
        try:
            value = float(answer)
        except ValueError:
            value = math.nan
        if not 0 <= value < 1e30:
            raise UserError(f"{name}: must be a number from 0, and is {errors.shown(answer)}")
        return value

    return check


def _gbps(answer: str) -> float:
    """Checks a rate of a network."""
    found = _number(_NETWORK)(answer)
    if not 0 < found <= scale.MOST:
        raise UserError(f"{_NETWORK}: must be above 0 and at most {scale.MOST:g} Gbit/s, and is {errors.shown(answer)}")
    return found


def _count_or(name: str, other: str, value: int) -> Callable[[str], int]:
    """Returns a check that an answer is a whole number above 0, or a word that stands for a value."""
    check = _count(name)
    return lambda answer: value if answer in (other, str(value)) else check(answer)


_LAST = "stage"  # the question beside which the plan's advice is shown
_NETWORK = "network"  # asked of several hosts alone
_BETWEEN, _INSIDE = ("mesh.pipe", "mesh.replica"), ("mesh.context", "mesh.model")
FASTER = 1.03  # from which on axes between hosts are taken: arithmetic is no more exact
_KINDS = offload_lib.KINDS
_MODEL, _WEIGHTS = "model", "init_from"
_PARAMS = (
    f"Where do the params live? {', '.join(_KINDS)}; outside of the device only with the optimizer state, at stage 3"
)
QUESTIONS = (
    Question(_WEIGHTS, "Which weights does it start from? a folder of transformers; empty: drawn at random", "init_from", _weights),
    Question(_MODEL, "Which model? " + ", ".join(families.PRESETS), "model.preset", _one_of(_MODEL, families.PRESETS)),
    Question("lora_r", "Adapters (LoRA) of which rank? 0: all weights are trained", "lora.r", _count_or("lora_r", "none", 0)),
    Question("target", "Which devices? here, " + ", ".join(targets.TARGETS), "", _one_of("target", [*targets.TARGETS, targets.HERE])),
    Question("topology", "How many? hosts x devices (1x8); TPUs: chips (2x2x1); empty for all that are here", "", _topology),
    Question("network", "How fast is the network between hosts, in Gbit/s for each GPU?", "", _gbps),
    Question("tensor", "Tensor parallelism over how many of them? 1: none", "mesh.model", _count("tensor")),
    Question("context", "Each sequence in parts on how many of them (context parallelism)? 1: whole", "mesh.context", _count("context")),
    Question("seq_len", "How many tokens a sequence?", "seq_len", _count("seq_len")),
    Question("global_batch_size", "How many sequences a step, over all devices?", "global_batch_size", _count("global_batch_size")),
    Question("grad_accum", "In how many passes (accumulation)? auto: as few as fit", "grad_accum", _count_or("grad_accum", "auto", 0)),
    Question("clip_norm", "Clip gradients to which norm? 0: no clipping", "optimizer.clip_norm", _number("clip_norm")),
    Question("precision", "Which precision? " + ", ".join(precision.PRECISIONS), "precision", _one_of("precision", precision.PRECISIONS)),
    Question("offload", "Where does the optimizer state live? " + ", ".join(_KINDS), "offload.optimizer", _one_of("offload", _KINDS)),
    Question("offload_params", _PARAMS, "offload.params", _one_of("offload_params", _KINDS)),
    Question("stage", "Which ZeRO stage? " + ", ".join(map(str, stages.STAGES)), "zero.stage", _one_of("stage", stages.STAGES)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a step is run at a stage, and what it needs on each device.

    Attributes:
      stage, micro_batch_size, grad_accum, remat: the settings.
      held: bytes of state and gradients.
      peak: bytes, by arithmetic or by a plan.
      tokens_per_second: by a plan (`search.seconds_of`); None without one, or if it knows no time.
    """

    stage: int
    micro_batch_size: int
    grad_accum: int
    remat: str
    held: float
    peak: float
    tokens_per_second: float | None = None

    @property
    def cost(self) -> tuple[int, int, int]:
        """Returns a sort key: least computed again first, then fewest bytes sent, then the lowest stage."""
        sent = 3 if stages.STAGES[self.stage].params else 2
        return REMATS.index(self.remat), sent * self.grad_accum, self.stage


@dataclasses.dataclass(frozen=True)
class Advice:
    """What arithmetic and the plan say of the stages."""

    table: Table  # to be shown beside the question
    stage: int  # the fastest that fits; the last one if none is known to
    fits: Mapping[int, Fit]  # by stage, how it fits; stages that do not fit are missing


@arguments.command
def main() -> None:
    """Asks, writes the config, and prints its command. A wrong input ends with one line and status 2."""
    given = _parse(sys.argv[1:])
    asks = not given.yes
    if asks and not sys.stdin.isatty():
        raise UserError(
            "config: asks questions, and stdin is not a terminal; add --yes to take each default, or the flag of each answer"
        )
    arguments.check_new(given.out, force=given.force)
    answers, advice = _ask_all(
        {question.name: getattr(given, question.name) for question in QUESTIONS}, asks, given.quick
    )
    settings = _settings(answers, advice)
    _write(given.out, _for_network(answers, settings, advice))


def _hosts(answers: Mapping[str, Any]) -> int:
    """Returns the number of hosts of the answers; 1 for TPUs, whose chips are one slice, and for what is here."""
    target, dims = answers["target"], answers["topology"].split("x")
    is_tpu = target != targets.HERE and targets.get(target).kind == "tpu"
    return int(dims[0]) if len(dims) == 2 and not is_tpu else 1


def _for_network(answers: Mapping[str, Any], settings: dict[str, Any], advice: Advice) -> dict[str, Any]:
    """Returns the settings with `mesh.pipe` or `mesh.replica`, if arithmetic finds the step clearly faster so on the network between hosts.

    Prints which axes it puts first. Where it has no rates or no such model it says nothing. Answers that differ from the advice stay.
    """
    if _NETWORK not in answers:
        return settings
    try:
        network = scale.Network(adapter_gbps=answers[_NETWORK])
        config = config_lib.from_dict(_raw(settings))
        ways = plans.axes_config(config, answers["target"], answers["topology"], network)
    except UserError:
        return settings
    say(f"By arithmetic for {answers[_NETWORK]:g} Gbit/s between hosts, the fastest first:")
    for way in sorted(ways, key=lambda own: own.guess.seconds)[:3]:
        say(f"  {way.text}: {way.tokens / way.guess.seconds:,.0f} tokens/s/device")
    plain = [way for way in ways if way.settings and all(way.settings[place] == 1 for place in (*_BETWEEN, *_INSIDE))]
    able = [way for way in ways if way.settings and all(way.settings[place] == 1 for place in _INSIDE)]
    best = min(able, key=lambda own: own.guess.seconds, default=None)
    as_advised = int(answers[_LAST]) == advice.stage and not answers["grad_accum"] and not _keeps_from_pipe(answers)
    if not best or not plain or not as_advised or plain[0].guess.seconds < FASTER * best.guess.seconds:
        say("The config keeps the axes of the answers; `zerojax plan --search --cluster FILE` compiles others.")
        return settings
    say(f"The config takes {best.text}; `zerojax plan --search --cluster FILE` compiles others.")
    taken = {place: value for place, value in best.settings.items() if value != 1 or not place.startswith("mesh.")}
    return {**settings, **taken, "micro_batch_size": 0}


def _keeps_from_pipe(answers: Mapping[str, Any]) -> bool:
    """Returns whether answers name axes inside a host, or memory outside of the devices."""
    none = offload_lib.NONE
    return (answers["tensor"], answers["context"], answers["offload"], answers["offload_params"]) != (1, 1, none, none)


def _ask_all(flags: Mapping[str, str | None], asks: bool, quick: bool) -> tuple[dict[str, Any], Advice]:
    """Returns all answers, and the plan's advice. Answers that do not go together are asked again, on a terminal.

    Raises:
      UserError: an answer is wrong, and nobody can be asked.
    """
    by_name = {question.name: question for question in QUESTIONS}
    given, pending = dict(flags), list(by_name)
    answers: dict[str, Any] = {}
    advice: Advice | None = None
    advised: dict[str, Any] = {}  # the answers that the advice is about
    skipped: set[str] = set()  # questions that answers make idle
    while pending:
        name = pending.pop(0)
        skipped.discard(name)
        if name == _MODEL and answers[_WEIGHTS]:
            answers[_MODEL] = _raw({}).model.preset  # not read
            skipped.add(name)
            continue
        if name == _NETWORK and _hosts(answers) < 2:
            if given[name] is not None:
                raise UserError("--network: the topology has one host; omit it, or answer hosts x devices, such as 2x8")
            skipped.add(name)
            continue
        try:
            if name == _LAST and advised != {**answers, _LAST: None}:
                advice, advised = _advise(answers, quick=quick), {**answers, _LAST: None}
            if name == _LAST and advice is not None:
                say(display.as_text(advice.table))
            asked = [word for word in by_name if word not in skipped]
            number = f"{asked.index(name) + 1}/{len(asked)}" if asks else ""
            answers[name] = _answer(by_name[name], given[name], _default(name, answers, advice), number)
            if not pending and advice is not None:
                config_lib.from_dict(_raw(_settings(answers, advice)))
        except UserError as error:
            wrong = next((word for word, question in by_name.items() if _is_about(error, question)), None)
            if not asks or wrong is None:
                raise
            say(f"  {error}")
            given[wrong] = None
            answers.pop(_LAST, None)
            following = [_MODEL] if wrong == _WEIGHTS and _MODEL in skipped else []
            rest = [*following, *pending, *([] if _LAST in pending else [_LAST])]
            pending = [wrong, *([] if wrong == _LAST else rest)]
    assert advice is not None, "the stage is asked last"
    return answers, advice


def _is_about(error: UserError, question: Question) -> bool:
    """Returns whether an error names the setting or the flag of a question."""
    place = re.match(r"(?:config\.|--)?([\w.]+)", str(error))
    return place is not None and place[1] in (question.name, question.place)


def say(text: str) -> None:
    """Prints text."""
    print(text, flush=True)


def _answer(question: Question, flag: str | None, default: str, number: str) -> Any:
    """Returns a flag's value, or what the terminal answers; empty takes the default."""
    if flag is not None or not number:
        return question.check(default if flag is None else flag)
    while True:
        try:
            answer = _line(_wrapped(f"{number} {question.text} [{default}]: ")).strip()
        except EOFError as error:
            say("")
            left = f"the input ended at the question of the {question.name}"  # begins with no name of a setting: it is not asked again
            raise UserError(f"config: {left}; nothing was written, run again") from error
        try:
            return question.check(answer or default)
        except UserError as error:
            say(f"  {error}")


def _line(prompt: str) -> str:
    """Returns what is typed. Ctrl-C just after the prompt would wait for a key inside of `input`, whose read has not begun; a pipe, which
    Python fills as the signal comes, ends the wait here."""
    if not sys.stdin.isatty():
        return input(prompt)
    print(prompt, end="", flush=True)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        select.select([sys.stdin, reader], [], [])
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
    return input()


def _wrapped(question: str) -> str:
    """Returns a question in lines of the terminal's width, broken between words."""
    width = max(20, shutil.get_terminal_size().columns - 1)
    return "\n".join(textwrap.wrap(question, width, drop_whitespace=False, break_long_words=False))


def _default(name: str, answers: Mapping[str, Any], advice: Advice | None) -> str:
    """Returns what an empty answer means."""
    if name == "stage":
        assert advice is not None
        return str(advice.stage)
    if name == "topology":
        target = targets.get(answers["target"]) if answers["target"] != targets.HERE else None
        return "" if target is None else {"tpu": "2x2x1", "cpu": "8"}.get(target.kind, "1x8")
    if name == "seq_len" and answers[_WEIGHTS]:
        return "512"
    if name == "seq_len":
        preset = families.PRESETS[answers["model"]].presets[answers["model"]]
        is_large = preset.embed_dim > 512
        return str(min(preset.max_seq_len or 2048, 8192 if is_large else 128))
    base = _raw({})
    fixed = {
        _WEIGHTS: "",
        _MODEL: base.model.preset,
        "lora_r": 0,
        "target": targets.HERE,
        _NETWORK: f"{scale.Network().adapter_gbps:g}",
        "tensor": base.mesh.model,
        "context": base.mesh.context,
        "grad_accum": "auto",
        "clip_norm": base.optimizer.clip_norm,
        "precision": base.precision,
        "offload": offload_lib.NONE,
        "offload_params": offload_lib.NONE,
    }
    return str(fixed.get(name, base.global_batch_size))


def _advise(answers: Mapping[str, Any], *, quick: bool) -> Advice:
    """Returns what each stage needs on each device, by arithmetic, and a plan of the chosen one if its compiler is there."""
    config = config_lib.from_dict(_raw(_chosen(answers)))
    devices = _devices(answers, config)
    usable = None
    with contextlib.suppress(UserError):
        usable = targets.get(answers["target"]).usable
    shared = config_lib.per_example(config.mesh)
    for axis, ways in (("model", config.mesh.model), ("context", shared)):
        if len(devices) % ways:
            size = getattr(config.mesh, axis)
            raise UserError(
                f"config.mesh.{axis}: {size} does not divide the {len(devices) * size // ways} devices; choose one that does, or 1"
            )
    ways = len(devices) // shared
    held: dict[int, float] = {}
    programs = {}
    for number in stages.STAGES:
        with contextlib.suppress(UserError):  # a part of the state that this stage does not shard cannot be offloaded
            programs[number] = program_lib.build(_at(config, number), devices=devices)
            accumulates = programs[number].sizes.grad_accum > 1
            counted = state_bytes.bytes_per_device(programs[number].partition, accumulates=accumulates, by_hand=True)
            held[number] = sum(counted.values())
    if not held:
        program_lib.build(_at(config, max(stages.STAGES)), devices=devices)  # raises why
    if usable is None:
        return _advice(held, None, {}, None)
    temporaries = activations.estimate(next(iter(programs.values())))
    chosen = config_lib.make_offload(config.offload, config.zero.stage)
    arriving = 0 if chosen.optimizer == offload_lib.NONE else chosen.chunk_bytes * chosen.chunks_at_once
    fits: dict[int, Fit] = {}
    sizes = config_lib.batch_sizes(config, ways)
    for number, count in held.items():
        accumulated = state_bytes.bytes_per_device(programs[number].partition, accumulates=True, by_hand=True)
        for remat, micro in itertools.product(REMATS, _micro_batches(sizes, answers["grad_accum"], ways)):
            accum = sizes.global_batch_size // (micro * ways)
            state = sum(accumulated.values()) if accum > 1 else count
            peak = state + temporaries(number, micro, remat, accum) + arriving
            if peak <= usable:
                fits[number] = Fit(number, micro, accum, remat, state, peak)
                break
    planned = None
    if not quick and devices[0].platform != "cpu":
        fits, planned = _plans(config, answers, devices, fits, usable)
    return _advice(held, usable, fits, planned)


def _micro_batches(sizes: config_lib.BatchSizes, passes: int, ways: int) -> list[int]:
    """Returns the micro-batches that keep the global batch, the largest first; those of a number of passes if that was answered."""
    each = max(1, sizes.global_batch_size // ways)
    if passes:
        return [each // passes] if each % passes == 0 else []
    return [size for size in (1 << power for power in range(each.bit_length() - 1, -1, -1)) if each % size == 0]


def _plans(
    config: settings_lib.Config, answers: Mapping[str, Any], devices: list[Any], fits: dict[int, Fit], usable: float
) -> tuple[dict[int, Fit], Fit | None]:
    """Compiles the step that should be fastest; if it does not fit after all, the next one. Returns what is then known, and the plan."""
    fits = dict(fits)
    for _ in range(MOST_PLANS):
        if not fits:
            break
        chosen = min(fits.values(), key=lambda fit: fit.cost)
        at = f"stage {chosen.stage}, remat {chosen.remat}, micro-batch {chosen.micro_batch_size} x {chosen.grad_accum}"
        say(f"planning {at}; --quick takes the arithmetic's word")
        try:
            planned = _planned(config, answers["target"], devices, chosen)
        except (UserError, jax.errors.JaxRuntimeError) as error:
            say(f"  not compiled: {errors.one_line(error)}")
            return fits, None
        if planned.peak <= usable:
            return {**fits, chosen.stage: planned}, planned
        say(f"  does not fit: {display.human(planned.peak - usable)} too much")
        del fits[chosen.stage]
    return fits, None


def _planned(config: settings_lib.Config, target: str, devices: list[Any], fit: Fit) -> Fit:
    """Returns a stage with its plan. A deep preset's follows from two shallow ones: a layer adds the same to the peak and to the time."""
    layers = {
        name: getattr(families.PRESETS[config.model.preset].presets[config.model.preset], name, 0)
        for name in activations.DEPTHS
    }
    depth = max(layers.values())
    is_deep = not config.init_from and depth > SMALL[-1] and set(layers.values()) <= {0, depth}
    few = {}
    for count in SMALL if is_deep else (depth,):
        say(f"  compiling {count} of {depth} layers" if is_deep else "  compiling the step")
        sizes = {"micro_batch_size": fit.micro_batch_size, "grad_accum": 0, "model.num_layers": count * is_deep}
        at = settings_lib.changed(_at(config, fit.stage), {**sizes, "model.remat": fit.remat})
        few[count] = plans.plan_program(program_lib.build(at, devices=devices), target)
    found = search.continued(few, depth)
    rate = found.tokens / found.seconds if found.seconds and found.tokens else None
    return dataclasses.replace(fit, peak=found.peak, tokens_per_second=rate)


def _advice(held: Mapping[int, float], usable: float | None, fits: Mapping[int, Fit], planned: Fit | None) -> Advice:
    """Returns the table, and the stage that is named: that of the plan, or the cheapest that fits by arithmetic."""
    title = "What each stage needs on each device" + (f", of {display.human(usable)}" if usable else "")
    columns: tuple[str, ...] = ("stage", "state and gradients")
    columns += () if usable is None else ("peak", "micro-batch", "remat", "tokens/s", "")
    shown = display.table(title, columns, ("",))
    shown.min_width = len(title)  # so that two columns do not break it
    named = planned or min(fits.values(), key=lambda fit: fit.cost, default=None)
    for number, count in held.items():
        fit = fits.get(number)
        if fit is None:
            unfit = () if usable is None else ("", "", "", "", "does not fit" if count > usable else "not known to fit")
            shown.add_row(str(number), display.human(count), *unfit)
            continue
        word = (
            "the plan's answer" if fit is planned else "arithmetic's answer" if fit is named else "fits by arithmetic"
        )
        rate = f"{fit.tokens_per_second:,.0f}" if fit.tokens_per_second else ""
        batch = f"{fit.micro_batch_size} x {fit.grad_accum}"
        shown.add_row(str(number), display.human(fit.held), display.human(fit.peak), batch, fit.remat, rate, word)
    if usable is None:
        shown.caption = "how much memory these devices have is unknown, so the bytes of the state alone are compared"
    elif named is None:
        shown.caption = (
            "no stage is known to fit: offload the state, keep the inputs of layers in host memory (model.offload), shorten the "
            "sequences, or take more devices"
        )
    return Advice(shown, named.stage if named else max(held), fits)


def _devices(answers: Mapping[str, Any], config: settings_lib.Config) -> list[Any]:
    """Returns the devices of the answers; as many emulated CPU devices if their compiler is not installed."""
    target, topology = answers["target"], answers["topology"]
    if target == targets.HERE:
        with contextlib.suppress(UserError):  # JAX has started
            devices_lib.emulate_cpu_devices(config.emulate_devices)
        return targets.devices(target, topology)
    with contextlib.suppress(Exception):
        jax.config.update("jax_platforms", "cpu")
    try:
        return targets.devices(target, topology)
    except UserError as error:
        if "pip install" not in str(error):
            raise
        say(f"{error}; without it only bytes are compared")
        return targets.devices("cpu", str(math.prod(map(int, topology.split("x")))))


def _chosen(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that the answers decide. What is not asked for has the base config's value."""
    found = {
        question.place: answers[question.name] for question in QUESTIONS if question.place and question.name in answers
    }
    if found.get("init_from"):
        del found["model.preset"]
    else:
        found.pop("init_from", None)
    if passes := found.pop("grad_accum", 0):
        found["grad_accum"], found["micro_batch_size"] = passes, 0
    if found.get("lora.r"):
        found["export.format"] = "peft"
    of_text: dict[str, Any] = {
        place: found[place] for place in ("init_from", "model.preset", "seq_len") if place in found
    }
    if plans.takes_tiles(config_lib.from_dict(_raw(of_text))):
        found["model.tile_tokens"] = tiles.USUAL
    none = {
        "offload.optimizer": offload_lib.NONE,
        "offload.params": offload_lib.NONE,
        "lora.r": 0,
        "mesh.model": 1,
        "mesh.context": 1,
    }
    return {place: value for place, value in found.items() if none.get(place) != value}


def _settings(answers: Mapping[str, Any], advice: Advice) -> dict[str, Any]:
    """Returns all settings of the config."""
    number = int(answers["stage"])
    found = {**_chosen(answers), "zero.stage": number}
    if fit := advice.fits.get(number):
        found["micro_batch_size"], found["grad_accum"] = fit.micro_batch_size, 0
        if fit.remat != REMATS[0]:
            found["model.remat"] = fit.remat
    else:
        found["micro_batch_size"], found["grad_accum"] = 0, answers["grad_accum"] or 1
    if answers["target"] == "cpu" and answers["topology"]:
        found["emulate_devices"] = math.prod(map(int, answers["topology"].split("x")))
    return found


def _at(config: settings_lib.Config, number: int) -> settings_lib.Config:
    return settings_lib.changed(config, {"zero.stage": number})


def _raw(settings: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Returns the base config with settings."""
    raw = configs.get("base")
    raw.update_from_flattened_dict(dict(settings))
    return raw


def _write(path: pathlib.Path, settings: Mapping[str, Any]) -> None:
    sources = {question.place: (question.text.split("?")[0] + "?",) for question in QUESTIONS if question.place}
    sources |= {
        "micro_batch_size": ("that fits; 0: derived",),
        "grad_accum": ("0: derived",),
        "model.remat": ("that fits",),
        "model.tile_tokens": ("of a long text, for which an MLP runs at a time",),
        "export.format": ("the adapters alone",),
    }
    text = config_file.text(
        settings, sources, origin="the answers", path=str(path), maker="Written by `zerojax config` from"
    )
    arguments.write(path, text)
    say(f"written: {path}\npython -m zerojax.train --config {path}")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax config", doc=__doc__)
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=pathlib.Path("mine.py"), metavar="CONFIG.py", help="the config to write")
    add("--force", action="store_true", help="replace the file of --out")
    add("--yes", action="store_true", help="ask nothing: take the default where no flag answers")
    add("--quick", action="store_true", help="judge the stages by arithmetic, without compiling")
    for question in QUESTIONS:
        add(f"--{question.name}", metavar="ANSWER", help=question.text.replace("%", "%%"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
