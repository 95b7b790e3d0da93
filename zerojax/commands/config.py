"""Asks eight questions and writes a config that runs. This module is the command line `zerojax config`.

zerojax config                                 asks on a terminal, with the plan's answer beside the question of the stage
zerojax config --yes --target h200 --topology 1x8 --out mine.py     asks nothing
"""

import argparse
import contextlib
import dataclasses
import difflib
import pathlib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.table import Table

from zerojax import configs, display, errors, files, precision
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.interop.deepspeed import config_file
from zerojax.launch import devices as devices_lib
from zerojax.models import families
from zerojax.plan import search, targets
from zerojax.trainer import config as config_lib
from zerojax.trainer import plans
from zerojax.trainer import program as program_lib
from zerojax.zero import memory, stages
from zerojax.zero.offload import settings as offload_lib

ROOM = 0.5  # of a device's memory, for the state and the gradients of a step that is not compiled
MOST_COMPILES = 4


@dataclasses.dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
      name: of its flag.
      text: what is asked.
      place: the setting that it decides; "" if it decides none by itself.
      check: (answer) -> the value. Raises UserError for one that is not allowed.
    """

    name: str
    text: str
    place: str
    check: Callable[[str], Any]


def _one_of(name: str, choices: Any) -> Callable[[str], str]:
    """Returns a check that an answer is one of some words."""
    known = [str(choice) for choice in choices]

    def check(answer: str) -> str:
        if answer not in known:
            near = difflib.get_close_matches(answer, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
            raise UserError(f"{name}: {answer!r} is not known; {hint}")
        return answer

    return check


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


_LAST = "stage"  # the question beside which the plan's advice is shown
_KINDS = offload_lib.KINDS
QUESTIONS = (
    Question("model", "Which model? " + ", ".join(families.PRESETS), "model.preset", _one_of("model", families.PRESETS)),
    Question("target", "Which devices? here, " + ", ".join(targets.TARGETS), "", _one_of("target", [*targets.TARGETS, targets.HERE])),
    Question("topology", "How many? hosts x devices (1x8); TPUs: chips (2x2x1); empty for all that are here", "", _topology),
    Question("seq_len", "How many tokens a sequence?", "seq_len", _count("seq_len")),
    Question("global_batch_size", "How many sequences a step, over all devices?", "global_batch_size", _count("global_batch_size")),
    Question("precision", "Which precision? " + ", ".join(precision.PRECISIONS), "precision", _one_of("precision", precision.PRECISIONS)),
    Question("offload", "Where does the optimizer state live? " + ", ".join(_KINDS), "offload.optimizer", _one_of("offload", _KINDS)),
    Question("stage", "Which ZeRO stage? " + ", ".join(map(str, stages.STAGES)), "zero.stage", _one_of("stage", stages.STAGES)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Advice:
    """What the plan says of the stages.

    Attributes:
      table: to be shown beside the question.
      stage: the fastest that fits, or that of the least memory.
      micro_batch_size: that it fits with; 0 if no step was compiled.
    """

    table: Table
    stage: int
    micro_batch_size: int


def main() -> None:
    """Asks, writes the config, and prints its command. A wrong input ends with one line and status 2."""
    arguments.run(_config)


def _config() -> None:
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
    _write(given.out, _settings(answers, advice))


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
    while pending:
        name = pending.pop(0)
        try:
            if name == _LAST and advised != {**answers, _LAST: None}:
                advice, advised = _advise(answers, quick=quick), {**answers, _LAST: None}
            if name == _LAST and advice is not None:
                say(display.as_text(advice.table))
            number = f"{list(by_name).index(name) + 1}/{len(QUESTIONS)}" if asks else ""
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
            pending = [wrong] if wrong == _LAST else [wrong, *pending, *([] if _LAST in pending else [_LAST])]
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
            answer = input(_wrapped(f"{number} {question.text} [{default}]: ")).strip()
        except EOFError as error:
            say("")
            left = f"the input ended at the question of the {question.name}"  # begins with no name of a setting: it is not asked again
            raise UserError(f"config: {left}; nothing was written, run again") from error
        try:
            return question.check(answer or default)
        except UserError as error:
            say(f"  {error}")


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
    if name == "seq_len":
        preset = families.PRESETS[answers["model"]].presets[answers["model"]]
        is_large = preset.embed_dim > 512
        return str(min(preset.max_seq_len or 2048, 8192 if is_large else 128))
    base = _raw({})
    fixed = {
        "model": base.model.preset,
        "target": targets.HERE,
        "precision": base.precision,
        "offload": offload_lib.NONE,
    }
    return str(fixed.get(name, base.global_batch_size))


def _advise(answers: Mapping[str, Any], *, quick: bool) -> Advice:
    """Returns what each stage needs on each device, and, for devices that a compiler knows, which is fastest."""
    config = config_lib.from_dict(_raw(_chosen(answers)))
    devices = _devices(answers, config)
    usable = None
    with contextlib.suppress(UserError):
        usable = targets.get(answers["target"]).usable
    held = {}
    for number in stages.STAGES:
        with contextlib.suppress(UserError):  # a part of the state that this stage does not shard cannot be offloaded
            built = program_lib.build(_at(config, number), devices=devices)
            held[number] = sum(memory.bytes_per_device(built.partition).values())
    if not held:
        program_lib.build(_at(config, max(stages.STAGES)), devices=devices)  # raises why
    fitting = [number for number, count in held.items() if usable is None or count <= usable]
    outcomes = {}
    if usable is not None and fitting and not quick and devices[0].platform != "cpu":
        outcomes = _compiled(config, answers, fitting, devices)
    return _advice(held, usable, fitting, outcomes)


def _compiled(
    config: config_lib.Config, answers: Mapping[str, Any], fitting: list[int], devices: list[Any]
) -> dict[int, search.Outcome]:
    """Returns the best outcome of each stage that was compiled. A target whose compiler fails has none."""
    each = max(1, config.global_batch_size // len(devices))
    grid = {
        "stage": fitting,
        "remat": (config.model.remat,),
        "micro_batch_size": (min(each, 1 << (each.bit_length() - 1)),),
        "replica": (1,),
    }
    say(f"compiling the step at {len(fitting)} stages; --quick compares their bytes alone")
    try:
        found = plans.search_config(
            config,
            answers["target"],
            answers["topology"],
            grid=grid,
            most_compiles=MOST_COMPILES,
            say=lambda line: say(f"  {line}"),
        )
    except (UserError, jax.errors.JaxRuntimeError) as error:
        say(f"  not compiled: {errors.one_line(error)}")
        return {}
    best: dict[int, search.Outcome] = {}
    for outcome in found:
        if outcome.is_compiled:
            best.setdefault(outcome.candidate.stage, outcome)
    return best


def _advice(
    held: Mapping[int, int], usable: float | None, fitting: list[int], outcomes: Mapping[int, search.Outcome]
) -> Advice:
    shown = Table(title="What each stage needs on each device" + (f", of {display.human(usable)}" if usable else ""))
    for column in ("stage", "state and gradients", "peak", "most tokens/s", ""):
        shown.add_column(column, justify="right" if column else "left")
    compiled = {number: outcome for number, outcome in outcomes.items() if "does not fit" not in outcome.reason}
    rates = {number: outcome.tokens_per_second or 0.0 for number, outcome in compiled.items()}
    # By bytes alone, a stage must leave room for activations, which only a compiled step tells.
    roomy = [number for number in fitting if usable is not None and held[number] <= ROOM * usable]
    known = min(roomy, default=max(fitting, default=max(held)))
    best = max(rates, key=lambda number: rates[number]) if rates else known
    for number, count in held.items():
        outcome = outcomes.get(number)
        peak = display.human(outcome.peak) if outcome and outcome.peak else ""
        rate = f"{outcome.tokens_per_second:,.0f}" if outcome and outcome.tokens_per_second else ""
        word = "does not fit" if number not in fitting else (outcome.reason if outcome else "fits" if usable else "")
        word = "the plan's answer" if number == best and number in (compiled or fitting) else word
        shown.add_row(str(number), display.human(count), peak, rate, word)
    micro = compiled[best].candidate.micro_batch_size if best in compiled else 0
    return Advice(shown, best, micro)


def _devices(answers: Mapping[str, Any], config: config_lib.Config) -> list[Any]:
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
        count = 1
        for size in topology.split("x"):
            count *= int(size)
        return targets.devices("cpu", str(count))


def _chosen(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that the answers decide."""
    return {
        question.place: answers[question.name] for question in QUESTIONS if question.place and question.name in answers
    }


def _settings(answers: Mapping[str, Any], advice: Advice) -> dict[str, Any]:
    """Returns all settings of the config."""
    found = {**_chosen(answers), "zero.stage": int(answers["stage"])}
    found["micro_batch_size"], found["grad_accum"] = (advice.micro_batch_size, 0) if advice.micro_batch_size else (0, 1)
    if answers["target"] == "cpu" and answers["topology"]:
        found["emulate_devices"] = int(answers["topology"].split("x")[0]) * int(
            (answers["topology"] + "x1").split("x")[1]
        )
    return {
        place: value
        for place, value in found.items()
        if not (place == "offload.optimizer" and value == offload_lib.NONE)
    }


def _at(config: config_lib.Config, number: int) -> config_lib.Config:
    return dataclasses.replace(config, zero=dataclasses.replace(config.zero, stage=number))


def _raw(settings: Mapping[str, Any]) -> Any:
    """Returns the base config with settings."""
    raw = configs.get("base")
    raw.update_from_flattened_dict(dict(settings))
    return raw


def _write(path: pathlib.Path, settings: Mapping[str, Any]) -> None:
    sources = {question.place: (question.text.split("?")[0] + "?",) for question in QUESTIONS if question.place}
    sources |= {"micro_batch_size": ("that the plan fits; 0: derived",), "grad_accum": ("0: derived",)}
    text = config_file.text(
        settings, sources, origin="the answers", path=str(path), maker="Written by `zerojax config` from"
    )
    with files.writing(path, "choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text)
    say(f"written: {path}\npython -m zerojax.train --config {path}")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser(
        prog="zerojax config",
        usage="zerojax config [--out CONFIG.py] [--force] [--yes] [--quick] [--model NAME] ...",
        description="Asks eight questions, shows what the plan says, and writes a config that runs. A flag answers its question.",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("mine.py"), metavar="CONFIG.py", help="the config to write"
    )
    parser.add_argument("--force", action="store_true", help="replace the file of --out")
    parser.add_argument("--yes", action="store_true", help="ask nothing: take the default where no flag answers")
    parser.add_argument("--quick", action="store_true", help="compare the stages by their bytes, without compiling")
    for question in QUESTIONS:
        parser.add_argument(f"--{question.name}", metavar="ANSWER", help=question.text.replace("%", "%%"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
