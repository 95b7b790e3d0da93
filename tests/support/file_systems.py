"""Simulates full and read-only disks. This module holds the error, and runs commands where they may mount file systems."""

import errno
import os
import shutil
import subprocess
from typing import Any, NoReturn

import pytest
import runs


def full(*_: Any, **__: Any) -> NoReturn:
    """Raises the error of a write to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def in_a_namespace(script: str, command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess:
    """Runs a shell script with arguments `command` in a namespace where it may mount file systems."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = [*namespace, "mount -t tmpfs tmpfs /mnt"]
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this system lets no user mount a file system")
    return subprocess.run(
        [*namespace, script, "sh", *command],
        cwd=runs.ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=runs.LIMIT,
    )
