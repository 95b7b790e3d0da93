import json
import os

import programs
import pytest
import rough
import runs

SMALL = [
    "--config=configs/base.py",
    "--config.model.preset=test",
    "--config.model.num_layers=1",
    "--config.model.vocab_size=320",
    "--config.seq_len=32",
    "--config.global_batch_size=8",
]
NO_ROOM = """
import jax
from zerojax.plan import __main__ as command
from zerojax.trainer import plans

def compile_step(*_, **__):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 594.90G of 95.74G hbm.")

plans.plan_config = compile_step
command.main()
"""
LOST = 'import os\nos.dup2(os.open("/dev/full", os.O_WRONLY), 1)\n'
BAD = {
    "target: must be one of": ["--target=h300"],
    "topology": ["--target=cpu", "--topology=4by4"],
    "--most_compiles: only --search uses it": ["--target=cpu", "--topology=1x4", "--most_compiles=3"],
    "memory is unknown": ["--target=cpu", "--topology=1x8", "--search"],
    "--axes: needs a decoder of 10 or more equal layers": ["--target=cpu", "--topology=1x8", "--axes"],
    "--topology: --serve uses it for GPUs alone; omit it": ["--target=v5p", "--topology=4x4x8", "--serve"],
    "--topology: is 1x8, and --serve plans for mesh.model=2 GPUs": [
        "--target=h200",
        "--topology=1x8",
        "--serve",
        "--config.mesh.model=2",
    ],
    "mesh.model: is 16, and a host has 8 GPUs unless you say otherwise; say hosts x GPUs, such as --topology=2x8": [
        "--target=h200",
        "--serve",
        "--config.mesh.model=16",
    ],
    "say hosts x GPUs, such as --topology=3x3": ["--target=h200", "--serve", "--config.mesh.model=9"],
    "say hosts x GPUs, such as --topology=4x8": ["--target=h200", "--serve", "--config.mesh.model=32"],
    "--slots: no time is foretold: the clock has no rates of v5p, as it has with --target h200; omit --slots": [
        "--target=v5p",
        "--serve",
        "--slots=4",
    ],
    "--prompt: no time is foretold: a text of seq_len=1 tokens has no room": [
        "--target=h200",
        "--serve",
        "--prompt=1",
        "--config.seq_len=1",
    ],
    "--format: only --serve uses it": ["--target=cpu", "--topology=1x4", "--format=int8"],
    "--picture plan.gif9: no picture is written as .gif9; name a PNG file": [
        "--target=cpu",
        "--topology=1x8",
        "--picture=plan.gif9",
    ],
    "--rates: is empty; name a file": ["--target=cpu", "--topology=1x8", "--rates="],
    "config.zero.stage": ["--target=cpu", "--topology=1x8", "--config.zero.stage=4"],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Returns how the commands ended: the first with its picture, the one without memory, and those of BAD, in their order."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "no_room.py").write_text(NO_ROOM)
    (folder / "broken.py").write_text(NO_ROOM.replace("RESOURCE_EXHAUSTED: Used", "INTERNAL: no tile\\nfits"))
    (folder / "lost.py").write_text(LOST + NO_ROOM)
    picture = folder / "plan.png"
    first = ["zerojax.plan", *SMALL, "--target=cpu", "--topology=1x4"]
    commands = [
        [*first, "--json", f"--picture={picture}"],
        ["no_room", *first[1:]],
        ["broken", *first[1:]],
        *(["zerojax.plan", *SMALL, *arguments] for arguments in BAD.values()),
        ["lost", *first[1:]],
        ["zerojax.plan", *SMALL, "--target=v5p", "--serve", "--format=int8", "--config.mesh.model=2", "--json"],
    ]
    path = os.pathsep.join([str(runs.ROOT), str(folder)])
    return picture, programs.modules(
        commands, PYTHONPATH=path, XLA_FLAGS=rough.XLA_FLAGS, **rough.JAX, JAX_PLATFORMS="cpu"
    )


def test_the_command_prints_json_and_draws(ended):
    picture, (done, *_) = ended
    assert done.status == 0, done.err
    assert json.loads(done.out)["mesh"] == {"replica": 1, "data": 4, "context": 1, "model": 1}
    assert picture.exists()


def test_serving_is_bounded_without_rates_or_a_compiler(ended):
    done = ended[1][-1]
    assert done.status == 0 and done.err == "", done.err
    found = json.loads(done.out)
    assert found["served"]["devices"] == 2 and found["largest_batch"] == found["batches"][-1]["batch"] > 1000
    assert (
        found["foretold"] is None
        and found["why_not_foretold"] == "the clock has no rates of v5p, as it has with --target h200"
    )


def test_a_step_that_the_compiler_refuses_for_its_memory_is_an_answer(ended):
    done = ended[1][1]
    assert done.status == 0 and done.err == "", done.err
    assert done.out.startswith("compiling the step for cpu, which may take minutes\n")
    assert "Bytes on each device: stage 3, data=4" in done.out
    assert "does not fit on cpu: the compiler needs 594.90G of 95.74G of hbm; --search looks for" in done.out


def test_a_step_that_the_compiler_fails_on_is_one_line(ended):
    done = ended[1][2]
    assert done.status == 2 and done.err.count("\n") == 1, done.err
    assert "--target cpu: XLA cannot compile this step; plan another target" in done.err and "no tile fits" in done.err


def test_a_plan_that_cannot_be_written_is_one_line_and_status_2(ended):
    done = ended[1][-2]
    line = "zerojax: stdout cannot be written (No space left on device); make room, or write elsewhere\n"
    assert (done.status, done.err) == (2, line)


@pytest.mark.parametrize("words", BAD)
def test_bad_input_ends_in_one_line_and_status_2(words, ended):
    done = ended[1][3 + list(BAD).index(words)]
    assert done.status == 2 and done.err.count("\n") == 1, done.err
    assert words in done.err
