"""Checks the benchmark of eight GPUs. This module tests scripts/bench_eight.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import bench_eight
import bench_train


def test_parts_name_settings_and_have_time_for_themselves():
    for name, part in bench_eight.PARTS.items():
        assert part.seconds < part.most, name
        assert part.is_peer or set(part.words) <= set(bench_train.SETTINGS), name


def test_peers_run_where_their_scripts_and_packages_are_given(capsys):
    def parts(*words):
        assert bench_eight.main(["folder", "--dry", "--gpus", "8", *words]) == 0
        return capsys.readouterr().out

    with_all, without_peers, without_site = parts("--peers", "p", "--site", "s"), parts("--site", "s"), parts()
    script = bench_eight.ROOT / "docs/benchmarks/raw/peer_titan3.py"
    assert script.exists() and with_all.count(str(script)) == without_peers.count(str(script)) == 4
    assert "peer_ds.py" in with_all and "peer_ds.py" not in without_peers and "peer_" not in without_site


def test_a_part_that_fails_or_runs_over_takes_no_other_with_it(tmp_path, monkeypatch, capsys):
    """What is done is not run again."""
    scripts = {"8b": "echo boom; exit 3", "titan-8b": "sleep 60 & sleep 60", "lean": "echo '| 8b-lean | 8 |'"}
    monkeypatch.setattr(bench_eight, "command", lambda name, *_: ["bash", "-c", scripts[name]])
    monkeypatch.setattr(bench_eight, "PARTS", {name: bench_eight.Part(0, 0.3, ["x"], is_peer=True) for name in scripts})
    words = [str(tmp_path), "--peers", "peers", "--gpus", "8"]
    assert [bench_eight.main(words) for _ in range(2)] == [1, 1]
    out = capsys.readouterr().out
    assert out.count("== 8b: failed with status 3") == out.count("boom") == 2
    assert out.count("== titan-8b: ended: time is up") == 2
    assert out.count("== lean: ok") == out.count("| 8b-lean | 8 |") == out.count("== lean: done before") == 1
