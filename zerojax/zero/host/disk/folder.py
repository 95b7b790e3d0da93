"""Looks at the folder whose disk shall hold a file. This module finds its file system, its free space, and what speaks against it."""

import os
import pathlib
import shutil

from zerojax import display, files
from zerojax.errors import UserError

IN_MEMORY = ("tmpfs", "ramfs")
OVER_NETWORK = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "9p", "afs", "glusterfs", "fuse.", "virtiofs")
_MOUNTS = "/proc/self/mountinfo"


def make(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Makes the folder where it is missing, for this user alone, and returns its absolute path.

    Raises:
      UserError: it cannot be made or written.
    """
    path = pathlib.Path(folder).absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be made ({error.strerror}); choose a folder on a local disk") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{path}: cannot be written; choose a folder on a local disk that you may write")
    return path


def file_system(folder: str | os.PathLike[str]) -> str:
    """Returns the type of the file system that a folder is on ("ext4"), or "" if that is not known."""
    path, found, most = os.path.realpath(folder), "", -1
    try:
        lines = pathlib.Path(_MOUNTS).read_bytes().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        point = os.fsdecode(fields[4].decode("unicode_escape").encode("latin-1"))
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= most:  # of two mounts on one point the later one is seen
            found, most = fields[fields.index(b"-") + 1].decode(), len(point)
    return found


def warning(folder: str | os.PathLike[str]) -> str:
    """Returns a line that says why a folder does not suit, or "" if nothing speaks against it."""
    kind = file_system(folder)
    if kind in IN_MEMORY:
        return f"{folder}: is on {kind}, which keeps its files in the host's memory; choose a folder on a local disk, or 'host'"
    if kind.startswith(OVER_NETWORK):
        return f"{folder}: is on {kind}, over the network; a local disk is faster and is not shared with others"
    return ""


def check_space(folder: str | os.PathLike[str], nbytes: int) -> None:
    """Checks that the disk has room.

    Raises:
      UserError: it has not.
    """
    free = shutil.disk_usage(files.nearest(folder)).free
    if free < nbytes:
        needs, has = display.human(nbytes), display.human(free)
        raise UserError(
            f"{folder}: {needs} are needed there, and its disk has {has} free; free some, or choose another folder"
        )
