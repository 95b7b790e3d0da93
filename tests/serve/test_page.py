"""Checks the page, in a browser where one is installed. This module tests zerojax.serve.page."""

import re
import shutil
import subprocess

import pytest

from zerojax.serve import page


def test_the_page_loads_nothing_from_elsewhere_and_its_policy_says_so():
    assert not re.findall(r"https?://|src=|@import|url\(", page.HTML)
    assert page.POLICY.startswith("default-src 'none'") and page.POLICY.count("sha256-") == 2
    assert not re.findall(r"\son\w+=|style=", page.HTML)  # which the policy forbids


@pytest.mark.long
def test_a_browser_reads_the_page(tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no browser is installed")
    (tmp_path / "page.html").write_text(page.HTML)
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert "Failed to fetch" in done.stdout  # the script ran, and asked for the models
