"""Checks how commands refuse and end. This module tests zerojax.commands.arguments."""

import os
import subprocess
import sys

import programs
import pytest

from zerojax.commands import arguments
from zerojax.errors import UserError


def ended(command, capsys):
    with pytest.raises(SystemExit) as end:
        arguments.run(command)
    return end.value.code, capsys.readouterr().err


def refused():
    raise UserError("value: is wrong; choose another")


def forbidden():
    raise PermissionError(13, "Permission denied", "/secret")


def interrupted():
    raise KeyboardInterrupt


def test_a_command_ends_with_its_status_and_an_error_with_one_line(capsys):
    assert ended(lambda: None, capsys) == (0, "")
    assert ended(lambda: 2, capsys) == (2, "")
    assert ended(refused, capsys) == (2, "zerojax: value: is wrong; choose another\n")
    assert ended(forbidden, capsys)[1].startswith(
        "zerojax: /secret: cannot be used (Permission denied); give this user"
    )
    assert ended(interrupted, capsys) == (130, "zerojax: interrupted\n")


def test_a_wrong_argument_is_one_line_that_names_help():
    parser = arguments.OneLineParser()
    parser.add_argument("--count", type=int)
    with pytest.raises(UserError, match=r"argument --count: invalid int value: 'x'; --help lists the arguments"):
        parser.parse_args(["--count", "x"])


def test_a_file_that_exists_and_a_folder_are_not_written_over(tmp_path):
    (tmp_path / "a.py").write_text("")
    with pytest.raises(UserError, match=r"--out .*a.py: exists; choose another file, or add --force"):
        arguments.check_new(tmp_path / "a.py", force=False)
    with pytest.raises(UserError, match="is a folder; name a file in it"):
        arguments.check_new(tmp_path, force=True)
    with pytest.raises(UserError, match="--out: is empty"):
        arguments.check_new("", force=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a device or a pipe"):
        arguments.check_new(tmp_path / "pipe", force=True)
    arguments.check_new(tmp_path / "a.py", force=True)
    arguments.check_new(tmp_path / "new" / "b.py", force=False)


def test_output_that_its_stream_cannot_show_is_escaped():
    program = "from zerojax.commands import arguments\narguments.run(lambda: print('\\u2500'))"
    done = programs.python(program, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "\\u2500\n")


def test_closed_streams_are_as_empty_ones():
    program = "from zerojax.commands import arguments; arguments.run(lambda: print(input()))"
    command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.endswith("EOFError: EOF when reading a line\n")


def test_help_leaves_out_what_a_docstring_says_of_the_module():
    doc = "Merges two files. This module is the command line `merge`.\n\nmerge A B    writes A\n"
    assert arguments.described(doc) == "Merges two files.\n\nmerge A B    writes A\n"


def test_help_that_a_full_disk_does_not_take_is_an_error():
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "w") as full:
        arguments.OneLineParser().print_help(full)
