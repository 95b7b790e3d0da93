"""Checks the choice of hosts and slots. This module tests zerojax.cluster.hosts."""

import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerojax.cluster import hosts
from zerojax.errors import UserError

TWO = {"worker-0": tuple("0123"), "worker-1": tuple("0123")}


def chosen(pool=TWO, **options):
    return {host.name: "".join(host.slots) for host in hosts.choose(pool, **options)}


def test_a_hostfile_lists_hosts_with_slots(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two hosts\nworker-0 slots=2\n\n  worker-1  slots=4   # big\n10.0.0.7 slots = 1\n")
    found = hosts.read(str(path), ["0"])
    assert found == {"worker-0": ("0", "1"), "worker-1": ("0", "1", "2", "3"), "10.0.0.7": ("0",)}


def test_without_a_hostfile_there_is_this_host():
    assert hosts.read(None, ["4", "5"]) == {"localhost": ("4", "5")}


@pytest.mark.parametrize(
    "text, words",
    [
        ("worker-0", ":1: must be HOST slots=NUMBER"),
        ("a slots=1\nworker-0 slots=x", ":2: must be HOST slots=NUMBER"),
        ("a slots=0", ":1: must be HOST slots=NUMBER"),
        ("-oProxyCommand=x slots=1", ":1: must be HOST slots=NUMBER"),
        ("a slots=1\na slots=2", ":2: a is listed twice"),
        ("# nothing\n", "lists no host"),
    ],
)
def test_a_wrong_hostfile_is_named_with_its_line(tmp_path, text, words):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        hosts.read(str(path), [])
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_hostfile_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"--hostfile .*cannot be read"):
        hosts.read(str(tmp_path / "none"), [])


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, {"worker-0": "0123", "worker-1": "0123"}),
        ({"include": "worker-0@worker-1:0,2"}, {"worker-0": "0123", "worker-1": "02"}),
        ({"include": "worker-1:2,0"}, {"worker-1": "02"}),
        ({"exclude": "worker-1:0"}, {"worker-0": "0123", "worker-1": "123"}),
        ({"exclude": "worker-0"}, {"worker-1": "0123"}),
        ({"exclude": "worker-0:0,1,2,3"}, {"worker-1": "0123"}),
        ({"num_nodes": 1}, {"worker-0": "0123"}),
        ({"num_nodes": 2, "num_gpus": 2}, {"worker-0": "01", "worker-1": "01"}),
    ],
)
def test_options_choose_as_in_deepspeed(options, expected):
    assert chosen(**options) == expected


@pytest.mark.parametrize(
    "options, words",
    [
        ({"include": "worker-0", "exclude": "worker-1"}, "exclude each other"),
        ({"include": "worker-0", "num_gpus": 1}, "cannot be given with --include"),
        ({"include": "worker-2"}, "'worker-2' is not a host of this run; did you mean 'worker-"),
        ({"include": "worker-0:7"}, "worker-0 has no slot '7'; name some of 0, 1, 2, 3"),
        ({"include": "worker-0@worker-0"}, "names worker-0 twice"),
        ({"exclude": "worker-0@worker-1"}, "leaves no slot"),
        ({"num_nodes": 3}, "--num_nodes: is 3, and there are 2 hosts"),
        ({"num_nodes": 0}, "--num_nodes: is 0"),
        ({"num_gpus": 5}, "--num_gpus: is 5, and worker-0 has 4 slots; ask for 1 to 4"),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused(options, words):
    with pytest.raises(UserError) as caught:
        hosts.choose(TWO, **options)
    assert words in str(caught.value)


def test_a_host_of_one_slot_is_asked_for_one():
    with pytest.raises(UserError, match=r"--num_gpus: is 0, and a has 1 slot; ask for 1$"):
        hosts.choose({"a": ("0",)}, num_gpus=0)


slot_lists = st.lists(st.integers(0, 7).map(str), min_size=1, max_size=8, unique=True).map(tuple)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # which a machine with other work is
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), slot_lists, min_size=1), st.data())
def test_exclude_takes_away_what_include_would_take(pool, data):
    named = data.draw(st.dictionaries(st.sampled_from(sorted(pool)), st.just(None), min_size=1))
    spec = {name: data.draw(st.lists(st.sampled_from(pool[name]), min_size=1, unique=True)) for name in named}
    text = "@".join(f"{name}:{','.join(slots)}" for name, slots in spec.items())
    taken = {(host.name, slot) for host in hosts.choose(pool, include=text) for slot in host.slots}
    every = {(name, slot) for name, slots in pool.items() for slot in slots}
    try:
        left = {(host.name, slot) for host in hosts.choose(pool, exclude=text) for slot in host.slots}
    except UserError:
        left = set()
    assert taken | left == every and not taken & left


def test_each_process_sees_slots_of_its_own():
    found = hosts.ranks([hosts.Node("a", tuple("4567")), hosts.Node("b", tuple("01"))], 2)
    assert [(one.host, one.rank, one.local_rank, "".join(one.slots)) for one in found] == [
        ("a", 0, 0, "45"),
        ("a", 1, 1, "67"),
        ("b", 2, 0, "01"),
    ]
    assert [one.slots for one in hosts.ranks([hosts.Node("a", tuple("4567"))], 0)] == [tuple("4567")]
    with pytest.raises(UserError, match="a has 4 slots, which do not divide by 3"):
        hosts.ranks([hosts.Node("a", tuple("4567"))], 3)


def test_this_host_is_known_by_its_names_and_addresses():
    assert all(map(hosts.is_here, ["localhost", "127.0.0.1", socket.gethostname()]))
    assert not hosts.is_here("192.0.2.1") and not hosts.is_here("host.invalid")
    assert hosts.owns("127.0.0.1") and not hosts.owns("192.0.2.1")
