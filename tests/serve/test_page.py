"""Checks what the page loads; tests/commands/test_serve.py asks by it in a browser. This module tests zerojax.serve.page."""

import re

from zerojax.serve import page


def test_the_page_loads_nothing_from_elsewhere_and_its_policy_says_so():
    assert not re.findall(r"https?://|src=|@import|url\(", page.HTML)
    assert page.POLICY.startswith("default-src 'none'") and page.POLICY.count("sha256-") == 2
    assert not re.findall(r"\son\w+=|style=", page.HTML)  # which the policy forbids
