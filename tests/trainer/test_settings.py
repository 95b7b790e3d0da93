"""Checks the declarations of settings, and that what follows from them does. This module tests zerojax.trainer.settings."""

import pathlib
import re

import pytest

from zerojax import configs
from zerojax.data.pairs import tasks
from zerojax.optim import registry
from zerojax.trainer import settings

ROOT = pathlib.Path(__file__).parents[2]
FIELDS = {place: found for place, found in settings.table().items() if found.hint in settings.KINDS}
NAMED = re.compile(r"\bconfig\.(\w+(?:\.\w+)?)(?![\w.*(])")


def flat(raw, prefix=""):
    """Yields (place, value) of every setting in nested dicts."""
    for name, value in raw.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def test_every_setting_and_every_group_has_a_line_and_the_base_its_default():
    assert not [place for place, found in settings.table().items() if not found.line]
    assert dict(flat(configs.get("base").to_dict())) == {place: found.default for place, found in FIELDS.items()}


def test_a_default_has_its_type_and_is_allowed_and_every_number_has_a_range():
    for place, found in FIELDS.items():
        assert type(found.default) is found.hint, place
        if isinstance(found.values, settings.Range):
            assert found.hint in (int, float) and not found.values.flaw(found.default), place
        else:
            assert found.choices or found.hint not in (int, float), place
            assert not found.choices or found.default in found.choices, place


@pytest.mark.parametrize("width", [60, 140])
def test_the_list_names_every_setting_once_and_fits_the_terminal(width):
    lines = settings.text(width).splitlines()
    shown = [line.split("=")[0].strip() for line in lines if line.startswith("  --config.")]
    assert shown == [f"--config.{place}" for place in FIELDS]
    assert all(len(line) <= width for line in lines)


def test_the_pages_name_settings_that_there_are():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").glob("*.py")]
    named = {(page.name, place) for page in pages for place in NAMED.findall(page.read_text())}
    known = {place.partition(".")[0] for place in settings.table()}
    wrong = [one for one in named if one[1] not in settings.table() and one[1].partition(".")[0] in known]
    assert len(named) > 100 and not wrong


def test_the_table_of_derived_settings_has_their_defaults():
    page = (ROOT / "docs" / "configuration.md").read_text()
    section = page.partition("## Fields that are derived")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(config\..*?)` \| (.*?) \|", section, re.MULTILINE)
    assert len(rows) > 10
    for places, values in rows[1:]:  # the first is of one among three
        for place, value in zip(places.split("`, `"), values.split(", "), strict=True):
            default = settings.table()[place.removeprefix("config.")].default
            assert default == (type(default)() if value == "empty" else type(default)(value.strip("`"))), place


def test_what_a_task_or_an_optimizer_reads_is_a_setting_and_no_other_reads_it_in_silence():
    of_tasks = {place for task in tasks.TASKS.values() for place in task.reads}
    assert of_tasks <= settings.table().keys()
    assert {f"optimizer.{name}" for name in registry.READ_BY_SOME} <= settings.table().keys()
    for name, task in tasks.TASKS.items():
        config = settings.changed(settings.Config(), {"data.task": name})
        told = {place for place in FIELDS if settings.why_unread(config, place).endswith(f"{name} does not read it")}
        groups = {
            place for place in FIELDS if any(f"{place}.".startswith(f"{own}.") for own in of_tasks - {*task.reads})
        }
        assert told == groups and told


def test_settings_are_changed_at_any_depth_and_the_others_stay():
    before = settings.Config()
    after = settings.changed(
        before, {"steps": 3, "zero.stage": 1, "zero.min_size": 5, "mesh": settings.MeshSettings(2)}
    )
    changed = {place for place in FIELDS if settings.lookup(after, place) != settings.lookup(before, place)}
    assert changed == {"steps", "zero.stage", "zero.min_size", "mesh.pipe"}
    assert (after.steps, after.zero.stage, after.zero.min_size, after.mesh.pipe) == (3, 1, 5, 2)
