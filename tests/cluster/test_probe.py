"""Checks the measurements of a preflight. This module tests zerojax.cluster.probe in one process; test_doctor starts two."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerojax.cluster import probe


@given(st.integers(1, 17))
def test_every_two_meet_once_and_nobody_twice_in_a_round(count):
    rounds = probe.rounds(count)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for pairs in rounds:
        places = [place for pair in pairs for place in pair]
        assert len(places) == len(set(places))


def test_a_device_computes_and_a_wrong_product_is_noticed(monkeypatch):
    found = probe._compute(jax.devices()[1], 64)
    assert found["right"] and found["flops"] > 0 and found["device"] == jax.devices()[1].id
    true = jnp.matmul
    monkeypatch.setattr(jnp, "matmul", lambda *given, **how: true(*given, **how).at[3, 5].add(1))
    assert not probe._compute(jax.devices()[1], 64)["right"]


def test_the_sum_over_all_devices_is_checked(monkeypatch):
    assert probe._sum()
    monkeypatch.setattr(jnp, "sum", lambda x: x.max())
    assert not probe._sum()


def test_shards_are_swapped_as_the_pairs_say():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("host",))
    swap = probe._swap(mesh, [(0, 3), (3, 0), (1, 2), (2, 1)])
    assert list(np.asarray(swap(jnp.arange(4)))) == [3, 2, 1, 0]


def test_one_process_exchanges_with_nobody():
    assert probe.exchange([0], 8) == {} and probe.exchange([1, 2], 8) == {}


@pytest.mark.parametrize("leaders, unseen", [([0], []), ([0, 3], [3])])
def test_files_of_other_hosts_are_looked_for(tmp_path, leaders, unseen):
    assert probe._disk(tmp_path / "run", leaders) == {"error": "", "unseen": unseen}
    assert not list((tmp_path / "run").iterdir())


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    assert probe._disk(tmp_path / "file", [0])["error"]


def test_a_machine_tells_its_versions_memory_and_disk(tmp_path, capsys):
    machine = probe._machine(str(tmp_path / "not" / "there"))
    assert (
        machine["versions"]["jax"] == jax.__version__ and machine["memory"] > machine["available"] > 0 < machine["free"]
    )
    probe._tell("machine", machine)
    line = capsys.readouterr().out
    assert json.loads(line.removeprefix(probe.MARK)) == {"rank": 0, "machine": machine}
