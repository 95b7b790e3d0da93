"""Reads a command line that names a config file. This module turns every error in either into one line."""

import ast
import difflib
import os
import pathlib
import re
import shutil
import sys
import traceback
from typing import Any

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags
from ml_collections.config_flags import tuple_parser

from zerojax import bounded, configs, errors, files
from zerojax.errors import UserError
from zerojax.interop import hub
from zerojax.trainer import ranges, settings

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "A config: a file, such as mine.py, or a name of `zerojax configs`, such as zero3.",
    lock_config=True,
)
_NONE = "None"  # empties a setting that may be empty


class _Texts(tuple_parser.TupleParser):
    """Reads a setting that is a tuple: texts with commas, a tuple or list of Python, or nothing. Values of several flags are joined."""

    def parse(self, argument: Any) -> tuple:
        if isinstance(argument, tuple):  # the config's own value
            return argument
        if isinstance(argument, list):  # the values of the flags
            return sum(map(self.parse, argument), ())
        text = argument.strip()
        if text[:1] not in tuple("([\"'"):
            return tuple(word.strip() for word in text.split(",")) if text else ()
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError("is no tuple of Python") from error
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)


config_flags.register_flag_parser_for_type(tuple, _Texts())


def asks_help(argv: list[str]) -> bool:
    """Returns whether a command line asks for the help, which runs nothing."""
    return any(word.startswith(("--help", "-help")) or word in ("-h", "-?") for word in argv[1:])


_NO_CONFIG = "--config: get_config must return an ml_collections.ConfigDict, as zerojax.configs.base does ({}); fix the config file"


def parse(argv: list[str]) -> ml_collections.ConfigDict:
    """Reads the flags, in any order. Config files in any folder may import ours as `from zerojax.configs import base`.

    Args:
      argv: the command line, with the program's name first. `sys.argv`, which ml_collections reads too, is put in the same order.

    Returns:
      The result of `get_config` in the file after --config, with the overrides applied.

    Raises:
      UserError: a flag or key is unknown, or the config file is missing or fails. The line names it.
    """
    logging.set_verbosity(logging.WARNING)
    for word, value in zip(argv[1:], [*argv[2:], ""]):
        if found := re.fullmatch(r"--?flagfile(=.*)?", word, re.DOTALL):
            _check_flag_file(value if found[1] is None else found[1][1:])
    sys.argv[1:], argv = _with_config(sys.argv[1:]), [*argv[:1], *_with_config(argv[1:])]
    app.define_help_flags()
    try:
        rest = flags.FLAGS(argv)
    except SystemExit as end:  # absl prints the help and exits with 1
        if not asks_help(argv):
            raise UserError(f"--config: the file ends the program with status {end.code}; fix the config file") from end
        print(f"\n{settings.text(max(60, min(140, shutil.get_terminal_size().columns)))}")
        raise SystemExit(0) from end
    except Exception as error:  # a config file is code and may raise anything
        if isinstance(error, flags.Error) and not str(error).startswith("flag --config="):
            raise UserError(_why_no_value(error)) from error
        # absl replaces the first error by its own
        first = list(errors.causes(error))[-1] if isinstance(error, flags.Error) else error
        raise UserError(_why_no_config(first, argv)) from error
    if not isinstance(_CONFIG.value, dict | ml_collections.ConfigDict):
        if flags.FLAGS["config"].present:
            raise UserError(_NO_CONFIG.format(f"it returns {errors.shown(_CONFIG.value)}"))
        raise UserError(
            "--config: is missing; name a file, or one of those that `zerojax configs` lists: --config zero3"
        )
    if rest[1:]:
        raise UserError(f"command line: {rest[1]!r} is not a flag; settings are given as --config.steps=50")
    _fetch(_CONFIG.value.get("init_from"))
    _derive_passes(_CONFIG.value)
    return _CONFIG.value


def _derive_passes(config: Any) -> None:
    """Lets `grad_accum` follow from the batch and the micro-batch if one of those is given by a flag and nobody set `grad_accum`."""
    sizes = ("global_batch_size", "micro_batch_size")
    is_given = any(f"config.{name}" in flags.FLAGS for name in sizes) and "config.grad_accum" not in flags.FLAGS
    if is_given and config.get("grad_accum") == 1 and all(config.get(name) for name in sizes):
        config["grad_accum"] = 0


def _check_flag_file(path: str) -> None:
    """Raises a UserError for a file of flags that absl would read forever or not find."""
    files.check_path(path, "--flagfile")
    try:
        bounded.open_file(path).close()
    except OSError as error:
        raise UserError(
            f"--flagfile {path}: cannot be read ({error.strerror}); name a file with a flag in each line"
        ) from error


def _fetch(init_from: Any) -> None:
    """Downloads a model that is named as on the Hugging Face hub: its tokenizer is part of the settings."""
    with errors.below("config.init_from: "):
        if isinstance(init_from, str):
            hub.fetched(init_from)


def _with_config(words: list[str]) -> list[str]:
    """Returns the words with `--config FILE` in front, since ml_collections refuses a setting before it.

    A name becomes its file, and "None" an empty value where the setting of `base` is empty.
    """
    first: list[str] = []
    rest: list[str] = []
    flags_end = words.index("--") if "--" in words else len(words)
    for index, word in enumerate(words[:flags_end]):
        is_value = index > 0 and words[index - 1] == "--config"
        has_value = word == "--config" and index + 1 < flags_end  # without one it stays the last word, and is refused
        if is_value:
            first.append(_found(word))
        elif word.startswith("--config="):
            first.append(f"--config={_found(word.partition('=')[2])}")
        else:
            (first if has_value else rest).append(_emptied(word, words[index - 1] if index else ""))
    return [*first, *rest, *words[flags_end:]]


def _emptied(word: str, before: str) -> str:
    """Returns a word without the value None of a setting that may be empty; in two words, the setting is the one before."""
    flag, equals, value = word.partition("=") if "=" in word else (before, "", word)
    known = settings.table().get(flag.removeprefix("--config.")) if value == _NONE else None
    return f"{flag}=" * bool(equals) if known is not None and known.default in ("", ()) else word


def _found(name: str) -> str:
    """Returns the config file that a word after --config means, and lets it import what is beside its folder, and `configs`.

    Raises:
      UserError: there is no such file.
    """
    if not name:
        return name
    files.check_path(name, "--config")
    file, known = pathlib.Path(os.path.realpath(name)), configs.names()
    if not file.is_file() and name in known:
        file = configs.path(name)
        name = str(file)
    if not file.is_file():
        near = difflib.get_close_matches(file.stem, known, 1)
        hint = f"did you mean --config {near[0]}?" if near else "`zerojax configs` lists those that have a name"
        hint = f"did you mean {name}.py?" if os.path.isfile(f"{name}.py") else hint
        raise UserError(f"--config {name}: there is no such file; {hint}")
    sys.path += [str(folder) for folder in (file.parent.parent, configs.FOLDER.parent) if str(folder) not in sys.path]
    return name


def _why_no_value(error: Exception) -> str:
    """Returns the error line for a flag that is unknown or whose value cannot be read."""
    line = errors.one_line(error)
    found = re.match(r"flag --config\.([\w.]+)=(.*?): ", line)
    if found is None or not settings.expected(found[1]):
        hint = "; settings are given as --config.steps=50" if line.startswith("Unknown command line flag") else ""
        return f"command line: {line}{hint}"
    place, value = found.groups()
    if settings.table()[place].choices:
        return f"config.{place}: {ranges.not_a_choice(place, value)}"
    line = f"config.{place}: must be {settings.expected(place)}, and is {errors.shown(value)}"
    member = re.search(r"group of settings \((\w+)", line)
    return f"{line}; set one of them, such as --config.{place}.{member[1]}=..." if member else line


def _why_no_config(error: BaseException, argv: list[str]) -> str:
    """Returns the error line for a config file that failed, or for an override of an unknown key."""
    if isinstance(error, SyntaxError) and pathlib.Path(error.filename or "").is_file():
        return f"{error.filename}:{error.lineno}: {error.msg}; fix the config file"
    frames = traceback.extract_tb(error.__traceback__)[1:]
    inside = [frame for frame in frames if not re.search(r"/(absl|ml_collections)/|importlib", frame.filename)]
    if inside:
        place = f"{inside[-1].filename}:{inside[-1].lineno}"
        return f"{place}: {type(error).__name__}: {errors.one_line(error)}; fix the config file"
    if lookup := re.search(r"Attempting to lookup: ([\w.]+)", errors.one_line(error)):
        group = lookup[1].rpartition(".")[0]
        return f"config.{lookup[1]}: unknown config key; config.{group} is {settings.expected(group) or 'unknown'}, not a group"
    key, near = re.search(r"\w+", errors.one_line(error)), re.search(r'mean "(\w+)"', errors.one_line(error))
    overrides = [word for word in argv if word.startswith("--config.")]
    override = next((word for word in overrides if key and key[0] in re.split("[.=]", word)), None)
    if key is None or override is None:
        why = errors.one_line(error) or type(error).__name__
        if override := next((word for word in overrides if isinstance(error, SyntaxError)), None):
            return f"{override}: is not a setting ({why}); give it as --config.steps=50"
        return _NO_CONFIG.format(why)
    group = override.removeprefix("--config.").partition("=")[0].rpartition(".")[0]
    known = settings.expected(group)
    hint = f"config.{group} is {known}" if known else "zerojax train --help lists every key"
    hint = f"did you mean {near[1]!r}?" if near else hint
    return f"{override}: unknown config key {key[0]!r}; {hint}"
