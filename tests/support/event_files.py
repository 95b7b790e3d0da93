"""Reads a run's events for TensorBoard. This module parses the event files without TensorBoard."""

import pathlib

from tensorboardX.proto import event_pb2

from zerojax.trainer import metrics


def read(workdir) -> list[event_pb2.Event]:
    """Reads the event files: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    found = []
    for path in sorted(pathlib.Path(workdir, metrics.TENSORBOARD).iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))
            at += 16 + size
    return found
