"""Checks the benchmark of the feed on little text. This module tests scripts/bench_feed.py."""

import json
import subprocess
import sys

import runs


def test_it_writes_text_and_measures_how_it_is_read(tmp_path):
    command = [sys.executable, "scripts/bench_feed.py", f"--out={tmp_path}", "--gb=0.002", "--batches=6", "--step_ms=1"]
    done = subprocess.run(
        [*command, "--rows=4", "--seq_len=64"], cwd=runs.ROOT, capture_output=True, text=True, timeout=runs.LIMIT
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "feed.json").read_text())
    assert found["tokens_per_second"] > 0 and found["first_batch_seconds"] > found["open_seconds"] > 0
    assert found["resident_mb"]["end"] >= found["resident_mb"]["first"] > found["resident_mb"]["start"]
    assert len(list(tmp_path.glob("part*.jsonl"))) == 3
