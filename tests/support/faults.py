"""Puts faults into the code and shows those that its tests do not catch. This module is a mutation tester.

    python tests/support/faults.py zero --count 30 --seed 3      # unseen faults in zerojax/zero
    python tests/support/faults.py zero --seed 3 --only 12       # one of them again, with the output of its tests

A fault changes one operator, number, condition, call or statement, at most one in a function; which ones depends only on the seed. Each is
tried in a copy of the repository against the test file that mirrors its module, and if that passes, against those that ALSO names; all must
pass without it. A fault that lives is a missing test, or a change that changes nothing: read it. Tests run in children of one process that
has imported JAX, and share a folder of compiled programs, so a fault takes seconds, or a minute if it lives.
"""

import argparse
import ast
import compileall
import contextlib
import copy
import importlib
import os
import pathlib
import py_compile
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import rough

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 600  # seconds for the tests of a fault
LIVES = "LIVES"
# Tests of a module beside its mirror, by the beginning of its path below zerojax/; the longest that fits counts.
ALSO = {
    "zero/": ["tests/zero/test_stages.py", "tests/zero/test_where_used.py", "tests/zero/test_step.py"],
    "zero/fp8/": ["tests/zero/fp8"],
    "zero/offload/": ["tests/zero/offload/test_streamed_step.py", "tests/zero/offload/test_step_by_block.py"],
    "zero/offload/disk/": ["tests/zero/offload/disk"],
    "zero/sharded_batch/": ["tests/zero/sharded_batch"],
    "zero/loss_scale": ["tests/whole_steps/test_skipped_steps.py"],
    "checkpoint/": ["tests/checkpoint"],
    "interop/": ["tests/interop/test_huggingface.py", "tests/interop/test_folder.py", "tests/interop/test_peft.py"],
    "migration/": ["tests/migration", "tests/commands/test_import_deepspeed.py"],
    "data/": ["tests/data/test_batches.py", "tests/data/test_source.py", "tests/data/test_feed.py"],
    "data/pairs/": ["tests/data/pairs"],
    "zero/pipeline/": ["tests/zero/pipeline"],
    "zero/wires/": ["tests/zero/wires", "tests/whole_steps/test_packed_wires.py"],
    "zero/wires/experts": ["tests/whole_steps/test_expert_parallel.py"],
    "ops/expert_parallel": ["tests/whole_steps/test_expert_parallel.py"],
    "ops/preferences": ["tests/trainer/tuning"],
    "optim/": ["tests/whole_steps/test_muon.py"],
    "optim/fused": ["tests/whole_steps/test_muon.py", "tests/optim/test_locality.py"],
    "trainer/tuning/": ["tests/trainer/tuning"],
    "inference/engine/": ["tests/inference/engine"],
}
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}  # fmt: skip
SILENT = {"print", "warn", "named_scope", "shown"}  # calls that only speak
# Calls that are not dropped, since nothing runs without them.
NEEDED = {
    "map",
    "partial",
    "isinstance",
    "hasattr",
    "getattr",
    "len",
    "tuple",
    "list",
    "dict",
    "set",
    "sorted",
    "zip",
    "enumerate",
    "range",
    "join",
}


class Fault(NamedTuple):
    """One change: the file, its line, the kind of code, where its bytes begin, what they are, and what they become."""

    path: str
    line: int
    kind: str
    begin: int
    before: bytes
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:90] for text in (self.before.decode(), self.after))
        return f"{self.path}:{self.line}: {before}  ->  {after}"

    def put(self, folder: pathlib.Path) -> bytes:
        """Puts the fault into a copy of the repository, and returns the file as it was."""
        data = (folder / self.path).read_bytes()
        end = self.begin + len(self.before)
        assert data[self.begin : end] == self.before
        (folder / self.path).write_bytes(data[: self.begin] + self.after.encode() + data[end:])
        return data


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what a node may become by a fault."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare() if type(new.ops[0]) in COMPARISONS:
            new.ops[0] = COMPARISONS[type(new.ops[0])]()
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            new = new.operand
        case ast.BinOp() if type(new.op) in OPERATORS and not isinstance(new.left, ast.JoinedStr):
            new.op = OPERATORS[type(new.op)]()
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value += 1
        case ast.Call(args=[first, *_]) if called(node) not in NEEDED and not isinstance(first, ast.Starred):
            new = first
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Continue():
            new = ast.Pass()
        case _:
            return
    yield new


def faults_of(root: pathlib.Path, path: str) -> Iterator[tuple[str, Fault]]:
    """Yields (function, fault) for all faults of a file; the function is "" outside of all."""
    data = (root / path).read_bytes()
    tree, lines = ast.parse(data), data.splitlines(keepends=True)
    starts = [sum(map(len, lines[:n])) for n in range(len(lines))]
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        for node in nodes(scope):
            for new in changed(node):
                begin, end = (
                    starts[node.lineno - 1] + node.col_offset,
                    starts[node.end_lineno - 1] + node.end_col_offset,
                )
                after = f"({ast.unparse(new)})" if isinstance(node, ast.expr) else ast.unparse(new)
                yield (
                    getattr(scope, "name", ""),
                    Fault(path, node.lineno, type(node).__name__, begin, data[begin:end], after),
                )


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes in which a fault may lie: no annotations, messages, docstrings, nested functions, or code that only speaks."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(value, ast.arguments):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.FunctionDef | ast.JoinedStr | ast.Assert | ast.Lambda
            ):
                continue
            if isinstance(child, ast.Call) and called(child) in SILENT:
                continue
            yield child
            if not isinstance(child, ast.Raise):
                yield from nodes(child)


def called(call: ast.Call) -> str:
    """Returns the last name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def chosen(root: pathlib.Path, room: str, count: int, seed: int) -> list[Fault]:
    """Returns `count` faults of a room, at most one in a function."""
    rng = random.Random(seed)
    by_function: dict[tuple[str, str], dict[str, list[Fault]]] = {}
    place = root / "zerojax" / room
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        name = str(path.relative_to(root))
        for function, fault in faults_of(root, name):
            by_function.setdefault((name, function), {}).setdefault(fault.kind, []).append(fault)
    keys = rng.sample(sorted(by_function), min(count, len(by_function)))
    return [rng.choice(by_function[key][rng.choice(sorted(by_function[key]))]) for key in keys]


def tests_of(path: str) -> list[list[str]]:
    """Returns the tests of a module: those of its mirror, then the others."""
    below = pathlib.PurePath(path).relative_to("zerojax")
    mirror = str("tests" / below.with_name(f"test_{below.name}"))
    start = max((start for start in ALSO if str(below).startswith(start)), key=len)
    others = [test for test in ALSO[start] if test != mirror]
    return [[test] for test in [mirror] if (ROOT / test).exists()] + [others]


def copied(folder: pathlib.Path) -> pathlib.Path:
    """Copies the repository to `folder`, with byte code that Python checks by content, since faults come faster than file times change."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    compileall.compile_dir(folder / "zerojax", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return folder


def verdict(tests: list[str], folder: pathlib.Path, programs: pathlib.Path, *, show: bool) -> str:
    """Returns whether the fault in the copy LIVES, is caught or hangs, by tests in a child."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            os.setsid()
            os.chdir(folder)
            if not show:
                for stream in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            import pytest

            status = int(pytest.main(["-x", "-q", f"--rootdir={folder}", f"--programs={programs}", *tests]))
            sys.stdout.flush()
        finally:
            os._exit(status)
    deadline = time.monotonic() + LIMIT
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # and what it may have left
        os.killpg(pid, signal.SIGKILL)
    if found == (0, 0):
        os.waitpid(pid, 0)
        return "hangs"
    return "caught" if os.waitstatus_to_exitcode(found[1]) else LIVES


def main() -> None:
    """Tries faults and prints those that live. Status 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rooms", nargs="+", help="folders of zerojax/, or files")
    parser.add_argument("--count", type=int, default=15, help="faults a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one fault")
    given = parser.parse_args()
    os.environ.update(rough.JAX, JAX_PLATFORMS="cpu")
    for name in ("flax.linen", "optax", "orbax.checkpoint", "pytest"):  # which the children then have
        importlib.import_module(name)
    tried, lived = 0, 0
    with tempfile.TemporaryDirectory(prefix="zerojax-faults-") as temporary:
        folder, programs = copied(pathlib.Path(temporary, "copy")), pathlib.Path(temporary, "programs")
        assert verdict(["tests/test_errors.py"], folder, programs, show=True) == LIVES, "tests fail without a fault"
        faults = [fault for room in given.rooms for fault in chosen(folder, room, given.count, given.seed)]
        for number, fault in enumerate(faults):
            if given.only not in (None, number):
                continue
            began, show = time.monotonic(), given.only is not None
            data = fault.put(folder)
            found = (verdict(tests, folder, programs, show=show) for tests in tests_of(fault.path) if tests)
            end = next((end for end in found if end != LIVES), LIVES)
            (folder / fault.path).write_bytes(data)
            tried, lived = tried + 1, lived + (end == LIVES)
            print(f"{number:3} {end:6} {time.monotonic() - began:4.0f} s  {fault}", flush=True)
    print(f"{lived} of {tried} faults lived")
    sys.exit(bool(lived))


if __name__ == "__main__":
    main()
