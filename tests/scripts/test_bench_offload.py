"""Checks the benchmark of offload. This module tests scripts/bench_offload*.py with small sizes on the CPU."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import bench_offload
import bench_offload_blocks
import pytest

SMALL = "--params_millions 0.3 --chunks_mib 1 --in_flight 4 --copies 2 --updates 1 --repeat 1".split()


def test_the_link_and_the_stream_are_measured():
    options = bench_offload._parser().parse_args(SMALL)
    assert all(rate > 0 for rate in bench_offload.link(options).values())
    found = bench_offload.stream(options)
    assert found["each_way"] == 8 * 8 * 9 * 4096  # two float32 moments of eight weights of 9 x 4,096
    assert found["rate"] > 0


def test_the_table_shows_each_part_and_failures(monkeypatch, capsys, tmp_path):
    answers = {"link": {"to_device": 54.0, "to_host": 52.0, "both": 43.0}, "stream": None}
    monkeypatch.setattr(bench_offload, "_child", lambda part, *rest: answers[part])
    monkeypatch.setattr(bench_offload.bench_train, "run", lambda *args: {"status": "out of memory", "seconds": 1.0})
    assert bench_offload.main(["--train", "model.num_layers=1", "--workdir", str(tmp_path / "runs")]) == 1
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert table[0] == "| what | measured |"
    assert "| link, both at once, each way | 43.0 GB/s |" in table
    assert "| stream, 8 chunks of 256 MiB | failed |" in table
    assert sum("| train, " in line for line in table) == len(bench_offload.TRAIN)


def test_a_rate_is_shown_as_a_share_of_both_directions_of_the_link():
    found = {"rate": 40.0, "update_bytes": 2.1e9, "seconds": 0.3}
    assert (
        bench_offload._shown(found, 43.0)
        == "40.0 GB/s each way, 93% of both at once, update 2.10 GB of device memory, 300 ms"
    )


def test_every_training_run_is_a_valid_setting():
    for words in bench_offload.TRAIN.values():
        assert bench_offload.bench_train.parse("run", words).config == "configs/llama3_1b.py"


@pytest.mark.long
def test_steps_of_a_small_model_with_all_its_state_on_the_host_are_measured():
    small = "--preset test --layers 1 --seq_len 16 --micro_batch 1 --accum 1 --state 16bit --params host --steps 2"
    line = bench_offload_blocks.main(bench_offload_blocks.parser.parse_args(small.split()))
    assert re.fullmatch(
        r"[\d.]+B weights, .* on the host, .* on the disk, made in .*; first step .* ms; \d+ tokens/s; peak .* GB; loss .*",
        line,
    )
    found = [float(loss) for loss in line.rpartition("loss ")[2].split()]
    assert len(found) == 3 and found[-1] < found[0]
