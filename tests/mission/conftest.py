"""Makes users in empty folders, and the tiny model that their jobs begin with. This module holds the fixtures of these tests."""

import fcntl

import pytest
import users


@pytest.fixture
def user(tmp_path, commands, cache_dir):
    """Returns a user in an empty folder."""
    return users.User(tmp_path, commands, cache_dir)


@pytest.fixture(scope="session")
def pretrained(commands, compiled_dir):
    """Returns the folder of the run of configs/bart_tiny.py in fewer steps and layers, unevaluated, which all test workers share."""
    folder = compiled_dir.parent / "bart_tiny"
    with open(compiled_dir.parent / "bart_tiny.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "export").exists():
            users.User(folder.parent, commands, compiled_dir).train(
                "bart_tiny",
                folder.name,
                "--config.steps=24",
                "--config.log_every=8",
                "--config.model.num_layers=1",
                "--config.data.eval_split=",
            )
    return folder


@pytest.fixture
def tuner(user, pretrained):
    """Returns a user whose folder holds the run runs/bart_tiny."""
    return with_pretrained(user, pretrained)


@pytest.fixture(scope="module")
def resident(commands, pretrained, compiled_dir, tmp_path_factory):
    """Returns f(FLAG, ...): the folder and the results of `zerojax train --config configs/lora_tiny.py` without offload, once for each."""
    found = {}

    def run(*flags):
        if flags not in found:
            user = users.User(tmp_path_factory.mktemp("resident"), commands, compiled_dir)
            with_pretrained(user, pretrained)
            found[flags] = user, user.train("lora_tiny", "runs/lora", *flags)
        return found[flags]

    return run


def with_pretrained(user, pretrained):
    (user.folder / "runs").mkdir()
    (user.folder / "runs" / "bart_tiny").symlink_to(pretrained)
    return user
