import dataclasses

import pytest

from zerojax import display
from zerojax.clock import rates, walk
from zerojax.plan import json_form
from zerojax.plan import report as plan_report


def test_the_text_shows_every_role_the_peak_and_the_findings(plan):
    text = plan_report.text(plan)
    for row in plan.memory:
        assert row.role in text
    assert display.human(plan.peak) in text
    assert "no findings" in text or all(finding.rule in text for finding in plan.findings)


@pytest.mark.parametrize("target, error", [("h200", "of the measured step"), ("b200", "no step was measured on")])
def test_the_text_tells_the_foretold_time_its_parts_and_its_error(plan, target, error):
    parts = dict.fromkeys(walk.PARTS, 0.0) | {"matmul": 1.5, walk.EXPOSED: 0.5}
    found = walk.StepTime(2.0, parts, {"collective": 0.75})
    known = dataclasses.replace(plan, foretold=found, rates=rates.of(target), model_seconds=1.0)
    text = plan_report.text(known)
    rate = f"{plan.tokens / 2 / plan.devices:,.0f} tokens/s/device"
    assert f"a step should take 2,000.0 ms, {rate}, 50.0% MFU" in text and error in text
    assert "exposed collectives" in text and "collective 750.0 ms" in text and "exposed host copies" not in text
    told = json_form.as_json(known)["foretold"]
    assert (
        told["mfu"] == 0.5
        and sum(told["parts"].values()) == told["seconds"]
        and told["errors"] == rates.of(target).errors
    )
    assert json_form.as_json(plan)["foretold"] is None
