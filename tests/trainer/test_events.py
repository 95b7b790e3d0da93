"""Tests TensorBoard's event file. This module tests zerojax.trainer.events."""

import itertools
import logging
import math
import threading

import event_files
import pytest

from zerojax.trainer import events, metrics


@pytest.mark.parametrize("arrives_after", [0, 1, 2, 3])
def test_values_written_before_the_library_is_imported_are_in_the_file(tmp_path, monkeypatch, arrives_after):
    arrived, library = threading.Event(), events._import

    def slow_import():
        assert arrived.wait(60)
        return library()

    monkeypatch.setattr(events, "_import", slow_import)
    file = events.Events(tmp_path / metrics.TENSORBOARD, None)
    for step in range(1, 4):
        if step > arrives_after:
            arrived.set()
        file.write(step, {"loss": step / 4, "tokens": step})
    arrived.set()
    file.close()
    found = event_files.read(tmp_path)
    scalars = [(e.step, v.tag, v.simple_value) for e in found for v in e.summary.value]
    assert scalars == [(s, tag, x) for s in (1, 2, 3) for tag, x in (("loss", s / 4), ("tokens", s))]
    times = [e.wall_time for e in found if e.summary.value]
    assert all(before <= after for before, after in itertools.pairwise(times))


def test_nan_is_written_in_silence(tmp_path, caplog):
    logging.getLogger("tensorboardX.x2num").setLevel(logging.NOTSET)
    file = events.Events(tmp_path / metrics.TENSORBOARD, None)
    file.write(1, {"loss": math.nan})
    file.close()
    values = [value.simple_value for event in event_files.read(tmp_path) for value in event.summary.value]
    assert len(values) == 1 and math.isnan(values[0]) and not caplog.records
