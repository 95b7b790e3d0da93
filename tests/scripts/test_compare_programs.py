"""Checks that programs are told apart by what they do, not by lines of code. This module tests scripts/compare_programs.py."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import compare_programs

PROGRAM = 'module @jit_f {{\n  %0 = {} %arg0 loc(#loc1)\n}} loc(#loc)\n#loc1 = loc("{}.py":3:1)\n'


def folder(path, programs):
    path.mkdir()
    for number, (operation, file) in enumerate(programs):
        (path / f"jax_ir{number:04}_jit_f_compile.mlir").write_text(PROGRAM.format(operation, file))
    return path


@pytest.mark.parametrize(
    ("programs", "differing"),
    [
        ([("add", "c"), ("sine", "d")], 0),  # in another order, of other files
        ([("sine", "a"), ("sine", "a")], 2),
        ([("sine", "a"), ("add", "a"), ("add", "a")], 1),
    ],
)
def test_programs_are_compared_without_their_order_and_their_lines_of_code(tmp_path, capsys, programs, differing):
    before, after = folder(tmp_path / "b", [("sine", "a"), ("add", "b")]), folder(tmp_path / "a", programs)
    assert len(compare_programs.compared(before, after)) == differing
    with pytest.raises(SystemExit) as ended:
        compare_programs.main([str(before), str(after)])
    assert (
        ended.value.code == bool(differing)
        and f"{differing} differ of 2 and {len(programs)}" in capsys.readouterr().out
    )


def test_a_folder_without_programs_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="JAX_DUMP_IR_TO"):
        compare_programs.compared(tmp_path, folder(tmp_path / "a", [("sine", "a")]))
