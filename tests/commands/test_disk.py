"""Checks the command `zerojax disk`. This module tests zerojax.commands.disk."""

import functools
import json

import pytest

from zerojax.commands import disk


@pytest.fixture
def run(run_main):
    """Returns a function that runs the command, and returns its status, output and error."""
    return functools.partial(run_main, disk)


SMALL = ("--size=1M", "--chunk=256K", "--threads=1,2")


def test_rates_are_a_table_or_json_and_nothing_is_left_behind(run, tmp_path):
    status, out, _ = run(tmp_path, *SMALL)
    assert (
        status == 0
        and "both GB/s" in out
        and out.count("256.00 KiB") == 3
        and "a step" not in out.split("fastest for a step")[1]
    )
    status, out, _ = run(tmp_path, *SMALL, "--state=96GiB", "--json")
    found = json.loads(out)
    assert status == 0 and [row["threads"] for row in found["rates"]] == [1, 2] and found["state_bytes"] == 96 << 30
    both = 2 * found["state_bytes"] / found["best"]["both"]
    assert found["seconds_a_step"] == pytest.approx(max(both, found["least_seconds_a_step"]))
    assert not list(tmp_path.iterdir())


def test_the_optimizer_state_of_a_config_is_counted(run, tmp_path):
    status, out, _ = run(tmp_path, *SMALL, "--config=configs/zero3.py", "--json")
    assert status == 0 and json.loads(out)["state_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size=much"], "'much' is no size; write 8M or 4GiB"),
        (["--chunk=3K"], "3072 bytes is not a multiple of 4096"),
        (["--threads=0"], "'0' is no list of numbers"),
        (["--size=1M", "--chunk=1M"], "--size: is 1048576 bytes, and must hold two chunks"),
        (["--size=2048T"], "are needed there, and its disk has"),
        (["--state=1G", "--config=configs/zero3.py"], "--state and --config: both say"),
        (["--config=nowhere.py", *SMALL], "--config nowhere.py: there is no such file"),
        (["--what"], "unrecognized arguments: --what; --help lists"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(run, tmp_path, arguments, words):
    status, out, err = run(tmp_path, *arguments)
    assert status == 2 and out == "" and err.count("\n") == 1 and words in err


def test_sizes_are_read_as_people_write_them():
    assert [disk.size_of(word) for word in ("4096", "8M", "1.5k", "4GiB", "2 TB")] == [
        4096,
        8 << 20,
        1536,
        4 << 30,
        2 << 40,
    ]
