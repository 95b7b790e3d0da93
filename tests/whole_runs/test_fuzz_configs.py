"""Runs the fuzzer with a fixed seed, and checks its judge. This module tests tests/support/fuzz_configs.py."""

import os
import re
import subprocess
import sys

import fuzz_configs
import pytest
import runs

from zerojax.errors import UserError

SEED, CASES, TRIED = 2026, 400, 8  # cases in all, and those that are run here
LIMIT = 400  # seconds, on a machine that other tests share; alone it takes a tenth


def test_wrong_configs_paths_and_files_end_in_no_traceback():
    """In a process of its own, which an abort in C++ would end."""
    command = [sys.executable, "tests/support/fuzz_configs.py", f"--seed={SEED}", f"--cases={TRIED}"]
    done = subprocess.run(command, cwd=runs.ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counted = {end: int(count) for count, end in re.findall(r"(\d+) (passed|refused)", done.stdout)}
    assert sum(counted.values()) == TRIED and min(counted.values()) > TRIED // 10  # neither end is that of nearly all


def test_every_kind_of_case_and_every_field_is_tried():
    cases = [fuzz_configs.make(SEED, number) for number in range(CASES)]
    assert {case.run.__qualname__.partition(".")[0] for case in cases} >= {
        "by_flag",
        "by_workdir",
        "by_config_file",
        "by_data",
        "by_training",
    }
    tried = {place for case in cases for place in case.named}
    assert 20 * len(set(fuzz_configs.PLACES) - tried) < len(fuzz_configs.PLACES)


@pytest.mark.parametrize(
    "error, why",
    [
        (None, ""),
        (UserError("config.zero.stage: must be one of 0"), ""),
        (UserError("config.zero: 'stage' is missing"), ""),
        (UserError("config.seed: must be a whole number"), "names nothing that was changed"),
        (UserError("config.zero.stage: Traceback (most recent call last)"), "not one line"),
        (KeyError("zero.stage"), "traceback"),
        (SystemExit(0), "traceback"),
        (fuzz_configs.Hang(), "hang"),
    ],
)
def test_the_judge_tells_a_clear_line_from_the_rest(error, why):
    case = fuzz_configs.Case("", ("zero.stage",), lambda folder: None)
    assert fuzz_configs.fault(case, error) == why
