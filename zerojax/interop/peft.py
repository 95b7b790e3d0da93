"""PEFT's folders of LoRA adapters. This module reads and writes adapter_config.json and adapter_model.safetensors.

A tensor's name is `base_model.model.`, the module's name in transformers, and `.lora_A.weight` [r, in] or `.lora_B.weight` [out, r]; of an
embedding `.lora_embedding_A` [r, vocabulary] and `.lora_embedding_B` [out, r]. With DoRA `.lora_magnitude_vector` [out] is beside them. An
adapter of stacked experts (`target_parameters`) has the name of the module that holds the stack, with A [experts r, in] and B
[out, r experts]; where two of its stacks have one, the name of the first ends with `.base_layer`.

A module that is trained in full has its own tensor's name after that prefix. So have the embedding and the output projection of a model
whose vocabulary was resized, which PEFT saves beside the adapters though they are frozen; where they have adapters themselves, the name
ends with `.base_layer.weight`. The scale is not in the weights.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from zerojax import errors
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import hub, huggingface, layout, regexes, tensor_files
from zerojax.lora import settings, targets
from zerojax.models import config_json
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.tree import PyTree

CONFIG, WEIGHTS = folder_lib.ADAPTER, "adapter_model.safetensors"
PREFIX, WEIGHT, BASE = "base_model.model.", ".weight", ".base_layer"
EMBEDDING = "embed/embedding"  # the path of the weight
# PEFT saves these of NAME beside NAME.weight where the vocabulary was resized, and reads NAME.weight alone.
_WRAPPED = re.compile(r"(.*)\.(?:modules_to_save|original_module)(\.[^.]+)")
MAGNITUDE = ".lora_magnitude_vector"
_NAMES = {targets.A: ".lora_A.weight", targets.B: ".lora_B.weight", targets.MAGNITUDE: MAGNITUDE}
_OF_EMBEDDINGS = {targets.A: ".lora_embedding_A", targets.B: ".lora_embedding_B", targets.MAGNITUDE: MAGNITUDE}
_SAVED_WITH_ADAPTER = ("embed_tokens", "lm_head")  # PEFT saves the frozen weight of these beside an adapter
# Fields of adapter_config.json that change what an adapter computes, and the values under which nothing changes.
UNREAD: Mapping[str, tuple[Any, ...]] = {
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "megatron_config": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
# Other ways to begin change the model's own weights too, and the folder does not hold these.
BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
JOINED = ("/gate", "/up")  # matrices of experts that are one in transformers 5
TYING = "ensure_weight_tying"  # a tied embedding that is trained in full stays tied; else PEFT trains a copy of it


@dataclasses.dataclass(frozen=True)
class Adapter(folder_lib.TensorFiles):
    """The folder of an adapter, for one model."""

    chosen: targets.Targets  # the adapters, with the folder's settings
    tensors: Mapping[str, layout.ModelTensor]  # its tensors, by path in our weights


def choose(lora: settings.Lora, family: family_lib.Family, model: ModelConfig) -> targets.Targets:
    """Matches the settings with a model of a family. Names are those of transformers' modules.

    Raises:
      UserError: a name means no module of the model; the line lists those that there are.
    """
    if lora.target_modules is None:
        lora = dataclasses.replace(lora, target_modules=family.huggingface.adapted(model))
    has_head = family.is_classifier or family_lib.output(model) == family_lib.VALUE
    heads = family.huggingface.saved if has_head else ()
    saved = dict.fromkeys((*lora.modules_to_save, *heads))
    lora = dataclasses.replace(lora, modules_to_save=tuple(saved))
    own = (tensor for tensor in _tensors(family, model) if family_lib.EXPERT not in tensor.name)
    names = {tensor.path: tensor.name.rpartition(".")[0] for tensor in own}
    chosen = targets.choose(lora, linear(family, model), names, names)
    adapted = {name.rpartition(".")[2] for path in chosen.adapted for name in chosen.linear[path].names}
    if refused := ", ".join(sorted(adapted & {*family.huggingface.refused})):
        warnings.warn(
            f"lora.target_modules: mean {refused}, whose adapters PEFT refuses to read in this model; merge them (zerojax merge), or set "
            f"lora.exclude_modules={refused}",
            stacklevel=2,
        )
    return dataclasses.replace(chosen, carried=_saved_with_adapter(chosen))


def _saved_with_adapter(chosen: targets.Targets) -> tuple[str, ...]:
    """Returns the frozen weights that PEFT saves because they have an adapter."""
    adapted = {path: chosen.linear[path] for path in chosen.adapted}
    own = [path for path, one in adapted.items() if one.name.rpartition(".")[2] in _SAVED_WITH_ADAPTER]
    return tuple(chosen.kernels(path)[0] for path in own)


def start(
    family: family_lib.Family, model: ModelConfig, lora: settings.Lora | None, adapter: str | os.PathLike[str] | None
) -> tuple[Adapter | None, targets.Targets]:
    """Returns the opened folder of adapters, if there is one, and the adapters that a model starts with.

    Args:
      family, model: the model.
      lora: the settings; with a folder only `dropout` and `quantize` may be given.
      adapter: a folder; None: fresh adapters.

    Raises:
      UserError: the settings or the folder do not fit the model, or contradict each other.
    """
    if adapter is None:
        assert lora is not None
        return None, choose(lora, family, model)
    given = lora or settings.Lora()
    opened = open_adapter(adapter, family, model, quantize=given.quantize)
    own, default = opened.chosen.lora, settings.Lora()
    for field in dataclasses.fields(settings.Lora):
        value, known = getattr(given, field.name), getattr(own, field.name)
        if field.name not in ("dropout", "quantize") and value not in (getattr(default, field.name), known):
            raise UserError(
                f"lora.{field.name}: is {errors.shown(value)}, and {opened.path} has {errors.shown(known)}; leave it out"
            )
    chosen = dataclasses.replace(
        opened.chosen, lora=dataclasses.replace(own, dropout=given.dropout if lora else own.dropout)
    )
    targets.check_experts(chosen)
    targets.check_quantized(chosen)
    return opened, chosen


def linear(family: family_lib.Family, model: ModelConfig) -> dict[str, targets.LinearModule]:
    """Returns a model's linear modules by path, with their names in transformers."""
    found = {}
    heads = family.huggingface.saved if family_lib.output(model) == family_lib.VALUE else (family.heads,)
    for tensor in _tensors(family, model):
        path, _, last = tensor.path.rpartition("/")
        if family_lib.EXPERT in tensor.name:
            count, *shape = tensor.leaf_shape
            found[tensor.path] = targets.LinearModule(
                _module(tensor.name), tuple(shape), tensor.entry.inputs, stack=(count,), is_experts=True
            )
        elif last == targets.KERNEL and tensor.entry.inputs:
            is_output = any(path == head or path.startswith(f"{head}/") for head in heads)
            found[path] = targets.LinearModule(_module(tensor.name), tensor.leaf_shape, tensor.entry.inputs, is_output)
        elif tensor.path == EMBEDDING:
            is_output = model.tie_embeddings and family_lib.writes_text(family, model)
            found[path] = targets.LinearModule(
                _module(tensor.name), tensor.leaf_shape, 1, is_output=is_output, is_embedding=True
            )
    return found | _parameters(family, model)


def _tensors(family: family_lib.Family, model: ModelConfig) -> list[layout.ModelTensor]:
    """Returns a model's tensors by the names of its modules in transformers."""
    return [
        tensor._replace(name=_in_modules(tensor.name, family.huggingface)) for tensor in layout.tensors(family, model)
    ]


def _in_modules(name: str, table: family_lib.HuggingFace) -> str:
    """Returns the name in transformers' modules of a tensor that files have under another."""
    for of_file, of_module in table.in_modules:
        name = re.sub(of_file, of_module, name)
    return name


def _parameters(family: family_lib.Family, model: ModelConfig) -> dict[str, targets.LinearModule]:
    """Returns what PEFT adapts as parameters, by path."""
    own, found = {tensor.path: tensor for tensor in _tensors(family, model)}, {}
    for place, one in family.huggingface.parameters(model).items():
        pattern = re.compile(re.escape(one.paths[0]).replace(r"\{\}", r"(\d+)"))
        for layer in (match[1] for path in own if (match := pattern.fullmatch(path))):
            first, *rest = [weight.format(layer) for weight in one.paths]
            shape, is_stack = own[first].leaf_shape, not own[first].entry.inputs or family_lib.EXPERT in own[first].name
            inputs, *outputs = shape[1:] if is_stack else shape
            ends = (1 + len(rest), *outputs) if rest else outputs
            found[place.format(layer)] = targets.LinearModule(
                _in_modules(one.name.format(layer), family.huggingface),
                (inputs, *ends),
                1,
                stack=shape[:1] if is_stack else (),
                parameters=(first, *rest),
                forms=(one.a, one.b) if is_stack else (),
            )
    return found


def open_adapter(
    path: str | os.PathLike[str], family: family_lib.Family, model: ModelConfig, *, quantize: str = "none"
) -> Adapter:
    """Reads the config and the header of a folder, and checks that its tensors belong to the model. Reads no weights.

    Raises:
      UserError: a file is missing or damaged; the folder has another kind of adapter, or one of another model. The line says which.
    """
    path = pathlib.Path(hub.fetched(path))
    raw = read_config(path)
    entries = tensor_files.read_header(path / WEIGHTS) if (path / WEIGHTS).is_file() else None
    if entries is None:
        raise UserError(
            f"{path}: holds no {WEIGHTS}; name a folder that save_pretrained of PEFT wrote, with safetensors"
        )
    known = linear(family, model)
    lora = read_settings(path, raw, _names(known, known), quantize=quantize)
    targets.check_parameters(lora, known)
    of_parameters = {name: module for module, name in _bases(lora, known).items()}
    entries = {
        PREFIX + _in_modules(name.removeprefix(PREFIX), family.huggingface) if name.startswith(PREFIX) else name: entry
        for name, entry in entries.items()
    }
    entries = _without_copies(_without_wrapped(entries), family, model)
    path_of = {name: module for module, found in targets.modules(known).items() for name in found.names}
    own = {tensor.name: tensor for tensor in _tensors(family, model)}
    adapted: dict[str, None] = {}
    saved: list[str] = []
    carried: list[str] = []
    for name in entries:
        module, kind = _parsed(path, name)
        if kind and module in of_parameters:
            adapted[of_parameters[module]] = None
        elif kind and module in path_of:
            adapted[path_of[module]] = None
            _check_meant(path, raw, lora, module)
        elif not kind and module in own:
            is_trained = any(settings.is_within(_module(module), end) for end in lora.modules_to_save)
            (saved if is_trained or not _is_of_vocabulary(own[module], family) else carried).append(own[module].path)
        elif BASE in module and module.replace(BASE, "") in own and module.partition(BASE)[0] in path_of:
            carried.append(own[module.replace(BASE, "")].path)
        elif match := _WRAPPED.fullmatch(name):
            raise UserError(
                f"{path / WEIGHTS}: tensor {name} has no {match[1]}{match[2]} beside it, which PEFT reads; save the adapter with PEFT's "
                "save_pretrained"
            )
        elif model.tie_embeddings and _is_copy(module, family):
            raise _trained_apart(path)
        elif model.tie_embeddings and _is_copy(f"{module}.weight" if kind else module.replace(BASE, ""), family):
            raise UserError(
                f"{path / WEIGHTS}: tensor {name} is of an adapter of a module whose weight is the embedding's too, and zerojax computes "
                "one of the embedding alone; train it without that module (exclude_modules)"
            )
        else:
            raise UserError(
                f"{path / WEIGHTS}: tensor {name} belongs to no {'linear module' if kind else 'weight'} of this model; choose the model "
                "that the adapter was trained with"
            )
    if _tied(saved, model) and not _fields(path, raw).flag(TYING, False):
        raise _trained_apart(path)
    ordered = tuple(module for module in known if module in adapted)
    if _fields(path, raw).flag(TYING, False) and any(known[module].is_embedding for module in ordered):
        raise UserError(
            f"{path / CONFIG}: {TYING} is true, and the embedding has an adapter, which is then that of the output projection too; only an "
            f"embedding whose adapter is its own is computed; train it without {TYING}, or in full (modules_to_save)"
        )
    if lora.rslora and any(known[module].is_experts and module.endswith(JOINED) for module in ordered):
        raise UserError(
            f"{path / CONFIG}: use_rslora is true for adapters of experts' gate and up, which PEFT scales by sqrt(2) more under "
            "transformers 5, where one matrix holds both; set use_rslora to false and lora_alpha to "
            f"{_without_rslora(lora).alpha:.6g} for what they were trained with"
        )
    if lora.dropout and any(known[module].is_experts for module in ordered):
        warnings.warn(
            f"{path / CONFIG}: lora_dropout={lora.dropout} has no effect here, since adapters of experts have none",
            stacklevel=2,
        )
        lora = dataclasses.replace(lora, dropout=0.0)
    chosen = targets.Targets(_with_targets(lora, known, ordered), known, ordered, tuple(saved), tuple(carried))
    if not ordered:
        raise UserError(f"{path / WEIGHTS}: holds no adapter; name a folder that save_pretrained of PEFT wrote")
    with errors.below(f"{path / CONFIG}: "):
        targets.check_experts(chosen)
    tensors = {tensor.path: tensor for tensor in tensors_of(chosen, family, model)}
    for tensor in tensors.values():
        if tensor.path in (*saved, *carried) and _is_of_vocabulary(tensor, family):
            _check_vocabulary(path, tensor, entries.get(tensor.name))
    _check(path, tensors, entries)
    return Adapter(path, entries, chosen, tensors)


def _check_vocabulary(path: pathlib.Path, tensor: layout.ModelTensor, entry: tensor_files.Entry | None) -> None:
    """Refuses an embedding or an output projection [vocabulary, embedding] of another vocabulary than the model's."""
    if entry is not None and entry.shape[:1] != tensor.shape[:1] and entry.shape[1:] == tensor.shape[1:]:
        raise UserError(
            f"{path / WEIGHTS}: the adapter is of a vocabulary of {entry.shape[0]} ({tensor.name}), and the model has {tensor.shape[0]}; "
            f"resize it with transformers, by resize_token_embeddings({entry.shape[0]}) and save_pretrained, and name that folder"
        )


def _check_meant(path: pathlib.Path, raw: Mapping[str, Any], lora: settings.Lora, module: str) -> None:
    """Refuses a tensor of a module that the config leaves out: PEFT would drop it in silence."""
    wanted, layers = lora.target_modules, raw.get("layers_to_transform")
    if wanted is None or wanted == settings.ALL_LINEAR:
        return
    field, value = "target_modules", wanted
    is_meant = settings.matches(wanted, module)
    if is_meant and settings.matches(lora.exclude_modules, module):
        field, value, is_meant = "exclude_modules", lora.exclude_modules, False
    elif is_meant and layers not in (None, []) and not isinstance(wanted, str) and module not in wanted:
        field, value = "layers_to_transform", layers
        named = raw.get("layers_pattern") or []
        ends = [re.escape(str(one)) for one in (named if isinstance(named, list) else [named])] or ["[^.]*"]
        known = [re.match(rf"(?:.*?\.)?{end}\.(\d+)\.", module) for end in ends]
        number = next((int(match[1]) for match in known if match), None)
        is_meant = number in (layers if isinstance(layers, list) else [layers])
    if not is_meant:
        raise UserError(
            f"{path / WEIGHTS}: holds an adapter of {module}, which {CONFIG} leaves out ({field} is {errors.shown(value)}), so PEFT "
            "would drop it; copy both files of one save"
        )


def _is_copy(name: str, family: family_lib.Family) -> bool:
    """Returns whether a tensor's name is that of a weight that repeats another one in models with tied embeddings."""
    return any(re.fullmatch(pattern, name) for pattern in family.huggingface.copies({"tie_word_embeddings": True}))


def _trained_apart(path: pathlib.Path) -> UserError:
    return UserError(
        f"{path / CONFIG}: modules_to_save has the embedding or the output projection of a model in which one repeats the other, and "
        f"{TYING} is not true, so PEFT trained a copy for one of the two; train it with {TYING}=True"
    )


def _copies(
    tensors: Iterable[layout.ModelTensor], chosen: targets.Targets, family: family_lib.Family, model: ModelConfig
) -> list[layout.ModelTensor]:
    """Returns the tied embedding once more under the output projection's name, which PEFT expects if both are trained in full."""
    if not _tied(chosen.saved, model):
        return []
    named = {tensor.name: tensor for tensor in tensors}
    copies = family.huggingface.copies({"tie_word_embeddings": True})
    heads = {name: original for name, original in copies.items() if "(" not in name}
    return [named[PREFIX + original]._replace(name=PREFIX + name) for name, original in heads.items()]


def _without_copies(
    entries: Mapping[str, tensor_files.Entry], family: family_lib.Family, model: ModelConfig
) -> dict[str, tensor_files.Entry]:
    """Returns the tensors without copies of tied weights that PEFT saves beside them."""
    found = dict(entries)
    copies = family.huggingface.copies({"tie_word_embeddings": True}) if model.tie_embeddings else {}
    for pattern, original in copies.items():
        own = found.get(PREFIX + original)
        for name in [name for name in found if re.fullmatch(re.escape(PREFIX) + pattern, name)]:
            if own is not None and tensor_files.is_equal(found[name], own):
                del found[name]
    return found


def _without_wrapped(entries: Mapping[str, tensor_files.Entry]) -> dict[str, tensor_files.Entry]:
    """Returns the tensors without those of wrapped modules that PEFT saves beside the ones that it reads."""
    wrapped = {name: match[1] + match[2] for name in entries if (match := _WRAPPED.fullmatch(name))}
    return {name: entry for name, entry in entries.items() if wrapped.get(name) not in entries}


def _is_of_vocabulary(tensor: layout.ModelTensor, family: family_lib.Family) -> bool:
    """Returns whether a weight is the embedding or the output projection over the vocabulary, which PEFT saves if that was resized."""
    is_head = f"{tensor.path}/".startswith(f"{family.heads}/") and not family.is_classifier
    return tensor.path == EMBEDDING or is_head


def _tied(saved: Iterable[str], model: ModelConfig) -> bool:
    """Returns whether a weight that is trained in full is the output projection too."""
    return model.tie_embeddings and EMBEDDING in saved


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of a folder's adapter_config.json."""
    folder_lib.check_folder(path, CONFIG)
    if not (path / CONFIG).is_file():
        raise UserError(f"{path}: holds no {CONFIG}; name a folder that save_pretrained of PEFT wrote")
    return folder_lib.read_json(path / CONFIG)


def read_settings(
    path: pathlib.Path, raw: Mapping[str, Any], names: Iterable[str] = (), *, quantize: str = "none"
) -> settings.Lora:
    """Returns the settings in the contents of adapter_config.json, and checks that its regexes can be matched with the names of modules.

    Raises:
      UserError: it is of another kind of adapter, or sets what is not computed here.
    """
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{path / CONFIG}: peft_type must be 'LORA', and is {errors.shown(raw.get('peft_type'))}")
    for name, same in UNREAD.items():
        if name in raw and raw[name] not in same:
            raise UserError(
                f"{path / CONFIG}: {name} is {errors.shown(raw[name])}, which zerojax does not compute; known are adapters with "
                f"{name}={errors.shown(same[0])}"
            )
    if raw.get("init_lora_weights") not in BEGINNINGS:
        raise UserError(
            f"{path / CONFIG}: init_lora_weights is {errors.shown(raw['init_lora_weights'])}, which changes the model's own weights; save "
            "it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), which makes a plain adapter of it"
        )
    read = {
        "r": raw.get("r", 8),
        "alpha": raw.get("lora_alpha", 8),
        "dropout": raw.get("lora_dropout", 0.0),
        "target_modules": raw.get("target_modules"),
        "exclude_modules": raw.get("exclude_modules") or (),
        "target_parameters": raw.get("target_parameters") or (),
        "rslora": _fields(path, raw).flag("use_rslora", False),
        "dora": _fields(path, raw).flag("use_dora", False),
        "modules_to_save": raw.get("modules_to_save") or (),
        "rank_pattern": raw.get("rank_pattern") or {},
        "alpha_pattern": raw.get("alpha_pattern") or {},
    }
    regexes.check(list(_regexes(path, read)), names)
    with errors.below(f"{path / CONFIG}: "):
        return settings.Lora(**read, quantize=quantize)


def _fields(path: pathlib.Path, raw: Mapping[str, Any]) -> config_json.Fields:
    return config_json.Fields(raw, f"{path / CONFIG}", "save the adapter again")


def _regexes(path: pathlib.Path, read: Mapping[str, Any]) -> Iterator[regexes.Regex]:
    """Yields the regexes among settings."""
    for field in ("target_modules", "exclude_modules"):
        if isinstance(read[field], str):
            yield regexes.Regex(f"{path / CONFIG}: {field}", read[field], read[field], "fullmatch")
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in read[field] if isinstance(read[field], Mapping) else ():
            yield regexes.Regex(f"{path / CONFIG}: {field}", pattern, settings.at_end(pattern), "match")


def tensors_of(chosen: targets.Targets, family: family_lib.Family, model: ModelConfig) -> list[layout.ModelTensor]:
    """Returns the tensors of a folder: the adapters', and those of modules that are trained in full or carried."""
    found, bases = [], _bases(chosen.lora, chosen.linear, chosen.adapted)
    for path in chosen.adapted:
        one = chosen.linear[path]
        name, ends = PREFIX + bases.get(path, one.name), _OF_EMBEDDINGS if one.is_embedding else _NAMES
        for leaf, shape in chosen.shapes(path).items():
            entry = family_lib.Tensor(name + ends[leaf], int(leaf != targets.MAGNITUDE))
            if one.forms:  # the names of which end with PEFT's letter
                form: Any = one.forms[leaf == targets.B]
                entry = family_lib.Tensor(f"{name}.lora_{form[-1].upper()}.weight", form=form)
            found.append(layout.ModelTensor(entry.name, f"{chosen.adapter(path)}/{leaf}", shape, entry))
    adapted = {kernel for path in chosen.adapted for kernel in chosen.kernels(path)}
    for tensor in _tensors(family, model):
        if tensor.path in chosen.saved or tensor.path in chosen.carried:
            module, _, end = tensor.name.rpartition(".")
            middle = BASE if tensor.path in adapted else ""
            found.append(tensor._replace(name=f"{PREFIX}{module}{middle}.{end}"))
    return found


def _bases(
    lora: settings.Lora, linear: Mapping[str, targets.LinearModule], adapted: Iterable[str] | None = None
) -> dict[str, str]:
    """Returns what the names of the tensors of parameters begin with, by path: PEFT wraps their module once for each, the last outermost.

    `adapted` are the paths of those with an adapter; None: of those that the settings mean.
    """
    own = {path: one for path, one in linear.items() if one.parameters}
    meant = {path: one.name.rpartition(".") for path, one in own.items() if _has_adapter(lora, path, one, adapted)}
    found = {}
    for number, (path, (module, _, _)) in enumerate(meant.items()):
        later = [other for other, _, _ in [*meant.values()][number + 1 :] if other == module]
        found[path] = module + BASE * len(later)
    return found


def _has_adapter(lora: settings.Lora, path: str, one: targets.LinearModule, adapted: Iterable[str] | None) -> bool:
    return targets.is_meant(lora, one) if adapted is None else path in adapted


def export(
    params: PyTree,
    chosen: targets.Targets,
    family: family_lib.Family,
    model: ModelConfig,
    path: str | os.PathLike[str],
    *,
    base: str | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that PEFT's `from_pretrained` reads. All processes must call it; the first one writes.

    Args:
      params: the weights with their adapters, with any sharding and without padding. Frozen ones that the folder does not carry are
        not read, and may be missing.
      chosen: the adapters.
      family, model: the model's family and its config.
      path: the folder; files of an earlier adapter in it are replaced.
      base: the folder of the model, for the config; None for none.
      tokenizer: the contents of a tokenizer.json that the folder of the model has not; None for none.

    Raises:
      UserError: a weight is missing or of another shape, or the disk is full.
    """
    path, leaves = pathlib.Path(path).resolve(), targets.flat(params)
    tensors = tensors_of(chosen, family, model)
    for tensor in tensors:
        if tensor.path not in leaves or tuple(leaves[tensor.path].shape) != tensor.leaf_shape:
            shape = tuple(leaves[tensor.path].shape) if tensor.path in leaves else "missing"
            raise UserError(
                f"params/{tensor.path}: is {shape}, and the adapter has {tensor.leaf_shape}; pass its own settings"
            )
    fetch = huggingface.make_fetch(jax.process_index() == 0)
    tensors += _copies(tensors, chosen, family, model)
    tensors = [member for stack in tensors for member in stack.members]
    arrays = [fetch(leaves[tensor.path], np.dtype(leaves[tensor.path].dtype), tensor.part) for tensor in tensors]
    with huggingface.writing(path) as partial:
        if jax.process_index() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write(partial / WEIGHTS, tensors, arrays)
            (partial / CONFIG).write_text(
                json.dumps(config_of(chosen, family, model, base), indent=2, sort_keys=True) + "\n"
            )
            texts = {} if tokenizer is None else {huggingface.TOKENIZER: tokenizer}
            for name, content in texts.items():
                (partial / name).write_text(json.dumps(content, indent=2) + "\n")
            tensor_files.write_checksums(partial)
            path.mkdir(exist_ok=True)
            # So that a kill leaves no new weights beside what tells of old ones
            for name in (CONFIG, tensor_files.CHECKSUMS):
                (path / name).unlink(missing_ok=True)
            for name in (WEIGHTS, *texts, tensor_files.CHECKSUMS, CONFIG):
                os.replace(partial / name, path / name)
            partial.rmdir()


def _write(path: pathlib.Path, tensors: list[layout.ModelTensor], arrays: list[Any]) -> None:
    with open(path, "wb") as file:
        dtypes = {tensor.name: (tensor.shape, array.dtype) for tensor, array in zip(tensors, arrays)}
        tensor_files.write_header(file, dtypes)
        for tensor, array in zip(tensors, arrays):
            huggingface.write_tensor(file, tensor, array)


def config_of(
    chosen: targets.Targets, family: family_lib.Family, model: ModelConfig, base: str | None
) -> dict[str, Any]:
    """Returns the contents of adapter_config.json."""
    lora, modules = chosen.lora, targets.modules(chosen.linear)
    adapted, others = _divided(modules, chosen.adapted)
    if lora.rslora and any(chosen.linear[path].is_experts for path in chosen.adapted):
        lora = _without_rslora(lora)
    parameters = [chosen.linear[path].name for path in chosen.adapted if path not in modules]
    # Modules around others, such as layers, are called by numbers as some linear ones are
    around = {name.rpartition(".")[0] for name in _names(modules, modules)}
    around |= {name.rpartition(".")[0] for name in around}
    return {
        "peft_type": "LORA",
        "task_type": task_type(family, model),
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(settings.shortest_ends(_names(modules, adapted), [*_names(modules, others), *around])),
        **({"target_parameters": list(targets.ends(parameters, chosen.linear))} if parameters else {}),
        "exclude_modules": None,
        "use_rslora": lora.rslora,
        "modules_to_save": list(lora.modules_to_save) or None,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "bias": "none",
        "fan_in_fan_out": any(tensor.entry.inputs_first for tensor in _tensors(family, model)),
        "init_lora_weights": True,
        "use_dora": lora.dora,
        "inference_mode": True,
        **({TYING: True} if _tied(chosen.saved, model) else {}),
    }


def _without_rslora(lora: settings.Lora) -> settings.Lora:
    """Returns settings with the same scales, alpha / r, which PEFT keeps where it joins experts' gate and up (see `open_adapter`)."""
    ends = dict.fromkeys([*dict(lora.rank_pattern), *dict(lora.alpha_pattern)])
    alphas = {end: lora.scale_of(end) * lora.rank_of(end) for end in ends}
    return dataclasses.replace(lora, rslora=False, alpha=lora.alpha * math.sqrt(lora.r), alpha_pattern=alphas)


def task_type(family: family_lib.Family, model: ModelConfig) -> str:
    """Returns PEFT's name of what a model does."""
    if family_lib.output(model) == family_lib.STATES:
        return "FEATURE_EXTRACTION"
    if not family_lib.writes_text(family, model):
        return "SEQ_CLS"
    return "SEQ_2_SEQ_LM" if family.is_encoder_decoder else "CAUSAL_LM"


def read_leaves(adapter: Adapter, abstract: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads weights into their shardings. All processes must call it.

    Args:
      adapter: from `open_adapter`.
      abstract: ShapeDtypeStructs with shardings, by path; paths that the folder lacks are left out.
    """
    tensors = {path: tensor for path, tensor in adapter.tensors.items() if path in abstract}
    return folder_lib.read_leaves(adapter, tensors, {path: abstract[path] for path in tensors})


def _with_targets(
    lora: settings.Lora, known: Mapping[str, targets.LinearModule], adapted: tuple[str, ...]
) -> settings.Lora:
    """Returns the settings with targets that mean the modules whose tensors the folder holds."""
    wanted, modules = lora.target_modules, targets.modules(known)
    own, others = _divided(modules, adapted)
    if wanted is not None and wanted != settings.ALL_LINEAR:
        meant = [path for path, one in modules.items() if all(settings.matches(wanted, name) for name in one.names)]
        if meant == own and not lora.exclude_modules:
            return lora
    ends = settings.shortest_ends(_names(known, own), _names(known, others))
    return dataclasses.replace(lora, target_modules=ends, exclude_modules=())


def _divided(modules: Iterable[str], adapted: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns the paths of modules with an adapter, and of those without."""
    return [path for path in modules if path in adapted], [path for path in modules if path not in adapted]


def _names(known: Mapping[str, targets.LinearModule], paths: Iterable[str]) -> list[str]:
    return [name for path in paths for name in known[path].names]


def _parsed(path: pathlib.Path, name: str) -> tuple[str, str]:
    """Returns the module of an adapter's tensor and its kind; or the tensor's own name and "" if it is of a module in full."""
    if not name.startswith(PREFIX):
        raise UserError(
            f"{path / WEIGHTS}: tensor {name} does not begin with {PREFIX!r}; save the adapter with PEFT's save_pretrained"
        )
    rest = name.removeprefix(PREFIX)
    for kind, end in (*_NAMES.items(), *_OF_EMBEDDINGS.items()):
        if rest.endswith(end):
            return rest.removesuffix(end), kind
    return rest, ""


def _check(
    path: pathlib.Path, tensors: Mapping[str, layout.ModelTensor], entries: Mapping[str, tensor_files.Entry]
) -> None:
    for tensor in (member for stack in tensors.values() for member in stack.members):
        entry = entries.get(tensor.name)
        if entry is None:
            raise UserError(f"{path / WEIGHTS}: tensor {tensor.name} is missing; copy the folder again")
        if entry.shape != tensor.shape:
            raise UserError(
                f"{path / WEIGHTS}: tensor {tensor.name} has shape {entry.shape}, and {CONFIG} and the model give {tensor.shape}; "
                "choose the model that the adapter was trained with"
            )
        if entry.dtype not in tensor_files.DTYPES:
            raise UserError(
                f"{path / WEIGHTS}: tensor {tensor.name} is stored as {entry.dtype}, and only floats are read"
            )


def _module(name: str) -> str:
    return name.removesuffix(WEIGHT)
