"""Models of the Hugging Face hub. This module turns a model's name there into a folder, and writes an export to the hub."""

import importlib.util
import os
import re
import sys
from typing import Any

from zerojax import errors
from zerojax.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # user/model
_IN_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/[^/]+/?$")
_FILES: Any = {
    "allow_patterns": ["*.json", "*.jinja", "*.safetensors"],
    "ignore_patterns": ["*/*.json", "*/*.safetensors", "consolidated*"],
}
_INSTALL = 'pip install "zerojax[hub]"'


def folder(path: str | os.PathLike[str]) -> str:
    """Returns the folder in the hub's cache on this machine that a model's name means, or the path itself. Asks no network."""
    text = os.fspath(path)
    return _cached(text) or text if _may_be_name(text) else text


def fetched(path: str | os.PathLike[str]) -> str:
    """Returns the folder that a path or the name of a model on the hub means, and downloads the model if the cache lacks it.

    A path that exists, or that cannot be a name, is returned as it is. Processes that download at once wait for each other: the hub's
    library locks its files.

    Raises:
      UserError: the model is neither here nor can be downloaded. The line holds the command that downloads it elsewhere.
    """
    text = os.fspath(path)
    return _cached(text) or _downloaded(text) if _may_be_name(text) else text


def _may_be_name(text: str) -> bool:
    """Returns whether a text may be a model's name: a path that exists is none."""
    return NAME.fullmatch(text) is not None and not os.path.lexists(text)


def _cached(name: str) -> str | None:
    """Returns the folder of a model in the cache, or None."""
    if not is_installed():
        return None
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    try:
        return huggingface_hub.snapshot_download(name, local_files_only=True, **_FILES)
    except (hub_errors.LocalEntryNotFoundError, hub_errors.HFValidationError):
        return None


def _downloaded(name: str) -> str:
    """Returns the folder of a model in the cache, into which it is downloaded."""
    way_out = f"with a network: hf download {name} --local-dir DIR, and name that folder"
    if not is_installed():
        raise UserError(f"{name}: is not a folder; if it is a model of the Hugging Face hub, {_INSTALL}, or, {way_out}")
    import huggingface_hub

    print(f"zerojax: downloading {name} from the Hugging Face hub", file=sys.stderr, flush=True)
    try:
        return huggingface_hub.snapshot_download(name, **_FILES)
    except Exception as error:  # of the network, the disk or the hub
        raise UserError(
            f"{name}: is not a folder, nor in the hub's cache, and cannot be downloaded ({errors.kind_and_line(error)}); {way_out}"
        ) from error


def name_of(path: str | os.PathLike[str]) -> str:
    """Returns the name on the hub of a folder in its cache, and the absolute path of any other."""
    text = os.path.abspath(path)
    found = _IN_CACHE.search(text)
    return f"{found[1]}/{found[2]}" if found else text


def is_installed() -> bool:
    """Returns whether the hub's library is there, without importing it."""
    return importlib.util.find_spec("huggingface_hub") is not None


def check_push(name: str) -> None:
    """Checks, without a network, that an export could be written to the hub.

    Raises:
      UserError: the name has another form, the hub's library is missing, or nobody is logged in.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"must be a name on the Hugging Face hub, user/model, and is {errors.shown(name)}")
    if not is_installed():
        raise UserError(f"is {name!r}, and the hub's library is not installed; {_INSTALL}")
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError(
            f"is {name!r}, and HF_HUB_OFFLINE keeps this process off the hub; unset it, or omit push_to and hf upload later"
        )
    if not huggingface_hub.get_token():
        raise UserError(f"is {name!r}, and nobody is logged in to the Hugging Face hub; hf auth login, or set HF_TOKEN")


def push(path: str | os.PathLike[str], name: str) -> None:
    """Writes a folder to the hub. A model that is not there yet becomes a private one.

    Raises:
      UserError: the hub cannot be reached, or refuses. The line holds the command that does it later.
    """
    import huggingface_hub

    try:
        api: Any = huggingface_hub.HfApi()
        if not api.repo_exists(name):
            api.create_repo(name, private=True)
        api.upload_folder(repo_id=name, folder_path=os.fspath(path), commit_message="An export of zerojax")
    except Exception as error:  # of the network, the disk or the hub
        raise UserError(
            f"{name!r} could not be written ({errors.kind_and_line(error)}); later: hf upload {name} {path}"
        ) from error
