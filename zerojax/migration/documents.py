"""Reads the files to translate. This module tells a DeepSpeed config, an Accelerate config, a Trainer's arguments and a hostfile apart.

DeepSpeed reads its config as Hjson: comments and commas after the last value are allowed, a key that comes twice is not. It also takes the
text itself, or its base64 form, in place of a path.
"""

import base64
import binascii
import dataclasses
import difflib
import functools
import json
import os
import pathlib
import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from zerojax import bounded, errors, files
from zerojax.errors import UserError
from zerojax.migration import accelerate, pasted, trainer_arguments, translate
from zerojax.migration import keys as keys_lib
from zerojax.migration.draft import Translation, leaves
from zerojax.tree import PyTree

DEEPSPEED, ACCELERATE, TRAINER, HOSTFILE = "DeepSpeed config", "Accelerate config", "Trainer arguments", "hostfile"
_OF_ACCELERATE = ("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "mixed_precision")
_NAMES_MODEL = ("model_name_or_path", "base_model")
_OF_TRAINER = ("deepspeed", "per_device_train_batch_size", "output_dir", *_NAMES_MODEL)
# Of the tool whose older files have a `stage`
_OF_NEW_FORM = ("dist_config", "peft_config", "kernel_config", "quant_config")
_OTHERS = (
    "configs of torchtitan and MaxText are not translated: docs/migrate.md in the repository has their names here, and `zerojax config` "
    "writes a config"
)
_NEAR = 0.85  # of a misspelt key to the right one, by difflib
_MOST_VALUES = 100_000
# A text or a comment that does not end reaches to the end of the line or of the file, so that each letter is read once.
_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*+"?)|//[^\n]*|/\*.*?(?:\*/|\Z)|^[^\S\n]*#[^\n]*', re.DOTALL | re.MULTILINE)
_MOST_BYTES = 2**18  # PyYAML reads some 50,000 a second


@dataclasses.dataclass(frozen=True)
class Document:
    """A file to translate."""

    name: str  # what to call it
    kind: str  # one of the kinds above
    content: Any  # nested mappings, or a hostfile's text
    folder: pathlib.Path  # where paths in it begin
    repaired: str = ""  # what was repaired in its text


def read(source: str) -> Document:
    """Reads a path, or the text or base64 form of a DeepSpeed config.

    Raises:
      UserError: there is no such file, or it is none of the four kinds. The line says why.
    """
    if source.lstrip().startswith("{"):
        return _told("the argument", source, pathlib.Path())
    path = pathlib.Path(source)
    # pathlib raises for a name that is too long
    if not os.path.exists(path) and (text := _from_base64(source)) is not None:
        return _told("the argument", text, pathlib.Path())
    return _told(str(path), _text(path), path.parent)


def translated(document: Document, *, version: tuple[int, ...] = translate.NEWEST) -> Translation:
    """Returns what a document becomes. The DeepSpeed config that it names by a path is read too.

    Raises:
      UserError: a value has a wrong type, keys contradict each other, or most keys are unknown. The line begins with the file's name.
    """
    found = _translated(document, version)
    names = dict(leaves(document.content)) if document.kind in (DEEPSPEED, ACCELERATE) else {}
    lost = [line for line in found.lines if line.nearest is not None and line.key in names]
    if 2 * len(lost) > len(names):
        first = errors.shown(", ".join(line.key for line in lost), 60)
        near = next((f"; did you mean {line.nearest} for {line.key}?" for line in lost if line.nearest), "")
        kind = f"{'an' if document.kind[0] in 'AEIOU' else 'a'} {document.kind}"
        raise UserError(
            f"{document.name}: {len(lost)} of its {len(names)} keys are unknown in {kind}: {first}; correct the file{near}"
        )
    return found


def _translated(document: Document, version: tuple[int, ...]) -> Translation:
    content = document.content
    with errors.below(f"{document.name}: "):
        if document.kind == HOSTFILE:
            return accelerate.translate_hostfile(content)
        if document.kind == DEEPSPEED:
            return translate.translate(content, version=version)
        if document.kind == TRAINER:
            inner = _named(content.get("deepspeed"), document.folder)
            return trainer_arguments.translate_trainer(content, inner, version=version)
        group = content.get("deepspeed_config")
        named = group.get("deepspeed_config_file") if isinstance(group, Mapping) else None
        return accelerate.translate_accelerate(content, _named(named, document.folder), version=version)


def _named(value: object, folder: pathlib.Path) -> Mapping[str, Any] | None:
    """Returns the DeepSpeed config in a value, or at the path that it is; None if there is none."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str) or not value:
        return None
    for path in (folder / value, pathlib.Path(value)):
        if os.path.isfile(path):  # pathlib raises for a name that is too long
            content = _told(str(path), _text(path), path.parent).content
            return content if isinstance(content, Mapping) else None
    return None


def _text(path: pathlib.Path) -> str:
    damaged = "is not text; name a ds_config.json, an Accelerate YAML or a hostfile"
    with files.reading(errors.shown(str(path), 300), "name a config file", damaged):
        return bounded.read_text(path, _MOST_BYTES)


def _told(name: str, text: str, folder: pathlib.Path) -> Document:
    """Returns the document that a text is."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    if any(re.fullmatch(r"\S+\s+slots\s*=\s*[0-9]{1,5}", line) for line in lines):
        return Document(name, HOSTFILE, text, folder)
    text, repaired = _repaired(text)
    content = _parse(name, text)
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{name}: holds no table of keys; name a ds_config.json, an Accelerate YAML or a hostfile")
    _check(name, content, {})
    has_blocks = "zero_optimization" in content or "train_micro_batch_size_per_gpu" in content
    named = [key for key in _OF_NEW_FORM if isinstance(content.get(key), Mapping)]
    if named and not any(key in content for key in _NAMES_MODEL):
        raise UserError(
            f"{name}: has {', '.join(named)}, as the v1 form of configs with `stage` has, and it is not translated; give the older form, "
            "with `model_name_or_path`, or run `zerojax config`, which writes a config"
        )
    if any(key in content for key in _OF_TRAINER) and not has_blocks:  # which have a key fsdp_config too
        return Document(name, TRAINER, content, folder)
    if any(key in content for key in _OF_ACCELERATE) and not has_blocks:
        return Document(name, ACCELERATE, content, folder, repaired)
    known = {key.partition(".")[0] for key in (*keys_lib.KEYS, *keys_lib.ALIASES)}
    if not any(difflib.get_close_matches(key, known, 1, _NEAR) for key in content):
        first = errors.shown(", ".join(content), 60)
        raise UserError(f"{name}: has no key of DeepSpeed, Accelerate or a Trainer, but {first}; {_OTHERS}")
    return Document(name, DEEPSPEED, content, folder, repaired)


def _repaired(text: str) -> tuple[str, str]:
    """Returns a text as it was before a web page changed it, and what was repaired."""
    plain = pasted.unescaped(text)
    notes = [] if plain == text else [r"its \_ are read as _"]
    keys = pasted.names(plain)
    if any(key in keys for key in _OF_TRAINER):  # whose keys have no sections
        return plain, "; ".join(notes)
    plain, sections = pasted.indented(plain, is_accelerate=any(key in keys for key in _OF_ACCELERATE))
    if sections:
        notes.append(f"its lines have no indentation, and keys without a section are read in {', '.join(sections)}")
    return plain, "; ".join(notes)


def _parse(name: str, text: str) -> Any:
    """Parses JSON, JSON with comments, or YAML."""
    if name.endswith(".toml"):
        raise UserError(f"{name}: TOML is not read; {_OTHERS}")

    def twice(key: str) -> UserError:
        return UserError(f"{name}: the key {key!r} comes twice, and DeepSpeed refuses that; remove one")

    plain = _COMMENT.sub(lambda match: match[1] or " ", text)
    for candidate in (text, re.sub(r",(\s*[}\]])", r"\1", plain)):
        try:
            return json.loads(candidate, object_pairs_hook=functools.partial(bounded.once, refusal=twice))
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            first = error
    try:
        return yaml.load(plain if text.lstrip().startswith("{") else text, _loader(name))
    except UserError:
        raise
    except Exception as error:  # PyYAML raises its own errors, and Python's for odd texts
        why = first if text.lstrip().startswith(("{", "[")) else error
        raise UserError(f"{name}: is neither JSON nor YAML ({errors.one_line(why, 120)}); correct it") from error


def _loader(name: str) -> type[yaml.SafeLoader]:
    """Returns PyYAML's safe loader, refusing keys that come twice with different values: PyYAML would take the last."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: PyTree, deep: bool = False) -> dict[Hashable, Any]:
            if any(not isinstance(own, yaml.ScalarNode) for own, _ in node.value):
                raise UserError(f"{name}: keys must be names, and one is a list or a table; correct it")
            found: dict[str, Any] = {}
            for own, value in node.value:
                key = str(self.construct_object(own, deep=True))
                first = found.setdefault(key, value)
                if first is not value and yaml.serialize(first) != yaml.serialize(value):
                    raise UserError(f"{name}: the key {key!r} comes twice, with different values; remove one")
            return super().construct_mapping(node, deep)

    return Loader


def _check(name: str, content: object, sizes: dict[int, int | None]) -> int:
    """Returns the number of values that a part of a document holds. YAML's aliases may hold a part many times, or inside itself.

    Args:
      name: of the document.
      content: the part.
      sizes: {id: the number of values} of the parts seen so far; None for those that this one is inside of.

    Raises:
      UserError: a key is not a name, a part holds itself, or there are too many values.
    """
    if not isinstance(content, Mapping | list):
        return 1
    if id(content) in sizes:
        known = sizes[id(content)]
        if known is None:
            raise UserError(f"{name}: an alias (*) names a part that it is inside of; write the values out")
        return known
    sizes[id(content)] = None
    for key in content if isinstance(content, Mapping) else ():
        if not isinstance(key, str):
            raise UserError(f"{name}: keys must be names, and one is {key!r}; correct it")
    total = 1 + sum(
        _check(name, item, sizes) for item in (content.values() if isinstance(content, Mapping) else content)
    )
    if total > _MOST_VALUES:
        raise UserError(f"{name}: holds more than {_MOST_VALUES} values, aliases (*) counted; no config does")
    sizes[id(content)] = total
    return total


def _from_base64(source: str) -> str | None:
    """Returns the JSON text whose base64 form this is, or None."""
    try:
        text = base64.urlsafe_b64decode(source + "=" * (-len(source) % 4)).decode()
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None
