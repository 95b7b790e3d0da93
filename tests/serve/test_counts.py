"""Checks the text of the counts. This module tests zerojax.serve.counts."""

import re

from zerojax.serve import counts

GAUGES = {"running": 1, "waiting": 0, "slots": 3, "draining": False}


def test_counts_are_in_the_text_format_and_buckets_count_all_that_is_below():
    made = counts.Counts()
    made.add("requests_total", route="/health", status="200")
    made.add("requests_total", route="/health", status="200")
    made.add("generated_tokens_total", 5)
    for seconds in (0.01, 0.3, 1000):
        made.time("request_seconds", seconds)
    text = made.text(GAUGES)
    assert 'zerojax_requests_total{route="/health",status="200"} 2\n' in text
    assert (
        "zerojax_generated_tokens_total 5\n" in text and "zerojax_slots 3\n" in text and "zerojax_draining 0\n" in text
    )
    found = dict(re.findall(r'request_seconds_bucket\{le="([^"]+)"\} (\d+)', text))
    assert (found["0.01"], found["0.25"], found["0.5"], found["+Inf"]) == ("1", "1", "2", "3")
    assert "zerojax_request_seconds_count 3\n" in text and "zerojax_request_seconds_sum 1000.31" in text
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) zerojax_\w+ .+|zerojax_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [\d.]+', line)
