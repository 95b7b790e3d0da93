"""Checks written configs. This module tests zerojax.migration.config_file."""

from zerojax.migration import config_file


def test_settings_become_lines_grouped_and_commented():
    settings = {"zero.stage": 2, "optimizer.name": "adamw", "zero.min_size": 7, "steps": 3}
    text = config_file.text(
        settings, {"zero.stage": ("zero_optimization.stage",)}, origin="a.json", path="configs/a.py"
    )
    lines = [line.strip() for line in text.splitlines() if line.startswith("    c.")]
    assert lines == [
        "c.steps = 3  # implied",
        "c.zero.stage = 2  # zero_optimization.stage",
        "c.zero.min_size = 7  # implied",
        'c.optimizer.name = "adamw"  # implied',
    ]
    names = {}
    exec(text, names)
    assert names["get_config"]().zero.min_size == 7


def test_no_file_name_can_end_the_docstring():
    text = config_file.text({}, {}, origin='x""" + 1\n.json', path="a\\b.py")
    names = {}
    exec(text, names)
    assert "x''' + 1 .json" in names["__doc__"] and "a/b.py" in names["__doc__"]
