"""Checks which faults are made, and against which tests. This module tests scripts/mutants.py."""

import ast
import pathlib
import shutil
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import mutants

FILE = '''
LIMIT: int = 3

def sums(values: list = [1], *, twice: bool = False) -> int:
    """Says 5 > 4."""
    if not values or len(values) > LIMIT:
        raise ValueError(f"more than {LIMIT + 1}")
    total = sum(abs(value) for value in values[1:])
    return total * 2 if twice else made(total=total)
'''
AFTER = [
    "4", "values", "(not values and len(values) > LIMIT)", "len(values) >= LIMIT", "pass", "value",
    "abs(value) for value in values[1:]", "values", "2", "total / 2", "3", "made(total=total) if twice else total * 2", "made()",
]  # fmt: skip


def test_a_fault_changes_code_that_has_a_result_and_nothing_else(tmp_path):
    (tmp_path / "a.py").write_text(FILE)
    found = [fault for _, fault in mutants.faults_of(tmp_path, "a.py")]
    plain = [ast.unparse(ast.parse(fault.after)) for fault in found]
    assert sorted(plain) == sorted(ast.unparse(ast.parse(f"({text})" if " for " in text else text)) for text in AFTER)
    for fault in found:
        before = fault.put(tmp_path)
        ast.parse((tmp_path / "a.py").read_text())
        (tmp_path / "a.py").write_bytes(before)


def test_a_seed_gives_the_same_faults_one_in_a_function():
    first, again, other = (mutants.chosen(mutants.ROOT, "data/feed.py", 5, seed) for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) == len(first) == 5


PATCH = """# twice
diff --git a/zerojax/a.py b/zerojax/a.py
--- a/zerojax/a.py
+++ b/zerojax/a.py
@@ -8,2 +8,2 @@
     total = sum(abs(value) for value in values[1:])
-    return total * 2 if twice else made(total=total)
+    return total if twice else made(total=total)
"""


def test_a_patch_is_a_fault_of_the_first_line_that_it_changes(tmp_path):
    (tmp_path / "zerojax").mkdir()
    (tmp_path / "zerojax/a.py").write_text(FILE)
    [found] = mutants.patches(tmp_path, PATCH)
    assert (found.name, found.path, found.line) == ("twice", "zerojax/a.py", 9)
    assert found.put(tmp_path).decode() == FILE and "return total if" in (tmp_path / "zerojax/a.py").read_text()


@pytest.fixture
def records(tmp_path):
    """Returns what two test files execute of a source: tests/test_a.py mirrors it."""
    for folder in ("zerojax", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "zerojax/a.py").write_text(FILE)
    files = ["tests/test_a.py", "tests/test_b.py"]
    for file in files:
        (tmp_path / file).write_text("")
    found = mutants.Records(tmp_path / "cache", tmp_path, files)
    one, other, third = (f"tests/test_{name}" for name in ("a.py::one", "a.py::other", "b.py::third"))
    own = {2: [""], 6: ["", one, other], 8: [one], 9: [one, "tests/test_a.py::fails"]}
    found.save("tests/test_a.py", {"zerojax/a.py": own}, {one: 5.0, other: 1.0})
    found.save("tests/test_b.py", {"zerojax/a.py": {8: [third], 9: [third]}}, {third: 0.5})
    return mutants.Records(tmp_path / "cache", tmp_path, files)


def test_tests_of_a_line_are_those_that_execute_it_then_the_others_of_their_files_as_many_as_the_budget_has(records):
    tests = [f"tests/test_{name}" for name in ("a.py::one", "b.py::third", "a.py::other")]

    def found(line, budget):
        return mutants.selected(records, "zerojax/a.py", line, budget)

    assert [found(8, budget) for budget in (9, 6, 1)] == [(tests, 0), (tests[:2], 0), (tests[:1], 1)]
    assert found(6, 99).tests == found(2, 99).tests[:2] == ["tests/test_a.py::one", "tests/test_a.py::other"]
    assert found(9, 99).tests == tests, "one that fails without a fault is no test"


def test_a_line_is_found_again_after_others_have_changed_and_a_test_file_that_changed_is_recorded_again(records):
    root, before = records._root, records.tests_of("zerojax/a.py", 9)
    moved = FILE.replace("LIMIT: int = 3\n", "LIMIT: int = 3\nMORE = 4\n").replace("abs(value)", "abs(2 * value)")
    (root / "zerojax/a.py").write_text(moved)
    found = mutants.Records(records.folder, root, records.files)
    assert found.tests_of("zerojax/a.py", 10) == before
    assert found.tests_of("zerojax/a.py", 9) == {"tests/test_a.py": ["tests/test_a.py::one", "tests/test_a.py::other"]}
    assert found.missing(found.files) == []
    (root / "tests/test_a.py").write_text("# new")
    assert mutants.Records(records.folder, root, records.files).missing(records.files) == ["tests/test_a.py"]


TESTS = """
from zerojax.sums import (a)

def test_of_few():
    assert a.sums([3, -4], twice=True) == 8

def test_of_none():
    pass
"""


def test_a_run_records_its_tests_once_and_tells_which_faults_live(tmp_path):
    """In a repository of one module, of which one test executes a part."""
    for name, text in (
        ("zerojax/sums/a.py", FILE.replace("made(total=total)", "round(total)")),
        ("tests/sums/test_a.py", TESTS),
        ("tests/conftest.py", 'def pytest_addoption(parser):\n    parser.addoption("--programs")\n'),
        ("pyproject.toml", '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["slow", "long"]\n'),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("scripts/mutants.py", "tests/support/rough.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(mutants.ROOT / name, tmp_path / name)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)

    def run(*arguments):
        cache = ["--cache", str(tmp_path.parent / f"{tmp_path.name}-cache"), "--workers", "1"]
        command = [sys.executable, str(tmp_path / "scripts/mutants.py"), "sums", *cache, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    done, again = run(), run("--only", "1")
    assert done.stdout, (done.returncode, done.stderr)
    recorded, *faults, last = done.stdout.splitlines()
    assert recorded.startswith("recorded tests/sums/test_a.py in ") and last == "2 faults tried: 1 LIVES, 1 caught"
    assert {(line.split()[1], line.partition("zerojax/")[2]) for line in faults} == {
        ("caught", "sums/a.py:9: total * 2  ->  (total / 2)"),
        ("LIVES", "sums/a.py:2: 3  ->  (4)"),
    }
    assert "2 passed" in again.stdout and "recorded" not in again.stdout
    assert again.stdout.endswith("1 faults tried: 1 LIVES\n") and (done.returncode, again.returncode) == (1, 1)
    assert (tmp_path / "zerojax/sums/a.py").read_text() == FILE.replace("made(total=total)", "round(total)")
