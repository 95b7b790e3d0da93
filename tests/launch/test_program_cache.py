"""Counts what is compiled by second starts, and by starts after a failure. This module tests zerojax.launch.program_cache."""

import os
import re
import warnings

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import runs
from jax.experimental.compilation_cache import compilation_cache

from zerojax.launch import program_cache

SHORTEST = "jax_persistent_cache_min_compile_time_secs"
# Before a command: JAX's own settings, and a count of the programs that were not in the cache.
COUNTS = """
import jax, sys
from zerojax.launch import ending
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_compilation_cache_dir", None)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rsplit("/", 1)[-1]))
def count(*_):
    print("compiled", events.count("compile_requests_use_cache") - events.count("cache_hits"), flush=True)
"""
GENERATES = """
from zerojax import __main__
sys.argv = ["zerojax", "generate", MODEL, "--ids", IDS, "--out", OUT, "--max_new_tokens", "2"]
try:
    __main__.main()
finally:
    count()
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def own_settings(monkeypatch, tmp_path):
    """Gives each test an empty folder of the user's, JAX's own settings, and Python's own warnings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(SHORTEST.upper(), raising=False)
    own = {program_cache.FOLDER: None, program_cache.SWITCH: True, SHORTEST: 1.0}
    with runs.jax_settings(**own), warnings.catch_warnings(action="default"):
        yield


def compiled(commands, tmp_path, before, *arguments):
    """Returns how many programs a command compiled that were not in the user's folder, and what it printed."""
    command = commands(*arguments, before=before, unset=(SHORTEST.upper(),), XDG_CACHE_HOME=str(tmp_path / "home"))
    assert command.status == 0, command.err
    return int(command.out.rsplit("compiled ", 1)[1]), command


def test_a_second_start_of_a_run_compiles_nothing(commands, tmp_path):
    def start(number):
        words = (*runs.flags(steps=2, emulate_devices=2), f"--workdir={tmp_path / str(number)}")
        return compiled(commands, tmp_path, f"{COUNTS}\nending.before_end(count)", *words)

    (first, one), (second, two) = start(1), start(2)
    assert first > 5 and second == 0 and one.err == two.err == ""
    shown = (
        rf"compiled programs: {tmp_path}/home/zerojax/xla \(([\d.]+ \w+); JAX_COMPILATION_CACHE_DIR moves it, JAX_EN"
    )
    assert re.search(shown, one.out)[1] == "0 B" and re.search(shown, two.out)[1] != "0 B"
    assert re.search(r"compiled the step in [\d.]+ s \([\d.]+ s of it XLA\); peak", one.out)
    assert re.search(r"compiled the step in [\d.]+ s \([\d.]+ s of it XLA; 1 of 1 programs kept from before\)", two.out)
    assert runs.losses(tmp_path / "1") == runs.losses(tmp_path / "2")


def test_a_second_start_of_a_generation_compiles_nothing(commands, tmp_path):
    np.savez(tmp_path / "in.npz", input_ids=np.array([[5, 6, 7]]))
    names = {"MODEL": golden_models.FOLDER / "llama", "IDS": tmp_path / "in.npz", "OUT": tmp_path / "out.npz"}
    before = COUNTS + "".join(f"{name} = {str(value)!r}\n" for name, value in names.items()) + GENERATES
    (first, command), (second, _) = (compiled(commands, tmp_path, before) for _ in range(2))
    assert first > 1 and second == 0
    assert command.err.startswith(f"zerojax: compiled programs: {tmp_path}/home/zerojax/xla (0 B; ")


def test_a_damaged_program_is_one_line_and_compiled_and_kept_again(tmp_path, capfd):
    def start():
        with program_cache.counted() as found:
            assert int(jax.jit(lambda x: x + 2)(1)) == 3  # each time another function, which JAX has not traced
        return found.sought, found.kept, capfd.readouterr().err

    program_cache.begin()
    compilation_cache.reset_cache()
    assert start() == (1, 0, "")
    assert start() == (1, 1, "")
    [program] = (tmp_path / "home").rglob("*-cache")
    os.truncate(program, program.stat().st_size // 2)
    os.utime(program, (1e9, 1e9))
    sought, kept, err = start()
    assert (sought, kept) == (1, 0)
    told = f"zerojax: {tmp_path}/home/zerojax/xla: the compiled program jit__lambda cannot be read, and is compiled again ("
    assert err.startswith(told) and err.count("\n") == 1
    assert start() == (1, 1, "")


def test_the_folder_is_the_users_alone_and_holds_programs_of_any_size_for_one_kind_of_cpu(tmp_path):
    folder = tmp_path / "home" / "zerojax" / "xla"
    folder.mkdir(parents=True, mode=0o777)
    program_cache.begin()
    compilation_cache.reset_cache()
    assert int(jax.jit(lambda x: x + 3)(1)) == 4
    assert folder.stat().st_mode & 0o777 == 0o700
    [program] = folder.rglob("*-cache")
    assert str(program.parent) == jax.config.values[program_cache.FOLDER] != str(folder)
    assert jax.config.values[SHORTEST] == 0.0


@pytest.mark.parametrize(
    "settings, line",
    [
        ({program_cache.SWITCH: False}, ""),
        ({program_cache.FOLDER: ""}, ""),
        (
            {program_cache.FOLDER: "gs://bucket/x"},
            "compiled programs: gs://bucket/x (JAX_COMPILATION_CACHE_DIR moves it, ",
        ),
    ],
)
def test_what_the_user_sets_stays_and_nothing_is_made(tmp_path, settings, line):
    with runs.jax_settings(**settings):
        assert program_cache.begin().startswith(line) and (line or not program_cache.begin())
        assert {name: jax.config.values[name] for name in settings} == settings
    assert not (tmp_path / "home").exists()


def test_processes_of_several_hosts_keep_programs_only_in_a_folder_that_the_user_names(tmp_path):
    line = program_cache.begin(is_one_host=False)
    assert line.startswith(
        "compiled programs are not kept: name a folder that all hosts share by JAX_COMPILATION_CACHE_"
    )
    assert jax.config.values[program_cache.FOLDER] is None and not (tmp_path / "home").exists()
    with runs.jax_settings(**{program_cache.FOLDER: str(tmp_path / "shared")}):
        assert program_cache.begin(is_one_host=False).startswith(f"compiled programs: {tmp_path}/shared (0 B; ")


def test_a_variable_says_which_programs_are_kept(monkeypatch):
    monkeypatch.setenv(SHORTEST.upper(), "1.0")
    program_cache.begin()
    assert jax.config.values[SHORTEST] == 1.0


def test_a_folder_that_cannot_be_made_is_a_warning_and_nothing_is_kept(tmp_path):
    (tmp_path / "home").write_text("")
    line = program_cache.begin()
    assert line.startswith("warning: compiled programs are not kept: ") and str(tmp_path / "home") in line
    assert jax.jit(lambda x: x + 4)(1) == 5


def test_of_a_named_folder_that_cannot_be_written_programs_are_read(monkeypatch, tmp_path, capfd):
    named = {program_cache.FOLDER: str(tmp_path)}
    with runs.jax_settings(**named):
        monkeypatch.setattr(program_cache.os, "access", lambda path, way: not way & os.W_OK)
        line = program_cache.begin()
        warnings.warn("Error writing persistent compilation cache entry for 'jit_f': PermissionError: no", stacklevel=1)
        assert jax.config.values[program_cache.SWITCH]
    assert line.startswith(f"warning: compiled programs are read, and no others are kept: {tmp_path} cannot be written")
    assert capfd.readouterr().err == ""


def test_the_least_used_programs_go_when_the_users_folder_is_full_and_those_of_a_named_folder_stay(
    monkeypatch, tmp_path
):
    folder = tmp_path / "home" / "zerojax" / "xla"
    (folder / "x").mkdir(parents=True)
    for age, name in enumerate(("new", "old", "older")):
        (folder / "x" / name).write_bytes(bytes(1000))
        os.utime(folder / "x" / name, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(program_cache, "MOST_BYTES", 2500)
    with runs.jax_settings(**{program_cache.FOLDER: str(folder)}):
        assert program_cache.begin().startswith(f"compiled programs: {folder} (2.93 KiB; ")
    assert program_cache.begin().startswith(f"compiled programs: {folder} (1.95 KiB; ")
    assert sorted(path.name for path in (folder / "x").iterdir()) == ["new", "old"]


def test_other_warnings_are_shown_as_before(tmp_path):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        program_cache.begin()
        warnings.warn("else", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["else"]


def test_the_library_leaves_jax_to_its_user():
    """The tests' own settings come from a fixture, so a process of its own is asked."""
    names = [program_cache.FOLDER, SHORTEST, "jax_compilation_cache_max_size"]
    code = f"import jax\nbefore = [jax.config.values[name] for name in {names}]\nimport zerojax.train\n"
    done = programs.python(f"{code}assert before == [jax.config.values[name] for name in {names}]")
    assert done.returncode == 0, done.stderr


def test_programs_are_counted_while_they_are_compiled():
    jnp.zeros(3)
    with program_cache.counted() as found:
        jax.jit(lambda x: x + 5)(1)
    jax.jit(lambda x: x + 6)(1)
    assert found.xla_seconds > 0 and "of it XLA" in str(found)
    assert (found.sought, found.kept) in ((0, 0), (1, 0))
