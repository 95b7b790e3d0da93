import pytest
from absl import flags

import zerojax
from zerojax.trainer import command


def test_a_config_that_is_not_there_is_named_before_the_flags_are_read():
    with pytest.raises(zerojax.UserError, match=r"--config nowhere.py: there is no such file"):
        command.parse(["program", "--config", "nowhere.py"])
    with pytest.raises(zerojax.UserError, match=r"--config nowhere.py: there is no such file"):
        command.parse(["program", "--config=nowhere.py"])


def test_a_command_line_without_a_config_says_how_to_give_one():
    with pytest.raises(zerojax.UserError, match="--config: is missing"):
        command.parse(["program"])


def test_an_unknown_flag_is_named():
    with pytest.raises(zerojax.UserError, match="no_such_flag"):
        command.parse(["program", "--no_such_flag=1"])
    assert "no_such_flag" not in flags.FLAGS
