from zerojax import display
from zerojax.plan import report as plan_report


def test_the_text_shows_every_role_the_peak_and_the_findings(plan):
    text = plan_report.text(plan)
    for row in plan.memory:
        assert row.role in text
    assert display.human(plan.peak) in text
    assert "no findings" in text or all(finding.rule in text for finding in plan.findings)
