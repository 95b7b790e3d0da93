"""Checks the lines of settings. This module tests zerojax.trainer.settings."""

import pytest

from zerojax import configs
from zerojax.trainer import settings

BASE = """
from ml_collections import config_dict
def get_config():
    c = config_dict.ConfigDict()
    c.one = 1  # beside
    # above,
    # in two lines
    c.two = "a b"
    c.three = (
        3.0  # inside
    )

    # of nothing

    # a rule;
    c.four = ()  # and beside
    c.group = config_dict.ConfigDict()  # of settings
    c.group.five = True
    return c
"""


def flat(raw, prefix=""):
    """Yields (place, value) of every setting in nested dicts."""
    for name, value in raw.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def test_every_setting_and_every_group_has_its_default_and_a_line():
    found = settings.table()
    assert not [place for place, setting in found.items() if not setting.line]
    assert {p: s.default for p, s in found.items() if s.default is not None} == dict(
        flat(configs.get("base").to_dict())
    )


def test_a_line_is_the_comments_beside_and_above_a_setting(monkeypatch, tmp_path):
    (tmp_path / "base.py").write_text(BASE)
    names: dict = {}
    exec(BASE, names)
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    monkeypatch.setattr(configs, "get", lambda name: names["get_config"]())
    found = settings.table.__wrapped__()
    assert {place: (setting.line, setting.default) for place, setting in found.items()} == {
        "one": ("beside", 1),
        "two": ("above, in two lines", "a b"),
        "three": ("inside", 3.0),
        "four": ("a rule; and beside", ()),
        "group": ("of settings", None),
        "group.five": ("", True),
    }


@pytest.mark.parametrize("width", [60, 140])
def test_the_list_names_every_setting_once_and_fits_the_terminal(width):
    lines = settings.text(width).splitlines()
    shown = [line.split("=")[0].strip() for line in lines if line.startswith("  --config.")]
    assert shown == [f"--config.{place}" for place, setting in settings.table().items() if setting.default is not None]
    assert all(len(line) <= width for line in lines)
