"""Checks what a preflight concludes. This module tests zerojax.commands.doctor, with findings made up and once with two processes."""

import copy
import json
import os
import sys

import launches
import programs
import pytest

from zerojax.cluster import attempt, hosts
from zerojax.commands import doctor
from zerojax.commands.facts import NOTE, OK, WRONG

RANKS = hosts.ranks([hosts.Node(f"node-{index}", ("0", "1")) for index in range(4)], 1)
LEADERS = [0, 2, 4, 6]
GB = 1e9


def healthy():
    """Returns what the probes of four hosts with two GPUs find."""
    found = {}
    for rank in RANKS:
        machine = {
            "hostname": rank.host,
            "versions": {"python": "3.12.1", "jax": "0.10.2", "driver": "580.1"},
            "memory": 2**40,
            "available": 2**39,
            "free": 2**42,
        }
        device = {"device": rank.rank, "kind": "H200", "memory": 2**37, "right": True, "flops": 7e14}
        links = {str(peer): 40 * GB for peer in LEADERS if peer != rank.rank} if rank.rank in LEADERS else {}
        disk = {"error": "", "unseen": []}
        found[rank.rank] = {"machine": machine, "compute": [device], "sum": True, "exchange": links, "disk": disk}
    return found


def conclude(found, failures=(), clocks=None, **options):
    clocks = clocks or {f"node-{index}": 0.001 * index for index in range(4)}
    facts = list(doctor.collect(RANKS, found, failures, clocks, **options))
    return {fact.name: fact for fact in facts if fact.verdict != OK}, {fact.name: fact for fact in facts}


def test_nothing_is_wrong_with_healthy_hosts():
    wrong, every = conclude(healthy(), least=39.0)
    assert not wrong
    assert every["compute"].value == "8 x H200, each right, 700 TFLOP/s"
    assert every["node-0 - node-3"].value == "40 GB/s each way"
    assert every["clocks"].value == "agree within 2 ms" and every["jax"].value == "0.10.2"


def damaged(found, rank, place, value):
    """Changes one finding: "compute.0.flops" style places."""
    found = copy.deepcopy(found)
    *groups, name = place.split(".")
    group = found[rank]
    for part in groups:
        group = group[int(part) if part.isdecimal() else part]
    group[name] = value
    return found


@pytest.mark.parametrize(
    "rank, place, value, name, words",
    [
        (3, "compute.0.right", False, "node-1:3, device 3", "wrong product"),
        (3, "compute.0.flops", 5e14, "node-1:3, device 3", "71% of the others"),
        (3, "compute.0.kind", "H100", "kinds", "H100, H200"),
        (5, "sum", False, "sum over all", "wrong or missing"),
        (2, "machine.versions", {"python": "3.12.1", "jax": "0.12.0", "driver": "580.1"}, "jax", "but node-1: 0.12.0"),
        (2, "machine.versions", {"python": "3.12.1", "driver": "580.1"}, "jax", "but node-1: missing"),
        (4, "machine.memory", 2**39, "memory", "(node-2)"),
        (7, "compute.0.memory", 2**36, "device memory", "(node-3, device 7)"),
        (6, "disk.error", "Read-only file system", "node-3", "cannot write the workdir: Read-only file system"),
        (6, "disk.unseen", [0], "node-3", "does not see the files of node-0"),
    ],
)
def test_each_defect_is_wrong_and_names_where_it_is(rank, place, value, name, words):
    found = damaged(healthy(), rank, place, value)
    wrong, _ = conclude(found)
    assert set(wrong) == {name} and wrong[name].verdict == WRONG
    assert words in wrong[name].value and wrong[name].remedy


def test_a_host_whose_links_are_all_slow_is_named():
    found = healthy()
    for rank in LEADERS:
        for peer in found[rank]["exchange"]:
            if 4 in (rank, int(peer)):
                found[rank]["exchange"][peer] = 5 * GB
    wrong, _ = conclude(found)
    assert wrong["the slow host"].value == "node-2: all its links are slow" and wrong["the slow host"].verdict == WRONG
    assert {name for name, fact in wrong.items() if fact.verdict == NOTE} == {
        f"node-{a} - node-{b}" for a, b in ((0, 2), (1, 2), (2, 3))
    }
    wrong, _ = conclude(found, least=10.0)
    assert wrong["node-0 - node-2"].verdict == WRONG and "--min_gb_per_second=10" in wrong["node-0 - node-2"].remedy


def test_the_slower_direction_of_a_link_counts():
    wrong, every = conclude(damaged(healthy(), 2, "exchange.0", 10 * GB))
    assert every["node-0 - node-1"].value == "10 GB/s each way" and set(wrong) == {"node-0 - node-1"}


@pytest.mark.parametrize("seconds, verdict", [(0.4, OK), (5.0, NOTE), (-300.0, WRONG)])
def test_a_clock_that_is_off_is_named(seconds, verdict):
    _, every = conclude(healthy(), clocks={"node-0": 0.0, "node-1": 0.0, "node-2": seconds})
    assert every["clocks"].verdict == verdict and (verdict == OK) == ("node-2" not in every["clocks"].value)


def test_less_free_memory_on_one_host_and_a_full_disk_are_notes():
    found = damaged(healthy(), 2, "machine.available", 2**38)
    for rank in found:
        found[rank]["machine"]["free"] = 2**30
    wrong, _ = conclude(found)
    assert {name: fact.verdict for name, fact in wrong.items()} == {"free memory": NOTE, "workdir": NOTE}


def test_what_ended_the_processes_comes_first_and_the_rest_is_told_as_missing():
    failure = attempt.Failure("node-3", None, 1, "host node-3 is lost (no word for 30 s)")
    wrong, _ = conclude({rank: {} for rank in healthy()}, [failure])
    assert next(iter(wrong)) == "started" and wrong["started"].value == failure.line
    assert wrong["node-0 - node-3"].value == "not measured"


def test_processes_of_one_host_exchange_with_each_other():
    assert doctor.leaders(RANKS) == LEADERS and doctor.leaders(RANKS[:2]) == [0, 1]


@pytest.mark.long
def test_two_processes_of_this_host_are_examined(monkeypatch, capfd, tmp_path):
    for name in set(os.environ) - set(programs.environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(programs.ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "argv", ["doctor", "--num_gpus=2", "--json", f"--workdir={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as end:
        doctor.main()
    out, err = capfd.readouterr()
    found = json.loads(out)
    facts = {fact["name"]: fact for fact in found["facts"]}
    assert end.value.code == (0 if found["ok"] else 1) and not err
    assert facts["started"]["value"] == "2 on 1 hosts" and facts["sum over all"]["verdict"] == OK
    assert facts["localhost:0 - localhost:1"]["value"].endswith("GB/s each way")
    assert facts["workdir"]["value"].startswith("written and seen by all") and not list((tmp_path / "run").iterdir())


def test_a_host_that_cannot_be_reached_is_told_with_the_words_of_ssh(monkeypatch, capfd, tmp_path):
    (launches.fake_ssh(tmp_path / "bin", monkeypatch) / "node-b.down").touch()
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    monkeypatch.setattr(sys, "argv", ["doctor", "--json", f"--hostfile={tmp_path / 'hosts'}"])
    with pytest.raises(SystemExit) as end:
        doctor.main()
    facts = {fact["name"]: fact for fact in json.loads(capfd.readouterr().out)["facts"]}
    assert end.value.code == 1 and facts["started"]["verdict"] == WRONG
    assert (
        "host node-b cannot be used: ssh: connect to host node-b port 22: No route to host" in facts["started"]["value"]
    )
    assert facts["node-a - node-b"]["value"] == "not measured"


@pytest.mark.parametrize(
    "words, line",
    [(("--min_gb_per_second=-1",), "--min_gb_per_second: must be 0 or more"), (("x",), "unrecognized arguments: x")],
)
def test_wrong_arguments_are_errors_of_one_line(run_main, words, line):
    status, _, err = run_main(doctor, *words)
    assert status == 2 and err.startswith(f"zerojax: {line}") and err.count("\n") == 1
