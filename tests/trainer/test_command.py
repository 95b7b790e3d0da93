import sys

import pytest
import runs
from absl import flags

import zerojax
from zerojax.trainer import command


def test_a_config_that_is_not_there_is_named_before_the_flags_are_read():
    with pytest.raises(zerojax.UserError, match=r"--config nowhere.py: there is no such file"):
        command.parse(["program", "--config", "nowhere.py"])
    with pytest.raises(zerojax.UserError, match=r"--config nowhere.py: there is no such file"):
        command.parse(["program", "--config=nowhere.py"])
    with pytest.raises(zerojax.UserError, match=r"there is no such file; did you mean configs/base.py\?"):
        command.parse(["program", "--config=configs/base"])
    with pytest.raises(
        zerojax.UserError, match=r"--config a/zero3.py: there is no such file; did you mean --config zero3\?"
    ):
        command.parse(["program", "--config=a/zero3.py"])


def test_an_unknown_flag_is_named():
    with pytest.raises(zerojax.UserError, match="no_such_flag"):
        command.parse(["program", "--no_such_flag=1"])
    assert "no_such_flag" not in flags.FLAGS


@pytest.fixture
def parsed(monkeypatch):
    """Reads a command line as if it were the first of this process."""

    def parse(*arguments):
        runs.forget_flags()
        argv = ["program", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        return command.parse(argv)

    yield parse
    parse("--config=base")


def test_a_command_line_without_a_config_says_how_to_give_one(parsed):
    with pytest.raises(zerojax.UserError, match="--config: is missing"):
        parsed()


@pytest.mark.parametrize("config", [["--config", "zero1"], ["--config=zero1"]], ids=" ".join)
def test_a_config_of_ours_has_a_name_and_a_file_or_a_folder_of_that_name_hides_none(
    parsed, config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero1").mkdir()
    assert parsed(*config).zero.stage == 1
    (tmp_path / "zero1").rmdir()
    (tmp_path / "zero1").write_text("from zerojax.configs import zero2\nget_config = zero2.get_config\n")
    assert parsed(*config).zero.stage == 2


@pytest.mark.parametrize(
    "flag, line",
    [
        (
            "--config.zero.stage=two",
            "config.zero.stage: must be one of 0, 1, 2, 3, and is 'two'; set --config.zero.stage=...",
        ),
        ("--config.steps=1e400", "config.steps: must be a whole number, and is '1e400'"),
        ("--config.optimizer.b1=x", "config.optimizer.b1: must be a number, and is 'x'"),
        (
            "--config.mesh=3",
            "config.mesh: must be a group of settings (pipe, replica, data, context, model, expert), and is '3'; "
            "set one of them, such as --config.mesh.pipe=...",
        ),
        ("--config.seed.x=3", "config.seed.x: unknown config key; config.seed is a whole number, not a group"),
        (
            "--config.mesh.lr=3",
            "--config.mesh.lr=3: unknown config key 'lr'; config.mesh is a group of settings (pipe, replica, data, context, model, expert)",
        ),
        ("--config.lr=3", "--config.lr=3: unknown config key 'lr'; zerojax train --help lists every key"),
        ("--config.stepz=3", "--config.stepz=3: unknown config key 'stepz'; did you mean 'steps'?"),
    ],
)
def test_a_value_that_cannot_be_read_is_told_in_the_words_of_the_config(parsed, flag, line):
    with pytest.raises(zerojax.UserError) as caught:
        parsed("--config=configs/base.py", flag)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("flags", "labels"),
    {
        "nothing": (["--config.data.labels="], ()),
        "None": (["--config.data.labels=None"], ()),
        "None in a word of its own": (["--config.data.labels", "None"], ()),
        "one text": (["--config.data.labels=bad"], ("bad",)),
        "texts": (["--config.data.labels=very bad, don't know,3"], ("very bad", "don't know", "3")),
        "a tuple": (["--config.data.labels=('bad', 'good,')"], ("bad", "good,")),
        "a list": (["--config.data.labels", '["bad"]'], ("bad",)),
        "an empty list": (["--config.data.labels=[]"], ()),
        "several flags": (["--config.data.labels=a", "--config.data.labels=b,c"], ("a", "b", "c")),
        "not given": ([], ("one",)),
    }.values(),
)  # fmt: skip
def test_a_list_may_be_given_in_the_usual_ways(parsed, tmp_path, flags, labels):
    lines = "from zerojax.configs import base\ndef get_config():\n    c = base.get_config()\n    c.data.labels = ('one',)\n    return c\n"
    (tmp_path / "own.py").write_text(lines)
    assert parsed(f"--config={tmp_path}/own.py", *flags).data.labels == labels


@pytest.mark.parametrize(
    "words", [["--config.init_from="], ["--config.init_from=None"], ["--config.init_from", "None"]]
)
def test_a_text_that_may_be_empty_can_be_emptied(parsed, words):
    assert parsed("--config=lora_tiny", *words).init_from == ""


@pytest.mark.parametrize(
    ("flag", "words"),
    {
        "a list that is none": ("--config.data.labels=(a", "config.data.labels: must be texts with commas, or a tuple or list"),
        "None for a number": ("--config.steps=None", "config.steps: must be a whole number, and is 'None'"),
    }.values(),
)  # fmt: skip
def test_a_value_that_no_list_or_no_nothing_can_be_is_refused(parsed, flag, words):
    with pytest.raises(zerojax.UserError) as caught:
        parsed("--config=base", flag)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    "text, words",
    [
        ("def get_config(a):\n    return 1\n", "get_config must return an ml_collections.ConfigDict"),
        ("def get_config():\n    raise ValueError('a\\nb')\n", "own.py:2: ValueError: a b; fix the config file"),
        ("import sys\ndef get_config():\n    sys.exit(3)\n", "--config: the file ends the program with status 3"),
        ("def get_config():\n    return []\n", "get_config must return an ml_collections.ConfigDict"),
    ],
    ids=["arguments", "two lines", "exit", "list"],
)
def test_a_config_file_that_fails_is_told_in_one_line(parsed, tmp_path, text, words):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(zerojax.UserError) as caught:
        parsed(f"--config={tmp_path}/own.py", "--config.steps=3")
    assert words in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    "words", [["--flagfile=/dev/zero"], ["-flagfile", "/dev/zero"], ["--flagfile=gone"], ["--flagfile="]]
)
def test_a_file_of_flags_that_is_none_is_refused_before_it_is_read(parsed, words):
    with pytest.raises(zerojax.UserError, match=r"^--flagfile"):
        parsed("--config=base", *words)


def test_a_file_of_flags_is_read(parsed, tmp_path):
    (tmp_path / "flags").write_text("--config.steps=7\n")
    assert parsed("--config=base", f"--flagfile={tmp_path}/flags").steps == 7


@pytest.mark.parametrize("body", ["pass", "return 'x'", "return 3", "yield 1"])
def test_what_is_no_config_is_told_without_an_override_too(parsed, tmp_path, body):
    (tmp_path / "own.py").write_text(f"def get_config():\n    {body}\n")
    with pytest.raises(
        zerojax.UserError, match=r"^--config: get_config must return an ml_collections.ConfigDict, .*; fix the"
    ):
        parsed(f"--config={tmp_path}/own.py")


@pytest.mark.parametrize("config", [["--config", "configs/base.py"], ["--config=configs/base.py"]], ids=" ".join)
def test_a_setting_may_come_before_the_config(parsed, config):
    assert parsed("--config.steps=3", *config, "--config.seed=5").to_dict().items() >= {"steps": 3, "seed": 5}.items()


@pytest.mark.parametrize(
    "words, asks", [(["--help"], True), (["--helpfull"], True), (["-h"], True), (["--config=a"], False), ([], False)]
)
def test_the_help_is_told_from_a_run_which_resumes(words, asks):
    assert command.asks_help(["-h", *words]) == asks


@pytest.mark.parametrize(
    "words, accum",
    [
        (["--config.global_batch_size=256", "--config.micro_batch_size=16"], 0),
        (["--config.micro_batch_size", "8"], 0),
        (["--config.micro_batch_size=8", "--config.grad_accum=1"], 1),
        (["--config.micro_batch_size=8", "--config.global_batch_size=0"], 1),
        (["--config.global_batch_size=64"], 1),
        ([], 1),
    ],
)
def test_passes_follow_from_batch_and_micro_batch_unless_they_are_given(parsed, words, accum):
    assert parsed("--config=base", *words).grad_accum == accum
