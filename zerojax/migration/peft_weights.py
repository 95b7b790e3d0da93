"""Weights of a model that PEFT wraps. This module divides a checkpoint's arrays into those of the model and those of PEFT's folder.

PEFT's modules are in the model, so its weights have other names there than in a folder: `base_model.model.`, the module's name, and

    .base_layer.weight            the frozen weight of an adapted module
    .lora_A.default.weight        an adapter's weight; "default" is the adapter's name, which a folder's names lack
    .original_module.weight       the frozen weight of a module that is trained in full
    .modules_to_save.default.weight   its trained copy

Source: PEFT 0.17 (`utils/save_and_load.py`).
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from zerojax.errors import UserError
from zerojax.interop import peft

# (pattern of what follows the module's name, its form in a folder of PEFT); the group `name` is the adapter's.
_ADAPTERS = (
    (re.compile(r"\.(lora_[AB])\.(?P<name>[^.]+)\.(weight|bias)"), r".\1.\3"),
    (re.compile(r"\.(lora_magnitude_vector)\.(?P<name>[^.]+)(\.weight)?"), r".\1"),
    (re.compile(r"\.(lora_embedding_[AB])\.(?P<name>[^.]+)"), r".\1"),
    (re.compile(r"\.modules_to_save\.(?P<name>[^.]+)\.(.+)"), r".\2"),
)
_FROZEN = re.compile(
    r"(\.(base_layer|original_module))+\."
)  # PEFT wraps stacked experts once for each of their weights


class Divided(NamedTuple):
    """The arrays of a model with adapters.

    Attributes:
      model: {name in the model's folder: the checkpoint's name} of the model's own weights; those that are frozen may be absent.
      adapter: {name in PEFT's folder: the checkpoint's name}.
    """

    model: dict[str, str]
    adapter: dict[str, str]


def divide(params: Mapping[str, np.ndarray]) -> Divided | None:
    """Returns the names of both parts; None if the weights are not of a model with LoRA adapters.

    Raises:
      UserError: there are several adapters.
    """
    if not any(name.startswith(peft.PREFIX) and _ADAPTERS[0][0].search(name) for name in params):
        return None
    found, adapters = Divided({}, {}), dict[str, str]()
    for name in params:
        adapter, in_folder = _adapted(name)
        if adapter:
            found.adapter[in_folder] = name
            adapters.setdefault(adapter, name)
        else:
            found.model[_FROZEN.sub(".", name.removeprefix(peft.PREFIX))] = name
    if len(adapters) > 1:
        raise UserError(
            f"the checkpoint holds {len(adapters)} adapters ({', '.join(adapters)}), and a run trains one; save it with one of them"
        )
    return found


def frozen(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the weights that PEFT freezes; none if the weights are not of a model with LoRA adapters."""
    found = divide(params)
    return {name: params[name] for name in found.model.values()} if found else {}


def _adapted(name: str) -> tuple[str, str]:
    """Returns the adapter that a weight belongs to and its name in a folder of PEFT; ("", "") for a frozen weight."""
    for pattern, form in _ADAPTERS:
        match = pattern.search(name)
        if match and match.end() == len(name) and name.startswith(peft.PREFIX):
            return match["name"], name[: match.start()] + match.expand(form)
    return "", ""
