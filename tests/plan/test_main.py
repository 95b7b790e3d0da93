import json
import os
import subprocess
import sys

import pytest
import rough
import runs

SMALL = [
    "--config=configs/base.py",
    "--config.model.preset=test",
    "--config.model.num_layers=1",
    "--config.model.vocab_size=320",
]


def run(*arguments, program=("-m", "zerojax.plan")):
    command = [
        sys.executable,
        *program,
        *SMALL,
        "--config.seq_len=32",
        "--config.global_batch_size=8",
        *arguments,
    ]
    environ = {**os.environ, "XLA_FLAGS": rough.XLA_FLAGS}
    return subprocess.run(command, capture_output=True, text=True, cwd=runs.ROOT, env=environ, timeout=runs.LIMIT)


def test_the_command_prints_json_and_draws(tmp_path):
    done = run("--target=cpu", "--topology=1x4", "--json", f"--picture={tmp_path}/plan.png")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mesh"] == {"replica": 1, "data": 4, "model": 1}
    assert (tmp_path / "plan.png").exists()


NO_ROOM = """
import jax
from zerojax.plan import __main__ as command
from zerojax.trainer import plans

def compile_step(*_, **__):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 594.90G of 95.74G hbm.")

plans.plan_config = compile_step
command.main()
"""


def test_a_step_that_the_compiler_refuses_for_its_memory_is_an_answer():
    done = run("--target=cpu", "--topology=1x4", program=("-c", NO_ROOM))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "Bytes on each device: stage 3, data=4" in done.stdout
    assert "does not fit on cpu: the compiler needs 594.90G of 95.74G of hbm; --search looks for" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target=h300"], "target: must be one of"),
        (["--target=cpu", "--topology=4by4"], "topology"),
        (["--target=cpu", "--topology=1x4", "--most_compiles=3"], "--most_compiles: only --search uses it"),
        (["--target=cpu", "--topology=1x8", "--search"], "memory is unknown"),
        (["--target=cpu", "--topology=1x8", "--config.zero.stage=4"], "config.zero.stage"),
    ],
)
def test_bad_input_ends_in_one_line_and_status_2(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr
