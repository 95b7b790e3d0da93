"""Checks the one exception, and functions that read others. This module tests zerojax.errors."""

import errno
import os
import sys
import warnings

import jax
import pytest

import zerojax
from zerojax import errors
from zerojax.errors import UserError


def test_a_user_error_is_a_value_error_and_has_one_public_name():
    assert issubclass(UserError, ValueError)
    assert zerojax.UserError is UserError
    assert str(UserError("rule: value; way out")) == "rule: value; way out"


def caused_by(cause: BaseException) -> BaseException:
    """Returns an error raised from `cause`, and one raised while that one was handled."""
    try:
        try:
            raise RuntimeError("outer") from cause
        except RuntimeError:
            raise KeyError("outermost")  # noqa: B904  this error has a context and no cause
    except KeyError as error:
        return error


def test_a_lost_file_system_is_told_from_other_errors():
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/shared/data.jsonl")
    assert errors.lost_file(caused_by(stale)) == "/shared/data.jsonl: its file system fails (Stale file handle)"
    assert errors.lost_file(OSError(errno.EIO, "x")).startswith("a file: its file system fails (")
    assert errors.lost_file(OSError(errno.ENOENT, "x")) == errors.lost_file(ValueError("Stale file handle")) == ""


def test_a_file_that_this_user_may_not_use_is_told_from_other_errors():
    forbidden = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/secret/model")
    assert errors.denied(caused_by(forbidden)) == (
        "/secret/model: cannot be used (Permission denied); give this user access or choose another path"
    )
    assert "Read-only file system" in errors.denied(OSError(errno.EROFS, "x", "/cdrom/a"))
    assert errors.denied(OSError(errno.ENOENT, "x", "/a")) == errors.denied(PermissionError(errno.EPERM, "x")) == ""


def test_causes_are_walked_by_what_raised_and_by_what_was_handled():
    first = ValueError("first")
    assert [str(error) for error in errors.causes(caused_by(first))] == ["'outermost'", "outer", "first"]
    assert list(errors.causes(None)) == []
    last = caused_by(first)
    first.__cause__ = last  # as where a kept error is raised again while one that it caused is handled
    assert [str(error) for error in errors.causes(last)] == ["'outermost'", "outer", "first"]
    assert not errors.is_disk_full(last)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "words of another language"),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        ValueError("RESOURCE_EXHAUSTED: write failed: No space left on device"),
        RuntimeError("Disk quota exceeded"),
        OSError("Not enough disk space. Needed: 3 GiB"),
    ],
    ids=str,
)
def test_a_full_disk_is_known_by_number_and_by_words(error):
    assert errors.is_disk_full(error) and errors.is_disk_full(caused_by(error))


def test_other_errors_are_no_full_disk():
    assert not errors.is_disk_full(caused_by(PermissionError(errno.EACCES, "Permission denied")))


@pytest.mark.parametrize(
    "text, line", [("one\ntwo", "one"), ("\n  one\n", "one"), ("", "ValueError"), ("x" * 500, "x" * 400)]
)
def test_the_first_line_is_the_first_that_is_not_blank(text, line):
    assert errors.first_line(ValueError(text)) == line
    assert errors.kind_and_line(ValueError(text)) == ("ValueError" if text == "" else f"ValueError: {line}")


def test_all_lines_become_one():
    assert errors.one_line(ValueError("one\n  two")) == "one two"
    assert errors.one_line(ValueError("one two"), 5) == "one t"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "words of another language"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."),
        RuntimeError("std::bad_alloc"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_full_host_memory_is_known_by_type_by_number_and_by_words(error):
    assert errors.is_host_memory_full(error) and errors.is_host_memory_full(caused_by(error))


def test_other_errors_are_no_full_host_memory():
    for error in (
        ValueError("MemoryError"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."),
    ):
        assert not errors.is_host_memory_full(error)


def test_a_user_error_is_one_line_that_can_be_printed_whatever_its_value():
    line = str(UserError("--workdir a\nb\0\ud800\x1b[31m: é; choose"))
    assert line == r"--workdir a\nb\x00\ud800\x1b[31m: é; choose" and line.isprintable()
    assert len(str(UserError("x" * 10**6))) < 2100


class Secret:
    def __repr__(self) -> str:
        raise RuntimeError


def test_any_value_can_be_shown():
    assert errors.shown("x") == "'x'" and errors.shown(1.5) == "1.5"
    assert len(errors.shown("x" * 10**6)) <= 120
    assert errors.shown(10**5000) == "int of 16610 bits"
    assert "Secret object" in errors.shown(Secret())


def test_the_way_out_of_a_name_is_the_nearest_or_all():
    assert errors.choose("tinny", ["test", "tiny"]) == "did you mean 'tiny'?"
    assert errors.choose("zzz", ["test", "tiny"]) == errors.choose(7, ["test", "tiny"]) == "known: test, tiny"
    assert errors.choose("33", (0, 1, 2, 3)) == "did you mean 3?"


@pytest.mark.parametrize("value", ["x", 4, 0.5, None, (), [1], jax.numpy.zeros(2)])
def test_what_is_none_of_the_choices_is_refused_whatever_it_is(value):
    errors.one_of("stage", 3, (0, 3))
    with pytest.raises(UserError, match=r"^stage: must be one of 0, 3, and is ") as error:
        errors.one_of("stage", value, (0, 3))
    assert "did you mean" not in str(error.value)
    with pytest.raises(UserError, match=r"^way: must be one of ring, and is 'rung'; did you mean 'ring'\?$"):
        errors.one_of("way", "rung", {"ring": 1})


@pytest.mark.parametrize("pattern", ["(", "x{99999999999}", b"x", 3, None, ["x"], "(" * 5000 + ")" * 5000])
def test_what_is_no_regex_is_refused_with_the_way_out(pattern):
    assert errors.regex("blocks", r"layer_\d+").fullmatch("layer_3")
    with pytest.raises(UserError, match=r"(?s)^blocks: .* is not a regex: .*; pass one$") as error:
        errors.regex("blocks", pattern, "pass one")
    assert str(error.value).isprintable()


def test_a_warning_of_the_library_is_one_line_of_a_command_and_others_keep_their_form(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    errors.warn_in_one_line()
    own = warnings.formatwarning("offload.fraction: is tiny", UserWarning, errors.__file__, 7)
    other = warnings.formatwarning("of another", UserWarning, "/other/module.py", 7)
    assert (own, other) == ("zerojax: offload.fraction: is tiny\n", "/other/module.py:7: UserWarning: of another\n")
    errors.warn_in_one_line("config.{}".format)
    assert warnings.formatwarning("offload.x", UserWarning, errors.__file__, 7) == "zerojax: config.offload.x\n"


def test_options_of_python_do_not_hold_for_warnings_of_the_library_in_a_command(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "warnoptions", ["error"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("error")
        errors.warn_in_one_line()
        warnings.warn_explicit("wire: has no effect", UserWarning, "step.py", 7, module="zerojax.zero.step")
        with pytest.raises(UserWarning):
            warnings.warn_explicit("of another", UserWarning, "other.py", 7, module="other")
    assert [str(one.message) for one in told] == ["wire: has no effect"]
