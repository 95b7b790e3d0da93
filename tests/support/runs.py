"""Starts small runs of the trainer for tests. This module holds their settings, and a process that forks commands.

Importing the trainer takes seconds, so `Commands` imports it once and forks a child for each command line. Apart from its start, the
child behaves as `python -m zerojax.train ARGUMENTS`. Runs draw no losses.png unless a test asks for it: that takes up to a second.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import numpy as np
import programs
import pytest
import rough
from absl import flags as absl_flags
from jax.experimental.compilation_cache import compilation_cache

from zerojax import train
from zerojax.checkpoint import checkpointer
from zerojax.data import parts, tokenizer
from zerojax.launch import start_up
from zerojax.optim import schedules
from zerojax.trainer import config as config_lib
from zerojax.trainer import examples, metrics, program, results, resume, weights
from zerojax.trainer import model as model_lib
from zerojax.trainer import settings as settings_lib
from zerojax.trainer import state as state_lib
from zerojax.trainer.card import facts
from zerojax.trainer.tuning import rollouts

ROOT = pathlib.Path(__file__).parents[2]
FINDS_SUPPORT = f"import sys; sys.path.append({str(ROOT / 'tests' / 'support')!r})"  # for rewards that are there
LONG = pytest.mark.long  # see pyproject.toml
LIMIT = 240  # seconds; a command that takes longer hangs
SMALL: Mapping[str, Any] = {
    "model.preset": "test",
    "model.num_layers": 1,
    "model.remat": "none",
    "precision": "fp32",
    "steps": 6,
    "seq_len": 32,
    "global_batch_size": 8,
    "log_every": 1,
    "optimizer.learning_rate": 0.01,
    "optimizer.schedule": "constant",  # so a short run equals the start of a longer one, and shares its programs
    "optimizer.warmup_steps": 2,
    "data.name": "random",
    "data.eval_split": "",
    "evaluate.batches": 1,
    "sample.length": 0,
}
BYTES = tokenizer.load_tokenizer("bytes")
EVALUATED = {"data__eval_split": "validation"}

_FORKS = """
import gc, json, os, sys
sys.path.insert(0, os.getcwd())
import tensorboardX
from zerojax import train
from zerojax.trainer import results
results.draw = lambda folder: None
gc.collect()
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        for stream in (0, 1, 2):
            os.dup2(os.open(request["files"][stream], os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
        break
    print(pid, flush=True)
else:
    sys.exit()
os.environ.update(request["environ"])
for name in request["unset"]:
    os.environ.pop(name, None)
sys.argv = ["zerojax.train", *request["arguments"]]
exec(request["before"])
train.main()
"""


def cases(names: Iterable[Any], *, long: Collection[Any] = ()) -> list[Any]:
    """Returns names of cases for `pytest.mark.parametrize`; those of `long` are marked so."""
    return [pytest.param(name, marks=LONG) if name in long else name for name in names]


def config(**changes: Any) -> settings_lib.Config:
    """Returns checked settings of a small run; `zero__stage=1` changes zero.stage."""
    from configs import base

    raw = base.get_config()
    raw.update_from_flattened_dict({**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}})
    return config_lib.from_dict(raw)


def flags(**changes: Any) -> list[str]:
    """Returns the same settings as command line arguments."""
    settings = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    return ["--config=configs/base.py", *(f"--config.{key}={value}" for key, value in settings.items())]


def run(folder: pathlib.Path, *, devices: int = 8, draws: bool = False, **changes: Any) -> pathlib.Path:
    """Trains in this process, on the first `devices`, and returns the folder."""
    drawn = contextlib.nullcontext() if draws else mock.patch.object(results, "draw")
    known = mock.patch.object(facts, "sources", _sources)
    with on_devices(devices), drawn, spared(), known, mock.patch.object(program, "_build", _built_once):
        train.train(config(**changes), folder)
    return folder


def spared() -> Any:
    """Leaves it to conftest what Python's garbage collector skips. To count what it has spared takes a run 0.1 s and more."""
    return mock.patch.object(start_up, "collector_restored", contextlib.nullcontext)


_part_maker = weights._part_maker
_sources = functools.cache(facts.sources)  # of this process, in which they do not change


def drawn_once() -> Any:
    """Draws a model's first weights on one device. To draw them sharded, each mesh and stage would lower and compile its own programs."""

    def placed(module: Any, inputs: Any, leaves: tuple, coded: frozenset[str], kind: str) -> Any:
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        make = _part_maker(module, inputs, tuple((*leaf[:3], one) for leaf in leaves), coded, kind)

        def place(key: jax.Array, number: int) -> dict[str, jax.Array]:
            made = {path: np.array(leaf) for path, leaf in make(key, number).items()}
            return {path: jax.device_put(made[path], sharding) for path, _, _, sharding in leaves}

        return place

    return mock.patch.object(weights, "_part_maker", placed)


# What the program of a run does not depend on: how long it is, where its text is, and what it writes.
_APART = (
    "steps",
    "log_every",
    "evaluate",
    "checkpoint",
    "sample",
    "export",
    "metrics",
    "data.dir",
    "data.name",
    "data.eval_split",
)
_build, _programs = program._build, {}


def _built_once(config: settings_lib.Config, tokenizer_vocab: int, devices: Any) -> program.Program:
    """Builds the program of a run, or returns that of a run before, whose traces and executables JAX finds again."""
    settings, chosen = dataclasses.asdict(config), config.optimizer
    for name in _APART:
        holder, _, last = name.rpartition(".")
        (settings[holder] if holder else settings).pop(last)
    settings["warmup"] = schedules.fitting_warmup(chosen.schedule, chosen.warmup_steps, config.steps)
    is_plain = {config.offload.optimizer, config.offload.params} == {"none"} and chosen.schedule == "constant"
    tells = config.model.remat == "attention" or config.model.tile_tokens or config.mesh.model > 1
    if not is_plain or tells or config.init_from or config.lora.init_from:
        return _build(config, tokenizer_vocab, devices)
    key = repr((settings, tokenizer_vocab, len(jax.devices()), devices))
    if key not in _programs:
        _programs[key] = _build(config, tokenizer_vocab, devices)
    return dataclasses.replace(_programs[key], config=config)


def write_lines(path: pathlib.Path, rows: Iterable[Any]) -> str:
    """Writes a file of JSON lines, and returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(devices: int = 8, data_dir: Any = "", **changes: Any) -> tuple[program.Program, Any, Any]:
    """Returns a program whose task reads examples, what makes its batches, and the examples."""
    with on_devices(devices):
        chosen = config(**changes)
        found = examples.load(chosen, *model_lib.family_of(chosen), BYTES, data_dir)
        if chosen.data.task == "grpo":
            rollouts.check(chosen, found)
        built = program.build(chosen, tokenizer_vocab=BYTES.vocab_size)
        return built, program.open_feed(built, BYTES, data_dir, found), found


def trained(devices: int = 1, steps: int = 2, **settings: Any) -> list[tuple[float, float]]:
    """Returns the loss and the gradients' norm of each step on drawn batches, without the trainer's loop."""
    built = program.build(config(zero__min_size=0, **settings), tokenizer_vocab=320, devices=jax.devices()[:devices])
    state, found = state_lib.first(built), []
    for number in range(steps):
        state, metrics = built.train_step(state, drawn_batch(built, number))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return found


def drawn_batch(built: program.Program, number: int) -> dict[str, jax.Array]:
    """Returns a batch for a step, the same for each number."""
    rng = np.random.default_rng(number)

    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "segments":
            values = np.cumsum(rng.random(shape) < 0.1, axis=-1)
        elif name in ("labeled", "mask"):
            values = rng.random(shape) < 0.8
        else:
            values = rng.integers(3, 300, shape)
        return values.astype(np.int32)

    # Passes of a mesh with several have the examples of one pass in another order, which changes no mean.
    rows = {name: drawn(name, (built.sizes.global_batch_size, length)) for name, length in built.lengths.items()}
    made = rows if built.order is None else parts.of_rows(rows, built.order)
    like = built.abstract_batch
    return {name: jax.device_put(array.reshape(like[name].shape), like[name].sharding) for name, array in made.items()}


@contextlib.contextmanager
def jax_settings(**values: Any) -> Iterator[None]:
    """Sets options of JAX inside the block."""
    before = {name: jax.config.values[name] for name in values}
    try:
        _set(values)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads the cache settings only once


def on_devices(count: int) -> Any:
    """Lets this process see only its first `count` devices."""
    return mock.patch.object(jax, "devices", functools.partial(jax.devices().__getitem__, slice(count)))


def numbers(folder: pathlib.Path, *, names: tuple[str, ...] = ("loss", "grad_norm", "learning_rate")) -> list[tuple]:
    """Returns (step, loss, grad_norm, learning_rate) of every training line."""
    return [(line["step"], *(line[name] for name in names)) for line in metrics.read(folder) if "loss" in line]


def losses(folder: pathlib.Path) -> dict[int, float]:
    """Returns {step: training loss}."""
    return {line["step"]: line["loss"] for line in metrics.read(folder) if "loss" in line}


def evaluations(folder: pathlib.Path) -> list[tuple[int, float]]:
    """Returns (step, evaluation loss) of every evaluation."""
    return [(line["step"], line["eval_loss"]) for line in metrics.read(folder) if "eval_loss" in line]


def forget_flags() -> None:
    """Lets this process read another command line, as if it were its first."""
    for name in [name for name in absl_flags.FLAGS if name.startswith("config.")]:
        delattr(absl_flags.FLAGS, name)
    absl_flags.FLAGS.unparse_flags()
    absl_flags.FLAGS["config"].value = None


def environment(cache: pathlib.Path) -> dict[str, str]:
    """Returns this process's environment without conftest's variables, and with a cache of compiled programs."""
    return programs.environment(
        **rough.JAX,
        XLA_FLAGS=rough.XLA_FLAGS,
        JAX_COMPILATION_CACHE_DIR=str(cache),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )


@dataclasses.dataclass
class Command:
    """A started command; `status`, `out` and `err` are known after `wait`."""

    pid: int
    driver: subprocess.Popen
    files: list[str]
    status: int | None = None

    def wait(self) -> "Command":
        """Waits until it ends."""
        if self.status is None:
            self.status = int(_ask(self.driver, {"wait": self.pid}))
        return self

    def kill(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    @property
    def out(self) -> str:
        """Returns its stdout so far."""
        return pathlib.Path(self.files[1]).read_text()

    @property
    def err(self) -> str:
        """Returns its stderr so far, without the line of a process that waits for another: a busy machine causes it."""
        return re.sub(r"process .*: still waiting for the others; .*\n", "", pathlib.Path(self.files[2]).read_text())

    @property
    def error_line(self) -> str:
        """Returns the error line of a command that ended with status 2."""
        assert (self.status, self.err.count("\n")) == (2, 1), (self.status, self.out, self.err)
        assert self.err.startswith("zerojax: ")
        return self.err.strip()


def _ask(driver: subprocess.Popen, request: Mapping[str, Any]) -> str:
    """Sends a request to the process that forks commands, and returns its answer."""
    driver.stdin.write(json.dumps(request) + "\n")
    driver.stdin.flush()
    return driver.stdout.readline()


class Commands:
    """A process that has imported the trainer and forks commands."""

    def __init__(self, folder: pathlib.Path, cache: pathlib.Path):
        self._folder, self._count = folder, 0
        self._driver = subprocess.Popen(
            [sys.executable, "-c", _FORKS],
            cwd=ROOT,
            env=environment(cache),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # warnings of os.fork
            text=True,
        )

    def start(self, *arguments: str, before: str = "", unset: tuple[str, ...] = (), **environ: str) -> Command:
        """Starts `python -m zerojax.train ARGUMENTS`. The child first runs the Python code `before`."""
        self._count += 1
        files = [os.devnull, *(str(self._folder / f"{self._count}.{stream}") for stream in ("out", "err"))]
        for file in files[1:]:
            pathlib.Path(file).touch()
        request = {"arguments": arguments, "files": files, "environ": environ, "unset": unset, "before": before}
        return Command(int(_ask(self._driver, request)), self._driver, files)

    def start_two(self, *arguments: str, before: tuple[str, str] = ("", "")) -> list[Command]:
        """Starts a run of two processes. Each first runs its part of `before`."""
        address = f"--coordinator=127.0.0.1:{programs.free_port()}"
        flags = [(f"--process_id={index}", "--num_processes=2", address) for index in range(2)]
        return [self.start(*arguments, *extra, before=code) for extra, code in zip(flags, before, strict=True)]

    def __call__(self, *arguments: str, **options: Any) -> Command:
        """Starts a command and waits for its end."""
        return self.start(*arguments, **options).wait()

    def start_python(self, code: str, folder: pathlib.Path = ROOT) -> Command:
        """Starts `python -c CODE` in a folder, on the CPU. The library is imported already, and nothing is deleted at the end."""
        begin = f'import sys, jax; os.chdir({str(folder)!r}); jax.config.update("jax_platforms", "cpu")\n'
        return self.start(before=f"{begin}{code}\nsys.stdout.flush()\nos._exit(0)")

    def python(self, code: str, folder: pathlib.Path = ROOT) -> Command:
        """Starts it and waits for its end."""
        return self.start_python(code, folder).wait()

    def close(self) -> None:
        """Ends the process."""
        self._driver.stdin.close()
        self._driver.wait(LIMIT)
        self._driver.stdout.close()


@contextlib.contextmanager
def open_commands(folder: pathlib.Path, cache: pathlib.Path) -> Iterator[Commands]:
    """Opens `Commands` and closes them."""
    commands = Commands(folder, cache)
    try:
        yield commands
    finally:
        commands.close()


def restored(folder: pathlib.Path, step: int, **changes: Any) -> tuple[program.Program, Any]:
    """Returns the program and the state with which a run in `folder` would resume."""
    built = program.build(config(**changes), tokenizer_vocab=320)
    streams = program.open_feed(built, BYTES, folder)
    saver = checkpointer.Checkpointer(folder / "checkpoints", keep_last=2, keep_best=0)
    try:
        return built, resume.state(built, saver, step, resume.check(built, saver, step, streams))
    finally:
        saver.close()
        streams.close()
