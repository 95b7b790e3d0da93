"""Puts faults into the code and shows those that no test catches. This module is a mutation tester.

    python scripts/mutants.py zero optim --count 30 --seed 3         # faults in zerojax/zero and zerojax/optim
    python scripts/mutants.py zero optim --seed 3 --only 12          # some of them again, with the output of their tests
    python scripts/mutants.py --patches faults.diff                  # those of a file, each a diff below a line "# NAME"

A fault changes one operator, number, condition, argument, call or statement, at most one in a function; which ones depends only on the seed
and the code. Each is tried in a copy of the repository against the tests that execute its line, all of which pass without it. So the first
run records what each test executes, once for each test file, and keeps that in `--cache`, outside the repository; a test file that changed
is recorded again, and lines are found again where the code around them has changed.

The tests of a fault run in one process until one fails: those that execute its line, those of the module's own test file first, then the
other tests of these files, since one may use what another has traced. They are as many as took `--budget` CPU seconds when recorded. A
fault that lives is a missing test, or a change that changes nothing: read it. Tests run in children of one process that has imported
JAX, and share a folder of compiled programs.
"""

import argparse
import ast
import collections
import compileall
import contextlib
import copy
import difflib
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import pathlib
import py_compile
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
CACHE = pathlib.Path.home() / ".cache" / "zerojax-mutants"
LIMIT = 1200  # seconds after which the tests of a fault hang, whatever they wait for
CPU_LIMIT = 180  # seconds of the CPU beside three times `--budget`, after which they do
MEMORY = 6 << 30  # bytes, of which tests that grow without end take more
LIVES, CAUGHT, HANGS = "LIVES", "caught", "hangs"
UNSEEN = "UNSEEN"  # no test executes the line in its own process
FAST = "not long and not slow"  # the tests that are recorded and run
EVERYWHERE = ("whole_steps",)  # tests of all rooms
LIBRARIES = ("flax.linen", "flax.nnx", "optax", "orbax.checkpoint", "grain", "pytest")
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
        case ast.Call(keywords=[_, *_]):
            new.keywords.pop()
        case ast.Subscript(slice=ast.Slice()):
            new = new.value
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


class Patch(NamedTuple):
    """A fault of a file of patches."""

    name: str
    path: str
    line: int  # the first that it changes
    new: bytes  # the file with it

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}"

    def put(self, folder: pathlib.Path) -> bytes:
        """Puts the fault into a copy of the repository, and returns the file as it was."""
        data = (folder / self.path).read_bytes()
        (folder / self.path).write_bytes(self.new)
        return data


def patches(root: pathlib.Path, text: str) -> Iterator[Patch]:
    """Yields the patches of a text, each a diff of one file after a line "# NAME"; one that does not apply ends the program."""
    for name, diff in re.findall(r"^# (\S+)\n(.*?)(?=^# |\Z)", text, re.M | re.S):
        path = re.findall(r"^\+\+\+ b/(\S+)", diff, re.M)[0]
        with tempfile.NamedTemporaryFile() as file:
            shutil.copy(root / path, file.name)
            subprocess.run(["patch", "-s", "--no-backup-if-mismatch", file.name], input=diff.encode(), check=True)
            new = pathlib.Path(file.name).read_bytes()
        pairs = zip((root / path).read_bytes().splitlines(), new.splitlines())
        yield Patch(name, path, next(n for n, (old, own) in enumerate(pairs, 1) if old != own), new)


class Records:
    """What the tests of each file execute.

    Args:
      folder: of the cache.
      root: the repository.
      files: the test files, from the root.
    """

    def __init__(self, folder: pathlib.Path, root: pathlib.Path, files: Iterable[str]):
        self.folder, self._root = folder, root
        self.files = sorted(files)
        (folder / "sources").mkdir(parents=True, exist_ok=True)

    def missing(self, files: Iterable[str]) -> list[str]:
        """Returns those test files of which there is no record, or one of another text."""
        return sorted(file for file in files if not self._read(file))

    def save(self, file: str, lines: dict[str, dict[int, list[str]]], seconds: dict[str, float]) -> None:
        """Keeps what the tests of a file execute: {source: {line: its tests}}, "" for an import, and the CPU seconds of those that pass."""
        for path in lines:
            kept = self.folder / "sources" / _sha(self._root / path)
            if not kept.exists():
                shutil.copy(self._root / path, kept)
        sources = {path: _sha(self._root / path) for path in lines}
        numbers = {test: number for number, test in enumerate(["", *seconds])}
        numbered = {
            path: {line: [numbers[test] for test in tests if test in numbers] for line, tests in own.items()}
            for path, own in lines.items()
        }
        record = {"sha": _sha(self._root / file), "sources": sources, "lines": numbered, "seconds": seconds}
        self._path(file).write_text(json.dumps(record))

    def tests_of(self, path: str, line: int) -> dict[str, list[str]]:
        """Returns {test file: its tests that execute a line of a source}, for files in which there is one.

        Of a line that runs when its module is imported, they are those that execute anything of the module; of one that has changed
        since, those of the line before.
        """
        first = _statement(self._root / path, line)
        found = {}
        for file in self.files:
            record = self._read(file)
            own = record.get("lines", {}).get(path, {})
            same = self._same(path, record["sources"][path]) if own else {}
            above = range(line, (first if line in same else 1) - 1, -1)
            known = (own.get(str(same.get(number)), []) for number in above)
            numbers = {*next(filter(None, known), [])}
            if numbers == {0}:
                numbers = {number for tests in own.values() for number in tests}
            tests = ["", *record.get("seconds", {})]
            if numbers - {0}:
                found[file] = [tests[number] for number in sorted(numbers - {0})]
        return found

    def seconds(self, file: str) -> dict[str, float]:
        """Returns how long each test of a file took, those that passed, in their order."""
        return self._read(file).get("seconds", {})

    @functools.cache  # noqa: B019
    def _read(self, file: str) -> dict[str, Any]:
        path = self._path(file)
        found = json.loads(path.read_text()) if path.exists() else {}
        return found if found.get("sha") == _sha(self._root / file) else {}

    @functools.cache  # noqa: B019
    def _same(self, path: str, sha: str) -> dict[int, int]:
        """Returns the number that each line had in an older text of a file, for those that are in both."""
        new, old = (self._root / path).read_text(), (self.folder / "sources" / sha).read_text()
        matcher = difflib.SequenceMatcher(None, new.splitlines(), old.splitlines(), autojunk=False)
        return {a + n + 1: b + n + 1 for a, b, size in matcher.get_matching_blocks() for n in range(size)}

    def _path(self, file: str) -> pathlib.Path:
        return self.folder / f"{file.replace('/', '-')}.json"


class Selected(NamedTuple):
    """The tests of a fault, in the order in which they run."""

    tests: list[str]
    left_out: int  # others that execute its line, for which the budget was too small


def selected(records: Records, path: str, line: int, budget: float) -> Selected:
    """Returns the tests of a line: as many as took `budget` seconds, but at least one.

    Those that execute it come first, and of these those of the module's own test file; then those of the files that took least.
    """
    mirror = f"tests/{path.removeprefix('zerojax/')}".rpartition("/")
    own = f"{mirror[0]}/test_{mirror[2]}"
    direct = records.tests_of(path, line)

    def cost(file: str) -> tuple[bool, float]:
        return file != own, sum(records.seconds(file)[test] for test in direct[file])

    files = sorted(direct, key=cost)
    first = [test for file in files for test in direct[file]]
    others = [test for file in files for test in records.seconds(file) if test not in direct[file]]
    tests, left = [], budget
    for test in first + others:
        left -= records.seconds(test.partition("::")[0])[test]
        if left < 0 and tests:
            break
        tests.append(test)
    return Selected(tests, max(0, len(first) - len(tests)))


def test_files(root: pathlib.Path, places: Iterable[str]) -> set[str]:
    """Returns the test files of rooms and modules ("zero", "optim/muon.py"), and those of all rooms."""
    found: set[str] = set()
    for place in places:
        below = pathlib.PurePath("tests", place)
        folder = root / (below.parent if below.suffix else below)
        found |= {str(path.relative_to(root)) for path in folder.rglob("test_*.py")}
    return found


def _statement(path: pathlib.Path, line: int) -> int:
    """Returns the first line of the innermost statement of a file that holds a line."""
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.stmt)]
    return max((node.lineno for node in nodes if node.lineno <= line <= (node.end_lineno or 0)), default=line)


def _sha(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


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


class Chosen:
    """A plugin of pytest that runs these tests in this order, and notes the CPU seconds of those that pass."""

    def __init__(self, tests: Sequence[str] | None = None, context: Any = None):
        self.order = None if tests is None else {test: number for number, test in enumerate(tests)}
        self.seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._context, self._began = context, 0.0  # f(test), called before each

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.order is not None:
            own = [item for item in items if item.nodeid in self.order]
            items[:] = sorted(own, key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began = time.process_time()
        if self._context is not None:
            self._context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self._failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid not in self._failed:
            self.seconds[nodeid] = round(time.process_time() - self._began, 3)


def in_child(run: Callable[[], int], folder: pathlib.Path, cpu: int, *, show: bool) -> int | None:
    """Returns the status with which a child ends that calls `run` in a folder, or None if it hangs, or takes too much memory.

    It may use the CPU for `cpu` seconds.
    """
    if (pid := os.fork()) == 0:
        status = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
            os.chdir(folder)
            if not show:
                for stream in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            status = int(run())
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    deadline = time.monotonic() + LIMIT
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline and _resident(pid) < MEMORY:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # and what it may have left
        os.killpg(pid, signal.SIGKILL)
    if found == (0, 0):
        os.waitpid(pid, 0)
        return None
    status = os.waitstatus_to_exitcode(found[1])
    return None if status in (-signal.SIGXCPU, -signal.SIGKILL) else status


def _resident(pid: int) -> int:
    """Returns the bytes of memory that a process has; 0 where nothing tells."""
    with contextlib.suppress(OSError, ValueError):
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


class Worker:
    """A copy of the repository in which one process after the other runs tests."""

    def __init__(self, place: pathlib.Path, programs: pathlib.Path, records: Records, budget: float, *, show: bool):
        self._folder = copied(place)
        self._records = Records(records.folder, self._folder, records.files)
        self._programs, self._budget, self._show = programs, budget, show
        self._cpu = CPU_LIMIT + round(3 * budget)

    def _pytest(self, plugin: Chosen, *arguments: str) -> int:
        import pytest

        own = ["-q", f"--rootdir={self._folder}", f"--programs={self._programs}", "-m", FAST]
        return int(pytest.main([*own, *arguments], plugins=[plugin]))

    def record(self, file: str) -> str:
        """Records what the tests of a file execute, and returns a line about it."""
        began = time.monotonic()

        def run() -> int:
            import coverage

            measured = coverage.Coverage(
                data_file=None, source=[str(self._folder / "zerojax")], config_file=False, messages=False
            )
            plugin = Chosen(context=measured.switch_context)
            measured.start()
            self._pytest(plugin, file)
            measured.stop()
            data = measured.get_data()
            lines = {}
            for name in data.measured_files():
                lines[str(pathlib.Path(name).relative_to(self._folder))] = data.contexts_by_lineno(name)
            self._records.save(file, lines, plugin.seconds)
            return 0

        status = in_child(run, self._folder, 10 * LIMIT, show=self._show)
        return f"recorded {file} in {time.monotonic() - began:.0f} s" + ("" if status == 0 else ": FAILED")

    def verdict(self, numbered: tuple[int, Fault | Patch], until: float) -> tuple[str, str]:
        """Returns how a fault ends, and a line about it; ("", "") after the time `until`."""
        (number, fault), began = numbered, time.monotonic()
        if began > until:
            return "", ""
        tests, left_out = selected(self._records, fault.path, fault.line, self._budget)
        end = UNSEEN
        if tests:
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            data = fault.put(self._folder)
            status = in_child(
                lambda: self._pytest(Chosen(tests), "-x", *files), self._folder, self._cpu, show=self._show
            )
            (self._folder / fault.path).write_bytes(data)
            end = HANGS if status is None else CAUGHT if status else LIVES
        ran = f"{len(tests):3} tests" + (f" of {len(tests) + left_out}" if end == LIVES and left_out else "")
        return end, f"{number:3} {end:6} {ran} {time.monotonic() - began:4.0f} s  {fault}"


def _start(*given: Any) -> None:
    """Makes the worker of a process of the pool."""
    global _worker
    place, *others = given
    _worker = Worker(pathlib.Path(place, str(os.getpid())), *others[:-1], show=others[-1])


def _record(file: str) -> str:
    return _worker.record(file)


def _verdict(job: tuple[tuple[int, Fault | Patch], float]) -> tuple[str, str]:
    return _worker.verdict(*job)


def main() -> None:
    """Tries faults and prints those that live. Status 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rooms", nargs="*", help="folders of zerojax/, or files")
    parser.add_argument("--count", type=int, default=15, help="faults a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of some faults, whose tests are shown")
    parser.add_argument("--patches", type=pathlib.Path, help="a file of faults")
    parser.add_argument("--tests", nargs="*", default=[], help="folders of tests/ beside those of the rooms")
    parser.add_argument(
        "--budget", type=float, default=180, help="CPU seconds that the tests of a fault took when recorded"
    )
    parser.add_argument("--minutes", type=float, help="begins no fault after so many")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE, help="the folder of what tests execute")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import rough

    os.environ.update(rough.JAX, JAX_PLATFORMS="cpu")
    for name in LIBRARIES:  # which the children then have
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    faults: list[Fault | Patch] = [
        fault for room in given.rooms for fault in chosen(ROOT, room, given.count, given.seed)
    ]
    faults += list(patches(ROOT, given.patches.read_text())) if given.patches else []
    rooms = {*given.rooms, *given.tests, *EVERYWHERE, *(fault.path.split("/")[1] for fault in faults)}
    records, own = Records(given.cache, ROOT, test_files(ROOT, [""])), test_files(ROOT, rooms)
    ends: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="zerojax-mutants-") as temporary:
        programs, show = pathlib.Path(temporary, "programs"), given.only is not None
        start = (temporary, programs, records, given.budget, show)
        with multiprocessing.get_context("fork").Pool(given.workers, _start, start) as pool:
            for line in pool.imap_unordered(_record, records.missing(own)):
                print(line, flush=True)
            until = time.monotonic() + 60 * given.minutes if given.minutes else float("inf")
            jobs = [(pair, until) for pair in enumerate(faults) if given.only is None or pair[0] in given.only]
            for end, line in pool.imap_unordered(_verdict, jobs):
                ends[end] += 1
                if line:
                    print(line, flush=True)
    untried = ends.pop("", 0)
    print(f"{sum(ends.values())} faults tried: " + ", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    if untried:
        print(f"{untried} not tried within --minutes={given.minutes:g}")
    sys.exit(bool(ends[LIVES] + ends[UNSEEN]))


if __name__ == "__main__":
    main()
