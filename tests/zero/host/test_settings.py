"""Tests of zerojax.zero.host.settings: what is offloaded is read from three forms, and what cannot take effect is refused."""

import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.zero import stages
from zerojax.zero.host import settings


@pytest.mark.parametrize("value", ["host", {"optimizer": "host"}, settings.Offload(optimizer="host")])
def test_three_forms_mean_the_same(value):
    assert settings.read(value) == settings.Offload(optimizer="host")


@pytest.mark.parametrize("value", [None, "none", {}, settings.Offload()])
def test_nothing_is_offloaded_by_default(value):
    assert not settings.read(value).is_on


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("disk", "offload.optimizer: must be one of none, host, nvme, and is 'disk'"),
        (True, "offload: must be one of"),
        (settings.Offload(np.zeros(2)), "offload.optimizer: must be one of"),  # which has no truth value
        (settings.Offload("host", by_block=np.zeros(2)), "offload.by_block: must be one of"),
        (settings.Offload("host", chunk_bytes=np.zeros(2)), "offload.chunk_bytes: must be a whole number"),
        ({"optimiser": "host"}, "offload.optimiser: unknown; known are optimizer, params"),
        ({"optimizer": "host", "fraction": 0}, "offload.fraction: must be above 0 and at most 1, and is 0"),
        ({"optimizer": "host", "fraction": float("nan")}, "offload.fraction"),
        ({"optimizer": "host", "chunk_bytes": 2.5e8}, "offload.chunk_bytes: must be a whole number"),
        ({"optimizer": "host", "in_flight": 1}, "offload.in_flight: must be a whole number of at least 2"),
        ({"optimizer": "nvme", "nvme_buffers": -1}, "offload.nvme_buffers: must be a whole number of at least 1"),
        ({"optimizer": "nvme", "nvme_path": 3}, "offload.nvme_path: must be a folder's path, and is 3"),
        ({"optimizer": "host", "nvme_path": "/scratch"}, "offload.nvme_path: is '/scratch' and cannot take effect"),
        ({"fraction": 0.5}, "offload.fraction: is 0.5 and cannot take effect"),
        ({"chunk_bytes": 4}, "offload.chunk_bytes: is 4 and cannot take effect"),
        ({"late_norm": True}, "offload.late_norm: is True and cannot take effect"),
        ({"by_block": "on"}, "offload.by_block: is 'on' and cannot take effect"),
        ({"optimizer": "host", "by_block": True}, "offload.by_block: must be one of auto, on, off, and is True"),
        ({"optimizer": "host", "late_norm": 1}, "offload.late_norm: must be True or False, and is 1"),
        (
            {"optimizer": "host", "late_norm": True, "by_block": "off"},
            "offload.by_block: is 'off', and updates beside the backward pass run block by block",
        ),
        (
            {"optimizer": "host", "params": "host", "by_block": "off"},
            "offload.by_block: is 'off', and offloaded params",
        ),
        ({"optimizer": "nvme", "late_norm": True}, "offload.late_norm: cannot be used with offload.optimizer='nvme'"),
        ({"optimizer": "nvme", "by_block": "on"}, "offload.by_block: cannot be used with offload.optimizer='nvme'"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(value, line):
    with pytest.raises(UserError) as raised:
        settings.read(value)
    assert line in str(raised.value)


@pytest.mark.parametrize(("chunk", "derived"), [(600, 8), (256 << 20, 8), (512 << 20, 4), (1 << 30, 2), (8 << 30, 2)])
def test_chunks_in_flight_are_those_of_2_gib_from_2_to_8_unless_they_are_set(chunk, derived):
    assert settings.Offload("host", chunk_bytes=chunk).chunks_at_once == derived
    assert settings.Offload("host", chunk_bytes=chunk, in_flight=28).chunks_at_once == 28


@pytest.mark.parametrize(("chosen", "leaves", "count"), [(0, 2, 2), (0, 100, 4), (1, 100, 1), (9, 2, 9)])
def test_a_file_has_four_buffers_and_no_more_than_leaves_unless_they_are_set(chosen, leaves, count):
    assert settings.Offload("nvme", nvme_buffers=chosen).buffers(leaves) == count


@pytest.mark.parametrize("stage", stages.STAGES)
@pytest.mark.parametrize("part", settings.PARTS)
@pytest.mark.parametrize("kind", settings.KINDS)
def test_a_part_is_offloaded_at_the_stages_that_shard_it(stage, part, kind):
    chosen = settings.Offload(**{part: kind})
    if kind == "none" or getattr(stages.STAGES[stage], settings.PARTS[part]):
        return settings.check(chosen, stages.STAGES, stage)
    with pytest.raises(UserError, match=f"offload.{part}"):
        settings.check(chosen, stages.STAGES, stage)
