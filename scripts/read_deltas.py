"""Reads the weights that a run publishes, `--config.export.deltas_every=1`, into vLLM or any program with safetensors.

    python scripts/read_deltas.py runs/mine/deltas            # prints what is there
    python scripts/read_deltas.py runs/mine/deltas --since 8  # and what is newer than step 8

It needs safetensors and torch, and nothing of zerojax: copy it beside the program that answers. In vLLM `Reader` extends the worker:

    llm = vllm.LLM("opt/llama-3.1-8b", worker_extension_cls="read_deltas.Reader")
    llm.collective_rpc("read_deltas", args=("runs/mine/deltas",))   # after each step that is published; each worker takes its own shards
    llm.reset_prefix_cache()

The first call reads all tensors that the folder has, the next ones those that are others, also after the run went back to a checkpoint.
"""

import argparse
import hashlib
import json
import pathlib
import signal
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors
import torch


def index(folder: str) -> dict[str, Any]:
    """Returns {"step": the newest step, "tensors": {name: {"step", "file", "checksum"}}}. Raises ValueError if it was altered."""
    found = json.loads((pathlib.Path(folder) / "index.json").read_text())
    if isinstance(found, dict) and found.pop("crc32", None) not in (None, zlib.crc32(json.dumps(found).encode())):
        raise ValueError("it is altered: its checksum differs")
    return found


def tensors(folder: str, found: dict[str, Any], since: int = -1) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of those that an index has of steps after `since`. Raises ValueError for bytes that were not written so."""
    by_file: dict[str, list[str]] = {}
    for name, entry in found["tensors"].items():
        if entry["step"] > since:
            by_file.setdefault(entry["file"], []).append(name)
    for file, names in by_file.items():
        with safetensors.safe_open(pathlib.Path(folder) / file, framework="pt") as opened:
            for name in names:
                tensor = opened.get_tensor(name)
                held = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                if hashlib.blake2b(held.data, digest_size=16).hexdigest() != found["tensors"][name]["checksum"]:
                    raise ValueError(f"{folder}/{file}: {name} is not what was written; copy the folder again")
                yield name, tensor


class Reader:
    """Extends a worker of vLLM, which has `self.model_runner.model`."""

    _known: Mapping[str, str] = types.MappingProxyType({})  # the checksum of each tensor that is loaded

    def read_deltas(self, folder: str) -> int:
        """Loads what is new in a folder, and returns its step."""
        found = index(folder)
        others = {name: entry for name, entry in found["tensors"].items() if entry["checksum"] != self._known.get(name)}
        self.model_runner.model.load_weights(tensors(folder, {"tensors": others}))  # type: ignore[attr-defined]
        self._known = {name: entry["checksum"] for name, entry in found["tensors"].items()}
        return found["step"]


def main() -> None:
    """Prints the tensors of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--since", type=int, default=-1, help="the step that is known already")
    options = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as of other programs whose output `head` ends
    try:
        found = index(options.folder)
    except (OSError, ValueError) as error:
        parser.exit(
            2,
            f"{options.folder}: holds no index.json that can be read ({error}); name the folder WORKDIR/deltas of a run, or copy it "
            "again\n",
        )
    try:
        nbytes = 0
        for name, tensor in tensors(options.folder, found, options.since):
            nbytes += tensor.numel() * tensor.element_size()
            print(name, tuple(tensor.shape), tensor.dtype, "step", found["tensors"][name]["step"])
        print(f"step {found['step']}: {nbytes:,} bytes after step {options.since}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        parser.exit(2, f"{options.folder}: is damaged, or changed while it was read ({line}); read or copy it again\n")


if __name__ == "__main__":
    main()
