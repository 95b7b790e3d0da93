import functools
import json
import re

import runs

from zerojax import display
from zerojax.plan import report as plan_report
from zerojax.trainer import plans


@functools.cache
def plan():
    return plans.plan_config(runs.config(zero__stage=3, model__vocab_size=320), "cpu", "1x8")


def test_json_survives_the_trip_and_says_the_peak():
    read = json.loads(json.dumps(plan_report.as_json(plan()), allow_nan=False))
    assert (read["peak_bytes"], read["devices"], read["stage"]) == (plan().peak, 8, 3)
    assert read["schema"] == plan_report.SCHEMA


def test_every_field_of_the_json_is_documented_and_no_other():
    page = (runs.ROOT / "docs/plan.md").read_text().partition("## JSON")[2]
    first_cells = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    documented = {name.removesuffix("[]") for name in re.findall(r"`([^`]+)`", first_cells)}
    assert documented | {"schema"} == set(plan_report.as_json(plan()))


def test_leaves_and_temporaries_are_listed_from_the_largest():
    read = plan_report.as_json(plan())
    for rows in (read["largest_leaves"], read["largest_temporaries"]):
        sizes = [row["bytes"] for row in rows]
        assert sizes == sorted(sizes, reverse=True) and len(sizes) <= plan_report.LARGEST


def test_the_text_shows_every_role_the_peak_and_the_findings():
    text = plan_report.text(plan())
    for row in plan().memory:
        assert row.role in text
    assert display.human(plan().peak) in text
    assert "no findings" in text or all(finding.rule in text for finding in plan().findings)


def test_the_picture_is_a_png(tmp_path):
    plan_report.draw(plan(), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
