"""Checks which faults are made and against which tests. This module tests tests/support/faults.py, which is started by hand."""

import ast

import faults
import pytest

FILE = '''
LIMIT: int = 3

def sums(values: list = [1], *, twice: bool = False) -> int:
    """Says 5 > 4."""
    if not values or len(values) > LIMIT:
        raise ValueError(f"more than {LIMIT + 1}")
    total = sum(abs(value) for value in values)
    return total * 2 if twice else total
'''
AFTER = [
    "4", "values", "(not values and len(values) > LIMIT)", "len(values) >= LIMIT", "pass", "value", "abs(value) for value in values",
    "total / 2", "3", "total if twice else total * 2",
]  # fmt: skip


def test_a_fault_changes_code_that_has_a_result_and_nothing_else(tmp_path):
    (tmp_path / "a.py").write_text(FILE)
    found = [fault for _, fault in faults.faults_of(tmp_path, "a.py")]
    plain = [ast.unparse(ast.parse(fault.after)) for fault in found]
    assert sorted(plain) == sorted(ast.unparse(ast.parse(f"({text})" if " for " in text else text)) for text in AFTER)
    for fault in found:
        before = fault.put(tmp_path)
        ast.parse((tmp_path / "a.py").read_text())
        (tmp_path / "a.py").write_bytes(before)


def test_a_seed_gives_the_same_faults_one_in_a_function():
    first, again, other = (faults.chosen(faults.ROOT, "data/feed.py", 5, seed) for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) == len(first) == 5


@pytest.mark.parametrize("room", ["zero", "checkpoint", "interop", "data"])
def test_every_module_of_a_room_has_tests(room):
    for path in sorted((faults.ROOT / "zerojax" / room).rglob("*.py")):
        groups = faults.tests_of(str(path.relative_to(faults.ROOT)))
        assert any(groups) and all((faults.ROOT / test).exists() for tests in groups for test in tests), path
