"""Tests of zerojax.zero.host.budget: what will be pinned is compared with what the machine has, before anything is made."""

import warnings

import jax
import offloads
import pytest

import zerojax
from zerojax import tree, xla_flags
from zerojax.errors import UserError
from zerojax.zero.host import budget, selection, storage

GIB = 1 << 30


@pytest.fixture(scope="module")
def partition():
    state = jax.eval_shape(
        lambda key: offloads.State.create(apply_fn=None, params=offloads.weights(key), tx=offloads.adam()),
        jax.random.key(0),
    )
    return zerojax.partition_state(state, mesh=zerojax.make_mesh(), offload=offloads.PIECES, min_size=64)


def test_all_shards_of_this_process_and_the_chunks_in_flight_are_counted(partition):
    shards = 8 * sum(tree.shard_bytes(leaf) for leaf in selection.host_leaves(partition).values())
    moments = 2 * 2 * 2 * offloads.WIDTH * offloads.HIDDEN * 4  # two moments of two kernels in two layers
    assert shards == moments
    assert budget.pinned_bytes(partition) == moments + 8 * 4 * offloads.PIECES["chunk_bytes"]
    assert budget.pinned_bytes(partition.on_device) == 0


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_a_state_smaller_than_the_chunks_in_flight_needs_its_own_bytes_alone(tmp_path, place):
    state = jax.eval_shape(
        lambda key: offloads.State.create(apply_fn=None, params=offloads.weights(key), tx=offloads.adam()),
        jax.random.key(0),
    )
    how = {"optimizer": place, "chunk_bytes": 1 << 30} | ({"nvme_path": str(tmp_path)} if place == "nvme" else {})
    found = zerojax.partition_state(state, mesh=zerojax.make_mesh(), offload=how, min_size=64)
    shards = 8 * sum(tree.shard_bytes(leaf) for leaf in selection.host_leaves(found).values())
    buffers = found.offload.buffers(len(storage.on_disk(found))) * storage.disk_bytes(found)
    assert budget.pinned_bytes(found) == (2 * shards if place == "host" else shards + buffers) < 1 << 25


def test_a_state_that_the_host_cannot_hold_is_refused(partition):
    needed = budget.pinned_bytes(partition)
    budget.check(partition, host=budget.Host(needed, needed))
    budget.check(partition, host=budget.Host(None, None))
    with pytest.raises(UserError, match="control group allows"):
        budget.check(partition, host=budget.Host(10 * needed, needed - 1))
    with pytest.raises(UserError, match="of host memory on this host"):
        budget.check(partition, host=budget.Host(needed - 1, None))
    with pytest.warns(UserWarning, match="it must grow"):
        budget.check(partition, host=budget.Host(needed - 1, needed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget.check(partition.on_device, host=budget.Host(0, 0))


def test_a_pool_that_is_too_small_is_refused_with_the_name_of_its_variable(partition, monkeypatch):
    monkeypatch.setattr(budget.mesh_lib, "platform", lambda mesh: "gpu")
    monkeypatch.setenv(xla_flags.PINNED_POOL, "1e-6")
    with pytest.raises(UserError, match=f"{xla_flags.PINNED_POOL}=2 before"):
        budget.check(partition, host=budget.Host(None, None))
    for text, size in ((None, 64.0), ("100", 100.0)):
        monkeypatch.setenv(xla_flags.PINNED_POOL, text) if text else monkeypatch.delenv(xla_flags.PINNED_POOL, False)
        assert xla_flags.pinned_pool_gb() == size
    monkeypatch.setenv(xla_flags.PINNED_POOL, "much")
    with pytest.raises(UserError, match="must be a number of GiB"):
        xla_flags.pinned_pool_gb()


@pytest.mark.parametrize(
    ("pinned", "host", "processes", "size"),
    [
        (65, (400, None), 1, 86),  # 1.3 times, and one more
        (65, (None, 400), 1, 86),
        (100, (126, None), 1, 108),  # all but 18 GiB of the host's
        (124, (126, None), 1, 125),  # what is pinned
        (60, (16, 200), 1, 79),  # MemTotal can be a floor
        (60, (None, None), 1, 67),  # unknown
        (60, (16, 20), 1, 67),
        (15, (240, None), 8, 21),
        (15, (150, None), 8, 17),
    ],
)
def test_a_pool_has_room_for_what_its_places_waste_as_far_as_the_host_has(pinned, host, processes, size):
    host = budget.Host(*(None if gib is None else gib * GIB for gib in host))
    assert budget.pool_size_gb(pinned * GIB, host, processes) == size


def test_a_pool_that_would_double_beyond_the_hosts_memory_is_refused(partition, monkeypatch):
    assert budget.grown_bytes(65 * GIB, 118) == 118 * GIB, (
        "64 GiB are not enough, and the next doubling ends at the pool's size"
    )
    assert budget.grown_bytes(65 * GIB, 75) == 75 * GIB
    assert 40 * GIB < budget.grown_bytes(40 * GIB, 118) <= 64 * GIB
    monkeypatch.setattr(budget.mesh_lib, "platform", lambda mesh: "gpu")
    monkeypatch.setattr(budget, "pool_bytes", lambda partition: 65 * GIB)
    host = budget.Host(125 * GIB, None)
    monkeypatch.setenv(xla_flags.PINNED_POOL, "118")
    with pytest.raises(UserError, match=f"grows to 118.* {xla_flags.PINNED_POOL}=86 before"):
        budget.check(partition, host=host)
    budget.check(partition, host=budget.Host(400 * GIB, None))
    monkeypatch.setenv(xla_flags.PINNED_POOL, "86")
    budget.check(partition, host=host)
    monkeypatch.setenv(xla_flags.PINNED_POOL, "70")
    with pytest.warns(UserWarning, match="may be full later"):
        budget.check(partition, host=host)


@pytest.mark.parametrize(
    ("groups", "files", "allowed"),
    [
        (
            "0::/job/step",
            {"job/memory.max": 6 * GIB, "job/step/memory.max": "max"},
            6 * GIB,
        ),  # a limit of a group above
        ("0::/", {"memory.max": 5 * GIB}, 5 * GIB),  # inside a container
        ("0::/far/away", {"memory.max": 4 * GIB}, 4 * GIB),  # the path is the host's
        ("0::/job", {"job/memory.max": "max"}, None),
        ("7:cpu,memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": 3 * GIB}, 3 * GIB),
        ("7:memory:/job", {"memory/job/memory.limit_in_bytes": 2**63 - 4096}, None),
        ("1:cpu:/", {}, None),
    ],
)
def test_limits_of_both_versions_of_control_groups_are_read(tmp_path, groups, files, allowed):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for name, value in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    assert budget.read_host(tmp_path) == budget.Host(8 * GIB, allowed)


def test_a_machine_without_these_files_has_unknown_memory(tmp_path):
    assert budget.read_host(tmp_path) == budget.Host(None, None)
