# ruff: noqa: E402
"""Feeds the trainer configs, paths and files that are wrong, extreme or contradict each other. This module is a fuzzer.

    python tests/support/fuzz_configs.py --cases 1500 --seed 7      # unseen cases
    python tests/support/fuzz_configs.py --seed 7 --only 812        # one of them again, with its traceback

A case either passes all checks that a run makes before it compiles, or ends with a UserError of one line that names what was changed. Any
other exception, a case that takes longer than LIMIT seconds, and a case that allocates more than MEMORY are failures. A few cases train.
Fields are found by walking the settings, so a new field is tried without a change here. A case depends only on the seed and its number.
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import io
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]
    import conftest  # noqa: F401  sets the devices

import numpy as np
import runs
from absl import flags
from ml_collections import config_dict

from zerojax import files, train
from zerojax.data import python_stdlib, source
from zerojax.errors import UserError
from zerojax.launch import start_up
from zerojax.trainer import command, setting_names, workdir
from zerojax.trainer import config as config_lib
from zerojax.trainer import settings as settings_lib

LIMIT = 60  # seconds a case
MEMORY = 6 << 30  # bytes of addresses above those of the start
LONGEST = 2100  # characters of an error line


class Hang(BaseException):
    """A case took too long. No `except Exception` catches it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to try: what it is, words of which a refusal must contain one set, and the function that tries it in an empty folder."""

    what: str
    named: tuple[str, ...]
    run: Callable[[pathlib.Path], None]


# ---- values

ANYTHING: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    5,
    7,
    12,
    1000,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    -(2**63),
    10**400,
    -(10**400),
    10**5000,
    0.0,
    -0.0,
    0.5,
    1.0,
    1.5,
    -2.5,
    1e-300,
    1e-45,
    5e-324,
    1e-10,
    1e10,
    3e38,
    1e39,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
    "",
    " ",
    "x",
    "0",
    "1e400",
    "None",
    "x" * 300,
    "y" * 100_000,
    "\0",
    "a\nb",
    "\ud800",
    "\u00e9\u4e2d",
    "[",
    "*",
    "(",
    "(?",
    "../..",
    "/",
    ".",
    "gs://bucket/x",
    "file:///tmp",
    "/proc/self/mem",
    "/dev/zero",
    "~",
    "$HOME",
    "%s%n",
    "{}",
    "\x1b[31m",
    (),
    [],
    {},
    (1,),
    ((),),
    [["x"]],
    ("x", "y"),
    {"a": 1},
    {1: 2},
    {"stage": 3},
    b"bytes",
    1j,
    {1},
    object(),
    print,
    type,
    Ellipsis,
    np.int64(3),
    np.float32(0.5),
    np.float64("nan"),
    np.array([1, 2]),
    np.bool_(True),
    config_dict.ConfigDict(),
    range(3),
    NotImplementedError("x"),
]
SIZES = [
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    12,
    16,
    24,
    31,
    32,
    64,
    127,
    128,
    511,
    512,
    513,
    1024,
    4096,
    65536,
    2**20,
    2**24,
    2**31 - 1,
    2**31,
]
RATES = [
    0.0,
    1e-45,
    1e-38,
    1e-30,
    1e-12,
    1e-8,
    1e-3,
    0.1,
    0.5,
    0.9,
    0.95,
    0.9999,
    1 - 1e-9,
    1 - 1e-16,
    1.0,
    1.1,
    2.0,
    1e3,
    1e30,
    3e38,
    -1.0,
]
AXES = [None, "data", "model", "replica", "rows", "", ("data", "model"), ("data", "data"), (), ("replica", "data"), 3]
PATTERNS = [
    "embed",
    "mlp",
    "mlp/(gate|up)",
    "kernel",
    "norm",
    ".*",
    "",
    "^$",
    "zzz",
    "(",
    "layer_0",
    "embed/embedding",
    "a" * 300,
    "layer_\\d+",
]
MODULES = [
    "",
    "layer_\\d+/mlp/up",
    "layer_0",
    "mlp",
    "(",
    "zzz",
    ".*",
    "head",
    "layer_\\d+/attention",
    "x" * 300,
    "[",
    "\\d{99999999999}",
]
WORDS = [value for value in ANYTHING if isinstance(value, str)]  # of fields that have no list below
FIELDS: dict[str, list[Any]] = {
    "data.name": [
        "random",
        "python_stdlib",
        "python_stdlb",
        "lm1b/x",
        "",
        "a b",
        "../x",
        "x" * 300,
        "gs://b",
        "\0",
        "python_stdlib:9.9.9",
    ],
    "data.train_split": [
        "train",
        "validation",
        "train[:50%]",
        "train[50%:]",
        "train[5:2]",
        "train[",
        "",
        "all",
        "train+train",
        "train[:0]",
        "x" * 300,
    ],
    "data.eval_split": [
        "",
        "validation",
        "train",
        "train[:1]",
        "validation[1:]",
        "test",
        "train+validation",
        "validation[:1%]",
        "\0",
    ],
    "data.text_key": ["text", "path", "", "label", "text\0", "x" * 300],
    "data.tokenizer": [
        "bytes",
        "byte",
        "",
        "/",
        "/dev/null",
        "/dev/zero",
        "x" * 300,
        "\0",
        "gs://b/t.json",
        "pyproject.toml",
        "README.md",
    ],
    "data.dir": [
        "",
        "/",
        "/proc",
        "/dev/null",
        "/dev/null/x",
        "gs://b/d",
        "x" * 300,
        "a/" * 3000,
        "\0",
        "/nowhere/at/all",
        "{folder}/new",
        "{folder}",
    ],
    "model.num_layers": [
        0,
        1,
        2,
        3,
        16,
        settings_lib.table()["model.num_layers"].values.most[0] + 1,
        2**31 - 1,
    ],  # those between take seconds
    "model.recompute": MODULES,
    "model.offload": MODULES,
    "sample.prompt": ["", "def ", "___", "___" * 100, "x" * 600, "x" * 5000, "\0", "\ud800", "\n"],
}
CONTRADICTIONS: list[dict[str, Any]] = [
    {"zero.stage": 0, "zero.indivisible": "pad"},
    {"mesh.model": 2, "zero.overrides": (("", ()),)},
    {"mesh.model": 2, "mesh.data": 4, "zero.overrides": (("mlp/(gate|up)", (None, "model")),), "global_batch_size": 4},
    {"mesh.replica": 2, "mesh.model": 2},
    {"mesh.context": 2},
    {"mesh.data": 2, "mesh.context": 2, "mesh.model": 2, "global_batch_size": 4},
    {"model.recompute": "layer_\\d+/mlp/up", "model.remat": "full"},
    {"model.recompute": "layer_\\d+/mlp/up", "model.offload": "layer_\\d+/mlp/up", "model.remat": "dots"},
    {"model.offload": "layer_\\d+/mlp/up", "model.remat": "none"},
    {"optimizer.moments": "int8", "optimizer.name": "sgd", "optimizer.weight_decay": 0.0},
    {"precision": "bf16_sr", "optimizer.name": "adafactor"},
    {"offload.optimizer": "host", "zero.stage": 0},
    {"offload.optimizer": "host", "optimizer.name": "lamb"},
    {"offload.optimizer": "host", "offload.fraction": 1e-9, "offload.chunk_bytes": 1},
    {"offload.params": "host", "zero.stage": 2},
    {"precision": "fp32", "loss_scale.static": 8.0},
    {"precision": "fp16", "loss_scale.static": 8.0, "loss_scale.window": 2},
    {"precision": "fp16", "loss_scale.min_scale": 2.0**20},
    {"optimizer.warmup_steps": 7, "steps": 3},
    {"optimizer.clip_norm": 1e-5, "optimizer.eps": 1e-3},
    {"profile.start": 1, "profile.steps": 4, "evaluate.every": 2},
    {"profile.start": 6, "profile.steps": 100},
    {"model.preset": "t5_test", "seq_len": 1},
    {"model.preset": "t5_test", "seq_len": 2**22, "global_batch_size": 8},
    {"model.preset": "t5_test", "sample.prompt": "___" * 80, "sample.length": 4},
    {"model.preset": "t5_test", "model.attention": "cudnn"},
    {"sample.prompt": "x" * 500, "sample.length": 100},
    {"micro_batch_size": 2**20, "grad_accum": 2**20, "global_batch_size": 0},
    {"global_batch_size": 2**20, "seq_len": 512},
    {"model.num_layers": 16, "model.vocab_size": 2**24, "model.preset": "llama3_70b"},
    {"data.name": "python_stdlib", "data.train_split": "all", "data.eval_split": "validation"},
    {"data.name": "python_stdlib", "data.eval_split": "validation", "evaluate.batches": 2**31 - 1},
    {"zero.overrides": (("embed", ("data", "data")),)},
    {"zero.overrides": (("embed", (("data", "data"), None)),)},
    {"zero.overrides": tuple(("layer_0", ("data",)) for _ in range(2000))},
]


PLACES = {place: found.hint for place, found in settings_lib.table().items() if found.hint in settings_lib.KINDS}


def fitting(rng: random.Random, place: str, hint: type) -> Any:
    """Returns a value of the field's type, not always allowed."""
    if choices := settings_lib.table()[place].choices:
        chosen = rng.choice(choices)
        return chosen[:-1] if isinstance(chosen, str) and rng.random() < 0.3 else chosen
    if hint is tuple:
        return tuple(
            (rng.choice(PATTERNS), tuple(rng.choices(AXES, k=rng.randrange(4)))) for _ in range(rng.randrange(3))
        )
    return rng.choice(FIELDS.get(place) or {int: SIZES, float: RATES, bool: [True, False], str: WORDS}[hint])


# ---- cases


def by_value(rng: random.Random) -> Case:
    """Gives one field any value."""
    place = rng.choice(list(PLACES))
    return _changed({place: rng.choice(ANYTHING)}, rng)


def by_extreme(rng: random.Random) -> Case:
    """Gives one field a value of its type."""
    place = rng.choice(list(PLACES))
    return _changed({place: fitting(rng, place, PLACES[place])}, rng)


def by_pair(rng: random.Random) -> Case:
    """Gives a few fields values of their types, or takes a known contradiction."""
    if rng.random() < 0.25:
        return _changed(rng.choice(CONTRADICTIONS), rng)
    return _changed(
        {place: fitting(rng, place, PLACES[place]) for place in rng.sample(list(PLACES), rng.randint(2, 4))}, rng
    )


def by_structure(rng: random.Random) -> Case:
    """Removes, adds or replaces keys and groups."""
    place = rng.choice([*PLACES, *{place.partition(".")[0] for place in PLACES if "." in place}])
    how, value = rng.choice(["remove", "replace", "misspell", "number"]), rng.choice(ANYTHING)

    def run(folder: pathlib.Path) -> None:
        raw = _raw({}, folder)
        *groups, name = place.split(".")
        group = raw
        for part in groups:
            group = group[part]
        before = group.pop(name)
        if how != "remove":
            group[{"replace": name, "misspell": name[:-1] + "_", "number": 7}[how]] = (
                value if how == "replace" else before
            )
        _prepare(raw, folder)

    return Case(f"{how} {place} {_short(value)}", (place, "config.7", f"{place[:-1]}_"), run)


def by_flag(rng: random.Random) -> Case:
    """Gives a field a text on the command line."""
    place = rng.choice([*PLACES, "zero", "model", "steps.x", "zero.stage.x", "zero.zero", "", ".", "x"])
    words = [
        "two",
        "1e400",
        "9" * 400,
        "-1",
        "nan",
        "inf",
        "",
        " ",
        "True",
        "None",
        "()",
        "(1,",
        "(('a',()),)",
        "[]",
        "{}",
        "x" * 300,
        "'",
        "\0",
        "0x10",
        "1_000",
        "3",
        "1e-3",
        "fp23",
        "\ud800",
        "a\nb",
        "=",
        "--",
        "0.1.2",
        "(" * 200,
        "((" * 50_000,
    ]
    word, form = (
        rng.choice(words),
        rng.choice(["--config.{}={}", "--config.{} {}", "--config.{}", "--noconfig.{}", "--config.{}=={}"]),
    )
    text = form.format(place, word)

    def run(folder: pathlib.Path) -> None:
        _prepare(_parsed([f"--config={ROOT}/configs/base.py", *text.split(" ", 1)]), folder)

    return Case(f"flag {text[:80]!r}", (place or "config", word[:40] or "config", "command line", "--noconfig"), run)


def by_workdir(rng: random.Random) -> Case:
    """Starts in a folder that is none, cannot be used, or holds other things."""
    name = rng.choice(list(WORKDIRS))

    def run(folder: pathlib.Path) -> None:
        place = WORKDIRS[name](folder, rng)
        files.check_path(place, "--workdir")
        _prepare(_raw({}, folder), pathlib.Path(os.path.realpath(place)))

    return Case(f"workdir: {name}", ("--workdir", "work", "checkpoints"), run)


def by_config_file(rng: random.Random) -> Case:
    """Starts with a config file that is none, or whose code fails."""
    name = rng.choice(list(CONFIG_FILES))

    def run(folder: pathlib.Path) -> None:
        path = folder / "broken.py"
        content = CONFIG_FILES[name]
        if callable(content):
            path = content(folder)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        _prepare(
            _parsed([f"--config={path}", *[flag for flag in runs.flags() if not flag.startswith("--config=")]]), folder
        )

    return Case(f"config file: {name}", ("broken.py", "--config", "config"), run)


def by_data(rng: random.Random) -> Case:
    """Damages the files of a prepared dataset, and reads them."""
    name = rng.choice(list(DAMAGES))

    def run(folder: pathlib.Path) -> None:
        shutil.copytree(_dataset(), folder / "data")
        DAMAGES[name](folder / "data", rng)
        changes = {"data.name": "python_stdlib", "data.dir": str(folder / "data"), "data.eval_split": "validation"}
        _prepare(_raw(changes, folder), folder / "work", batches=3)

    return Case(f"data: {name}", ("data.dir", "data.name", "data.train_split", "data.eval_split"), run)


def by_training(rng: random.Random) -> Case:
    """Trains two steps with a few fields changed."""
    spare = (
        "emulate_devices",
        "steps",
        "model.preset",
        "global_batch_size",
        "seq_len",
        "model.vocab_size",
        "model.num_layers",
        "evaluate.batches",
    )
    chosen = rng.sample([place for place in PLACES if place not in spare], 5)
    changes = {place: fitting(rng, place, PLACES[place]) for place in chosen}
    changes |= {"steps": 2, "model.preset": "test", "optimizer.warmup_steps": 0, "checkpoint.every": 0}
    if rng.random() < 0.7:
        changes |= {
            "data.name": "random",
            "sample.length": 0,
            "profile.steps": 0,
            "grad_accum": 1,
            "micro_batch_size": 0,
        }

    def run(folder: pathlib.Path) -> None:
        with setting_names.of_config():
            train.train(config_lib.from_dict(_raw(changes, folder)), folder / "work")

    return Case(f"train {_short(changes)}", tuple(changes), run)


KINDS = {  # of cases, with their shares
    by_value: 30,
    by_extreme: 20,
    by_pair: 22,
    by_structure: 5,
    by_flag: 8,
    by_workdir: 6,
    by_config_file: 4,
    by_data: 4,
    by_training: 1,
}


def _file(path: pathlib.Path, content: bytes = b"mine") -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _link(path: pathlib.Path, target: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def _in_folder(name: str, content: bytes | None) -> Callable[[pathlib.Path, random.Random], pathlib.Path]:
    """Returns a maker of a workdir that holds a file of a run's name; None makes a folder of it."""

    def make(folder: pathlib.Path, rng: random.Random) -> pathlib.Path:
        path = folder / "work" / name
        _file(path, content) if content is not None else path.mkdir(parents=True)
        return folder / "work"

    return make


JUNK = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe\0",
    b'{"seed": 1}',
    b'{"step": NaN}\n',
    b"9" * 5000,
    b"[" * 20_000,
    b'{"step": 1e999}\n',
]
WORKDIRS: dict[str, Callable[[pathlib.Path, random.Random], Any]] = {
    "new": lambda folder, rng: folder / "work",
    "nested": lambda folder, rng: folder / "work/a/b/c",
    "a name of 300 characters": lambda folder, rng: folder / ("work" + "x" * 300),
    "a path of 9000 characters": lambda folder, rng: str(folder / "work") + "/a" * 4500,
    "a URL": lambda folder, rng: rng.choice(["gs://bucket/run", "s3://b", "file:///tmp/x", "hdfs://x:1/y"]),
    "a null byte": lambda folder, rng: f"{folder}/work\0",
    "not UTF-8": lambda folder, rng: f"{folder}/work\udcff",
    "a surrogate": lambda folder, rng: f"{folder}/work\ud800",
    "a line break": lambda folder, rng: f"{folder}/work\nx",
    "patterns": lambda folder, rng: f"{folder}/work" + rng.choice("*?[]\\"),
    "a file": lambda folder, rng: _file(folder / "work"),
    "below a file": lambda folder, rng: _file(folder / "work") / "run",
    "a loop": lambda folder, rng: _link(folder / "work", "work"),
    "below a loop": lambda folder, rng: _link(folder / "work", "work") / "run",
    "a link to nothing": lambda folder, rng: _link(folder / "work", "nothing"),
    "a device": lambda folder, rng: rng.choice(
        ["/dev/null", "/dev/zero", "/dev/null/work", "/proc/self/work", "/sys/work"]
    ),
    **{
        f"with {name}": _in_folder(name, None)
        for name in (
            "config.json",
            "run.lock",
            "metrics.jsonl",
            "plan.json",
            "losses.png",
            "checkpoints/5",
            "checkpoints/6/state",
        )
    },
    "with junk": lambda folder, rng: _in_folder(
        rng.choice(
            [
                "config.json",
                "metrics.jsonl",
                "run.lock",
                "checkpoints",
                "checkpoints/5/sizes.json",
                "checkpoints/x",
                "tensorboard",
                "export",
            ]
        ),
        rng.choice(JUNK),
    )(folder, rng),
    "with a link": lambda folder, rng: (
        _link(
            folder / "work" / rng.choice(["config.json", "checkpoints", "x", "metrics.jsonl", "run.lock"]),
            rng.choice(["x", "/dev/null", "/nowhere", ".."]),
        ).parent
    ),
}
BASE = "from configs import base\ndef get_config():\n    c = base.get_config()\n"
CONFIG_FILES: dict[str, Any] = {
    "empty": b"",
    "a null byte": b"\0",
    "not UTF-8": b"\xff\xfe",
    "indented": b"  x = 1\n",
    "syntax": b"def get_config(:\n",
    "no function": b"x = 1\n",
    "a number": b"get_config = 3\n",
    "arguments": b"def get_config(a, b):\n    return 1\n",
    **{
        f"returns {text}": f"def get_config():\n    return {text}\n"
        for text in ("None", "3", "{}", "[]", "'x'", "object()", "get_config", "{'seed': 1}", "float('nan')")
    },
    "raises": b"def get_config():\n    raise Exception\n",
    "raises UserError": b"def get_config():\n    from zerojax import UserError\n    raise UserError('mine')\n",
    "ends": b"import sys\ndef get_config():\n    sys.exit(3)\n",
    "ends at once": b"raise SystemExit\n",
    "recurses": b"def get_config():\n    return get_config()\n",
    "takes a lot": b"def get_config():\n    return 'x' * 2**50\n",
    "imports": b"import nothing_of_this_name\n",
    "two lines": b"def get_config():\n    raise ValueError('a\\nb')\n",
    "required": BASE
    + "    from ml_collections import config_dict\n    c.steps = config_dict.required_placeholder(int)\n    return c\n",
    "placeholder": BASE
    + "    from ml_collections import config_dict\n    c.seq_len = config_dict.placeholder(int)\n    return c\n",
    "reference": BASE + "    c.seq_len = c.get_ref('steps') / 0\n    return c\n",
    "itself": BASE + "    c.zero.zero = c\n    return c\n",
    "deleted": BASE + "    del c.zero\n    return c\n",
    "group for number": BASE + "    c.steps = c.zero\n    return c\n",
    "typo": BASE + "    c.lock()\n    c.stepz = 3\n",
    "plain dict": BASE + "    return c.to_dict()\n",
    "nothing returned": BASE,
    "frozen": BASE + "    from ml_collections import FrozenConfigDict\n    return FrozenConfigDict(c)\n",
    "a folder": lambda folder: (folder / "broken.py").mkdir() or folder / "broken.py",
    "a loop": lambda folder: _link(folder / "broken.py", "broken.py"),
    "missing": lambda folder: folder / "broken.py",
    "long": lambda folder: folder / ("broken.py" + "x" * 300),
    "a URL": lambda folder: "https://x/broken.py",
    "a null in the name": lambda folder: f"{folder}/broken.py\0",
    "a device": lambda folder: "/dev/null",
    "no name": lambda folder: "",
}


def _records(data: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in data.rglob("*") if "array_record" in path.name)


def _any_file(data: pathlib.Path, rng: random.Random) -> pathlib.Path:
    return rng.choice(sorted(path for path in data.rglob("*") if path.is_file()))


def _overwrite(path: pathlib.Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def _swap(data: pathlib.Path, rng: random.Random) -> None:
    first, second = _records(data)[:2]
    first.rename(first.with_name("x"))
    second.rename(first)
    first.with_name("x").rename(second)


def _edit(data: pathlib.Path, rng: random.Random) -> None:
    path = next(data.rglob(rng.choice(["dataset_info.json", "features.json"])))
    old, new = rng.choice(
        [
            (r"\d+", "0"),
            (r"\d+", "99999999999999999999"),
            ("train", "x"),
            ('"', ""),
            ("text", "label"),
            (r"shardLengths", "x"),
            (r"\d+", "-3"),
        ]
    )
    path.write_text(re.sub(old, new, path.read_text()))


def _grow(data: pathlib.Path, rng: random.Random) -> None:
    _file(_any_file(data, rng), rng.choice(JUNK))


DAMAGES: dict[str, Callable[[pathlib.Path, random.Random], Any]] = {
    "none": lambda data, rng: None,
    "no files": lambda data, rng: (
        shutil.rmtree(data / "python_stdlib") or (data / "python_stdlib/1.0.0").mkdir(parents=True)
    ),
    "a file is gone": lambda data, rng: _any_file(data, rng).unlink(),
    "a file is a folder": lambda data, rng: (path := _any_file(data, rng)).unlink() or path.mkdir(),
    "a file is a loop": lambda data, rng: (path := _any_file(data, rng)).unlink() or path.symlink_to(path.name),
    "a file is cut": lambda data, rng: os.truncate(path := _any_file(data, rng), rng.randrange(path.stat().st_size)),
    "a file is junk": _grow,
    "splits are swapped": _swap,
    "a description is edited": _edit,
    "a record is overwritten": lambda data, rng: _overwrite(
        path := rng.choice(_records(data)), rng.randrange(path.stat().st_size), rng.randbytes(64)
    ),
    "a bit is flipped": lambda data, rng: _overwrite(
        path := rng.choice(_records(data)), rng.randrange(path.stat().st_size), rng.randbytes(1)
    ),
    "the end is overwritten": lambda data, rng: _overwrite(
        path := rng.choice(_records(data)), path.stat().st_size - 200, rng.randbytes(200)
    ),
    "the middle is zero": lambda data, rng: _overwrite(
        path := rng.choice(_records(data)), path.stat().st_size // 3, bytes(path.stat().st_size // 2)
    ),
    "the folder is a file": lambda data, rng: shutil.rmtree(data) or _file(data),
}


# ---- one case


def _changed(changes: dict[str, Any], rng: random.Random) -> Case:
    reads = rng.random() < 0.3 and "data.name" not in changes

    def run(folder: pathlib.Path) -> None:
        own = {
            place: value.format(folder=folder) if isinstance(value, str) and "{folder}" in value else value
            for place, value in changes.items()
        }
        dataset = (
            {"data.name": "python_stdlib", "data.dir": str(_dataset()), "data.eval_split": "validation"}
            if reads
            else {}
        )
        _prepare(_raw({**dataset, **own}, folder), folder / "work")

    return Case(_short(changes), tuple(changes), run)


def _raw(changes: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Returns the settings of a small run as nested dicts, with changes by dotted place."""
    from configs import base

    raw = base.get_config().to_dict()
    for place, value in {**runs.SMALL, **changes}.items():
        *groups, name = place.split(".")
        group = raw
        for part in groups:
            group = group[part]
        group[name] = value
    return raw


def config(changes: dict[str, Any]) -> settings_lib.Config:
    """Returns the checked settings of a small run, with changes by dotted place."""
    return config_lib.from_dict(_raw(changes, pathlib.Path()))


def _parsed(arguments: list[str]) -> Any:
    """Reads a command line as the trainer does."""
    for name in [name for name in flags.FLAGS if name.startswith("config.")]:  # of an earlier case
        delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()
    flags.FLAGS["config"].unparse()
    flags.FLAGS["config"].value = None
    argv = ["zerojax.train", *arguments]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", list(sys.path)):
        return command.parse(argv)


def _prepare(raw: Any, folder: pathlib.Path, batches: int = 0) -> None:
    """Checks settings, folder and data as a run does before it compiles, and traces the step."""
    config = config_lib.from_dict(raw)
    with workdir.held(folder):
        prepared = train.prepare(config, folder)
        try:
            for _ in range(batches):
                prepared.streams.next()
                prepared.streams.held_out_mean(lambda batch: np.zeros(()), 1)
            program = prepared.program
            if program.model.num_layers <= 16:
                with setting_names.of_config():
                    program.train_step.trace(program.partition.abstract_state, program.abstract_batch)
        finally:
            prepared.streams.close()
            prepared.saver.close()


_PREPARED: list[pathlib.Path] = []


def _dataset() -> pathlib.Path:
    """Returns a prepared dataset of some small files."""
    if not _PREPARED:
        listed = python_stdlib.list_files

        def few(root: pathlib.Path) -> list[str]:
            return [name for name in listed(root) if (root / name).stat().st_size < 4000][:120]

        folder = pathlib.Path(tempfile.mkdtemp(dir=_SCRATCH))
        with mock.patch.object(python_stdlib, "list_files", few):
            source.prepare("python_stdlib", folder)
        _PREPARED.append(folder)
    return _PREPARED[0]


_SCRATCH = None  # set by `main`


def _short(value: Any) -> str:
    try:
        return ascii(value)[:200]
    except ValueError:
        return f"<{type(value).__name__}>"


def make(seed: int, number: int) -> Case:
    """Returns case `number` of a seed."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    return kind(rng)


def fault(case: Case, error: BaseException | None) -> str:
    """Returns why the end of a case is not one that a user should see, or "" if it is."""
    if error is None:
        return ""
    if not isinstance(error, UserError):
        return "hang" if isinstance(error, Hang) else "traceback"
    line = str(error)
    if not line.isprintable() or len(line) > LONGEST or "Traceback" in line:
        return "not one line"
    is_named = any(all(word in line for word in re.split(r"[.](?=\w)", place)) for place in case.named)
    return "" if is_named else "names nothing that was changed"


def attempt(case: Case, folder: pathlib.Path) -> BaseException | None:
    """Runs a case, and returns the exception that ended it."""

    def stop(*_: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    faulthandler.dump_traceback_later(3 * LIMIT, exit=True)  # code outside of Python heeds no signal
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            case.run(folder)
    except (Exception, SystemExit, Hang) as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    return None


@contextlib.contextmanager
def _own_folder() -> Iterator[pathlib.Path]:
    """Makes a folder for a case, and a working directory, which relative paths of a case are written in. Removes both."""
    folder, here = pathlib.Path(tempfile.mkdtemp(dir=_SCRATCH)), pathlib.Path(tempfile.mkdtemp(dir=_SCRATCH))
    os.chdir(here)
    try:
        yield folder
    finally:
        os.chdir(ROOT)
        for made in (folder, here):
            shutil.rmtree(made, ignore_errors=True)


def main() -> None:
    """Runs the cases and prints those at fault. Exits with 1 if there are any."""
    global _SCRATCH
    parser = argparse.ArgumentParser(description="Fuzzes configs, paths and files of the trainer.")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="run one case, and print its traceback")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    options = parser.parse_args()
    os.chdir(ROOT)
    started, ends = time.time(), collections.Counter()
    slowest: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as scratch, mock.patch.object(start_up, "wake_devices", lambda: None):
        _SCRATCH = scratch
        attempt(_changed({"seed": 1}, random.Random(2)), pathlib.Path(scratch) / "warm")  # starts JAX and its threads
        held = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        for number in range(options.cases) if options.only is None else [options.only]:
            case, began = make(options.seed, number), time.time()
            with _own_folder() as folder:
                error = attempt(case, folder)
            why = fault(case, error)
            slowest = sorted([*slowest, (time.time() - began, number)])[-5:]
            ends[why or ("passed" if error is None else "refused")] += 1
            if why or options.verbose or options.only is not None:
                print(
                    f"case {number}: {why or 'fine'}: {case.what}\n    {type(error).__name__}: {_short(str(error))}",
                    flush=True,
                )
            if error is not None and (why in ("traceback", "hang") or options.only is not None):
                print(
                    "".join(
                        traceback.format_exception(error)[-12:]
                        if options.only is None
                        else traceback.format_exception(error)
                    ),
                    flush=True,
                )
    counted = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    print(
        f"seed {options.seed}: {sum(ends.values())} cases in {time.time() - started:.0f} s: {counted}; slowest: "
        + ", ".join(f"{seconds:.1f} s (case {number})" for seconds, number in reversed(slowest))
    )
    sys.exit(bool(set(ends) - {"passed", "refused"}))


if __name__ == "__main__":
    main()
