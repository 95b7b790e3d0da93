"""Checkpoints of other programs, named in place of a model's folder. This module knows them by their files, and says the way on."""

import os
import pathlib
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

_STEP = re.compile(r"checkpoint-([0-9]{1,9})")  # of a Trainer
_SHARDS = r"pytorch_model_fsdp_[0-9]+"
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_MOST_NAMES = 10_000  # of a folder, which are looked at
_SAVED = "and save_pretrained it with config.json and the tokenizer's files"


class _Foreign(NamedTuple):
    """A form of checkpoints.

    Attributes:
      marks: (the folder, its names) -> the file or folder by which it is known; "" where it is not this form.
      told: what it is and the way on, with {path}, {mark} and {at}, the path of the mark.
    """

    marks: Callable[[pathlib.Path, Collection[str]], str]
    told: str


def told(path: pathlib.Path, wanted: Collection[str]) -> str:
    """Returns what a folder or a file is that is no model's folder, and the way from there to one; "" if it is nothing known.

    Args:
      path: as the user gave it.
      wanted: names of files, of which a folder that could be meant has one.
    """
    if os.path.isfile(path):
        names, found = [path.name], path.parent
    elif os.path.isdir(path):
        found = path
        with os.scandir(path) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_MOST_NAMES))]
    else:
        return ""
    if step := _newest(found, names, wanted):
        return f"holds the checkpoints of a Trainer, and is no model itself; name one of them, such as {found / step}"
    for form in _FORMS:
        if mark := form.marks(found, names):
            return form.told.format(path=found, mark=mark, at=found / mark)
    return ""


def _newest(path: pathlib.Path, names: Collection[str], wanted: Collection[str]) -> str:
    """Returns the last of a Trainer's checkpoints that has one of the files that are wanted, or else shards of FSDP."""
    are_steps = (name for name in names if _STEP.fullmatch(name) and os.path.isdir(path / name))
    steps = sorted(are_steps, key=lambda name: -int(name.partition("-")[2]))
    usable = [name for name in steps[:100] if any(os.path.isfile(path / name / file) for file in wanted)]
    sharded = [name for name in steps[:100] if _like(_SHARDS)(path / name, os.listdir(path / name))]
    return next(iter([*usable, *sharded]), "")


def _like(pattern: str) -> Callable[[pathlib.Path, Collection[str]], str]:
    return lambda path, names: next((name for name in sorted(names) if re.fullmatch(pattern, name)), "")


def _sharded_by_fsdp(path: pathlib.Path, names: Collection[str]) -> str:
    if re.fullmatch(_SHARDS, path.name) and ".metadata" in names:
        return "."
    return _like(_SHARDS)(path, names)


def _of_meta(path: pathlib.Path, names: Collection[str]) -> str:
    return _like(r"consolidated(\.\d+)?\.(pth|safetensors)")(path, names) if "params.json" in names else ""


def _of_orbax(path: pathlib.Path, names: Collection[str]) -> str:
    own = next((name for name in _ORBAX if name in names), "")
    inside = (f"{name}/{mark}" for name in sorted(names)[:100] for mark in _ORBAX if os.path.isfile(path / name / mark))
    return own or next(inside, "")


_FORMS = (
    _Foreign(
        _sharded_by_fsdp,
        "holds a model in shards of FSDP: merge them with `accelerate merge-weights {at} OUT`, copy config.json and the tokenizer's files "
        "to OUT, and name that",
    ),
    _Foreign(
        _like(r"global_step\d+|mp_rank_\d+_model_states\.pt"),
        "holds a checkpoint of DeepSpeed ({mark}): `zerojax import-deepspeed {path} --out DIR` takes it over, and writes the model's "
        "folder DIR/huggingface",
    ),
    _Foreign(
        _like(r"(?is).*\.distcp"),
        "is a distributed checkpoint of PyTorch ({mark}): `python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} w.pth` "
        f"joins it; load that into the model in transformers, {_SAVED}",
    ),
    _Foreign(
        _like(r"(?is).*\.gguf"),
        "is in the form GGUF ({mark}): read it in transformers, "
        'AutoModelForCausalLM.from_pretrained("{path}", gguf_file="{mark}"), and save_pretrained it as floats',
    ),
    _Foreign(
        _of_meta,
        "is in the form of the model's authors (params.json and {mark}): take the model's folder of the Hugging Face hub, or convert it "
        "with the script for its weights in transformers' repository, named convert_..._weights_to_hf.py",
    ),
    _Foreign(
        _of_orbax,
        "is a checkpoint of Orbax ({mark}), whose tensors have the names of the program that wrote it: export it there as a folder of "
        "transformers, or restore it there and hand the params to zerojax.shard_train_state",
    ),
)
