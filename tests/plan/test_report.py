import dataclasses

import pytest

import zerojax
from zerojax import display
from zerojax.clock import rates, walk
from zerojax.plan import json_form, step_plan, targets
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


def test_a_price_makes_the_cost_of_a_step_and_of_tokens(plan):
    known = dataclasses.replace(plan, foretold=walk.StepTime(3.6, {}, {}), tokens=10**6)
    assert plan_report.cost(known, 2.5) == pytest.approx(
        {"step": 0.0025 * plan.devices, "billion_tokens": 2.5 * plan.devices}
    )
    assert f"At 2.5 a GPU and hour: {0.0025 * plan.devices:,.4f} a step" in plan_report.cost_line(known, 2.5)
    with pytest.raises(zerojax.UserError, match="--price_per_gpu_hour: the time of a step is unknown"):
        plan_report.cost(plan, 2.5)


def test_caches_of_an_engine_count_in_the_peak_of_a_step_and_copies_while_answers_are_drawn(plan):
    def told(weights, caches, devices=0):
        known = dataclasses.replace(plan, rollouts=step_plan.RolloutDevices(devices, 8, weights, caches, plan.peak))
        return plan_report.verdict(known), plan_report.text(known), json_form.as_json(known)["peak_bytes"]

    line, text, peak = told(0, 3 << 20)
    assert peak == plan.peak + (3 << 20) and line.startswith(f"peak {display.human(peak)} on each device;")
    assert "rollouts: each device holds" in text and "of 8 answers 3.00 MiB, which stay during the step" in text
    line, _, peak = told(5 << 20, 3 << 20)
    assert peak == plan.peak + (8 << 20)
    assert (
        f"{display.human(peak)} on each device while answers are drawn, {display.human(peak - (5 << 20))} in a step"
        in line
    )
    known = dataclasses.replace(plan, beside=7 << 20)  # a teacher
    assert known.in_step == known.most == plan.peak + (7 << 20)
    assert "models that are read and not trained take 7.00 MiB on each device" in plan_report.text(known)
    both = dataclasses.replace(known, rollouts=step_plan.RolloutDevices(0, 8, 5 << 20, 3 << 20, plan.peak))
    assert both.most == plan.peak + (15 << 20)
    h200 = dataclasses.replace(both, target=targets.get("h200"))
    refused = dataclasses.replace(h200, rollouts=both.rollouts._replace(refused="config.mesh.expert: is 2, so"))
    assert h200.fits and not refused.fits and "rollouts: config.mesh.expert: is 2, so" in plan_report.text(refused)
    line, text, peak = told(5 << 20, 3 << 20, devices=1)
    assert peak == plan.peak and "the device that draws answers holds" in text and "stay" not in text
