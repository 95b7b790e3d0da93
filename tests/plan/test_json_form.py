import json
import re

import runs

from zerojax.plan import json_form, step_plan


def test_json_round_trips_and_has_the_peak(plan):
    read = json.loads(json.dumps(json_form.as_json(plan), allow_nan=False))
    assert (read["peak_bytes"], read["devices"], read["stage"]) == (plan.peak, 8, 3)
    assert read["schema"] == json_form.SCHEMA


def test_every_field_of_the_json_is_documented_and_no_other(plan):
    page = (runs.ROOT / "docs/plan.md").read_text().partition("## JSON")[2]
    first_cells = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    documented = {name.removesuffix("[]") for name in re.findall(r"`([^`]+)`", first_cells)}
    assert documented | {"schema"} == set(json_form.as_json(plan)) | {"cluster", "cost"}, "the command line adds two"


def test_leaves_and_temporaries_are_listed_from_the_largest(plan):
    read = json_form.as_json(plan)
    for rows in (read["largest_leaves"], read["largest_temporaries"]):
        sizes = [row["bytes"] for row in rows]
        assert sizes == sorted(sizes, reverse=True) and len(sizes) <= step_plan.LARGEST
