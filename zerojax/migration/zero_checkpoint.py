"""Reads a checkpoint of DeepSpeed. This module puts the shards of ZeRO 0 to 3 together: float32 weights, moments, step and loss scale.

A stage stores each group of weights as one flat float32 array, cut among the ranks (stages 1 and 2), or each weight cut among them (stage
3). `param_shapes` gives the order. Flat arrays end in padding, so that each rank has as much. A universal checkpoint has a folder for each
weight. Names are those of the model's state dict. Source: DeepSpeed 0.19 (`utils/zero_to_fp32.py`, `checkpoint/ds_to_universal.py`).
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zerojax import bounded, errors, kinds
from zerojax.errors import UserError
from zerojax.migration import peft_weights, torch_files
from zerojax.train_state import State

Arrays = dict[str, np.ndarray]
_WEIGHTS = "params"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_COUNTS = ("global_steps", "skipped_steps")
_SAME = 0.9  # the least share of a weight that equals its copy
_PIECE = 2**22  # elements that are compared at a time
_UNIVERSAL_FILES = {"fp32": _WEIGHTS}  # file of a universal checkpoint -> what it holds; others keep their name


@dataclasses.dataclass(frozen=True)
class ZeroCheckpoint:
    """A checkpoint of DeepSpeed, put together."""

    folder: pathlib.Path  # where it was read
    # {name: float32[...]}, those that are trained as the optimizer keeps them, frozen ones and buffers as stored
    params: Arrays
    # {"exp_avg": {name: float32[...]}, ...}, as the optimizer names them; empty if none are stored
    moments: dict[str, Arrays]
    trainable: tuple[str, ...]  # the names of the weights that are trained
    copies: dict[str, str]  # {name: the name of the weight that it shares}
    step: int  # global steps, skipped ones included
    skipped: int  # steps that overflowed
    updates: int  # updates of the optimizer, as it counts them
    loss_scaler: dict[str, Any] | None  # the fields of DeepSpeed's scaler; None without loss scaling
    # the hyperparameters of each of the optimizer's groups of weights ("lr", "betas"); empty if none are stored
    groups: tuple[dict[str, Any], ...]
    config: dict[str, Any]  # the DeepSpeed config, as saved
    ranks: int  # into how many parts the state was cut
    version: str  # of DeepSpeed


def read(path: pathlib.Path) -> ZeroCheckpoint:
    """Reads a checkpoint: a folder with the file `latest`, or one of a step (`global_step500`).

    Raises:
      UserError: a file is missing or damaged, names code to be run, or the checkpoint was cut by other means than ZeRO.
    """
    try:
        return _read(path)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read ({error.strerror}); fix that") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {errors.one_line(error, 160)}"
        raise UserError(f"{path}: is not as DeepSpeed writes it ({what}); copy it again") from error


def _read(path: pathlib.Path) -> ZeroCheckpoint:
    folder = _tag(path)
    models, shards = _files(folder)
    if (folder / "zero").is_dir():
        return _read_universal(folder, torch_files.read(models[0]) if models else {})
    if not models:
        raise UserError(f"{folder}: holds no *_model_states.pt; name a folder that DeepSpeed's save_checkpoint wrote")
    model = _table(models[0], torch_files.read(models[0]))
    if not shards:
        _check_whole(folder, model)
        return _read_whole(folder, models[0], model)
    states = []
    for shard in shards:
        content = _table(shard, torch_files.read(shard))
        states.append(_table(shard, content.get("optimizer_state_dict")))
    is_cut_by_weight = "fp32_flat_groups" in states[0]
    ranks = _ranks(folder, states)
    _check_equal(shards[:ranks], [_told_by_shard(state) for state in states[:ranks]])
    if not model.get("param_shapes"):
        raise UserError(f"{models[0]}: has no param_shapes, which DeepSpeed writes since 0.4; save it with a newer one")
    if is_cut_by_weight:
        if len(models) < ranks:
            raise UserError(
                f"{folder}: holds the model state of {len(models)} of {ranks} ranks; copy the others beside it"
            )
        parts = [_table(one, torch_files.read(one)) for one in models[:ranks]]
        _check_equal(models[:ranks], [{name: part.get(name) for name in _COUNTS} for part in parts])
        merged, frozen = _merge_by_weight(folder, states[:ranks], parts), _frozen(parts, cut=True)
    else:
        merged = _merge_groups(folder, states[:ranks], model)
        frozen = _frozen([model], cut=False) or _untrained(model, merged[_WEIGHTS])
    inner = _inner(states[0])
    found = _checkpoint(folder, model, merged, frozen, _scaler(states[0]), inner, _updates(inner), ranks)
    _check_updates(found, models[0], shards[0], _updates(inner))
    return found


def _tag(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a step."""
    if not path.is_dir():
        raise UserError(f"{path}: is not a folder; name a checkpoint of DeepSpeed")
    if any(_MODEL.fullmatch(entry.name) for entry in path.iterdir()) or (path / "zero").is_dir():
        return path
    for name in ("latest", "latest_universal"):
        if (path / name).is_file():
            tag = bounded.read_bytes(path / name, 4096).decode(errors="replace").strip()
            if not tag or "/" in tag or tag.startswith("."):
                raise UserError(
                    f"{path / name}: must hold the name of a folder beside it, and holds {errors.shown(tag)}; correct it"
                )
            if not (path / tag).is_dir():
                raise UserError(f"{path / name}: names {tag}, which is not there; name the folder of a step")
            return path / tag
    steps = sorted(entry for entry in path.glob("global_step*") if entry.is_dir())
    if len(steps) == 1:
        return steps[0]
    found = f"{len(steps)} steps and no file `latest`; name one of them" if steps else "no checkpoint of DeepSpeed"
    raise UserError(f"{path}: holds {found}")


def _files(folder: pathlib.Path) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Returns the files of the model's state and of the optimizer's, by rank."""
    models: dict[int, pathlib.Path] = {}
    shards: dict[int, pathlib.Path] = {}
    for entry in sorted(folder.iterdir()):
        model, shard = _MODEL.fullmatch(entry.name), _OPTIM.fullmatch(entry.name)
        if re.match(r"layer_\d+|.*expert_\d+", entry.name):
            raise UserError(
                f"{entry}: belongs to pipeline or expert parallelism, which is not read; convert it by ds_to_universal.py"
            )
        match = model or shard
        if match is None:
            continue
        if int(match[2]):
            raise UserError(
                f"{entry}: the weights are cut by tensor parallelism, which is not read; convert it by ds_to_universal.py"
            )
        _check_name(entry, match)
        known = (models if model else shards).setdefault(int(match[1] or 0), entry)
        if known is not entry:
            raise UserError(
                f"{entry}: is of the same rank as {known.name}, so two checkpoints lie in one folder; move the files of one out"
            )
    return [models[rank] for rank in sorted(models)], [shards[rank] for rank in sorted(shards)]


def _check_name(path: pathlib.Path, match: re.Match) -> None:
    """Refuses the file of another rank under this name: torch.save notes the name inside the file."""
    name = f"{torch_files.written_as(path)}.pt"
    other = match.re.fullmatch(name)
    if other is not None and other.groups() != match.groups():
        raise UserError(
            f"{path}: was written as {name}: files of ranks were swapped; give each the name that it was written under"
        )


def _ranks(folder: pathlib.Path, states: Sequence[Mapping[str, Any]]) -> int:
    """Returns into how many parts the state is cut.

    Raises:
      UserError: there are fewer files.
    """
    told = states[0].get("partition_count", len(states))
    ranks = max(map(int, told)) if isinstance(told, (list, tuple)) else int(told)
    if len(states) < ranks:
        raise UserError(
            f"{folder}: holds the optimizer state of {len(states)} of {ranks} ranks; copy the others beside it"
        )
    return ranks


def _inner(state: Mapping[str, Any]) -> Any:
    """Returns the state of the optimizer that ZeRO wraps."""
    return state.get("base_optimizer_state", state.get("optimizer_state_dict"))


def _told_by_shard(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the optimizer's files of all ranks must have in common."""
    told = {name: state.get(name) for name in ("zero_stage", "partition_count")}
    return {**told, "step of the optimizer": _updates(_inner(state))}


def _check_equal(paths: Sequence[pathlib.Path], told: Sequence[Mapping[str, Any]]) -> None:
    """Refuses files of ranks that are not of one save. Checksums do not find that where a weight is cut among ranks."""
    for path, own in zip(paths, told):
        for name, value in own.items():
            if value != told[0][name]:
                raise UserError(
                    f"{path}: {name} is {errors.shown(value)}, and {paths[0].name} has {errors.shown(told[0][name])}: they are of two "
                    "saves; copy the checkpoint again"
                )


def _check_updates(found: ZeroCheckpoint, model: pathlib.Path, shard: pathlib.Path, counted: int) -> None:
    """Refuses an optimizer's state of another step than the model's. Up to DeepSpeed 0.14 an optimizer counted its initialization too."""
    first = 0 if re.match(r"0\.(1[5-9]|[2-9]\d)\.|[1-9]", found.version) else 1
    if counted and not 0 <= counted - found.updates <= first:  # some optimizers do not count
        raise UserError(
            f"{shard}: counts {counted} updates, and {model.name} {found.updates} (global_steps less skipped_steps): files of two steps "
            "were mixed; copy the checkpoint again. If the optimizer began anew in mid-run, convert it by ds_to_universal.py"
        )


def _merge_groups(
    folder: pathlib.Path, states: Sequence[Mapping[str, Any]], model: Mapping[str, Any]
) -> dict[str, Arrays]:
    """Returns {"params": ..., "exp_avg": ...} of stages 1 and 2: groups are flat, cut among the ranks."""
    merged: dict[str, Arrays] = {}
    for group, shapes in enumerate(model["param_shapes"]):
        slices = [state.get("param_slice_mappings") for state in states]
        places = [found[group] if found and len(found) > group else {} for found in slices]
        for kind, flats in _flats(folder, states, group):
            for name, array in _cut(folder, flats, shapes, places):
                merged.setdefault(kind, {})[name] = array
    return merged


def _flats(
    folder: pathlib.Path, states: Sequence[Mapping[str, Any]], group: int
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yields (what it holds, each rank's flat array) of a group."""
    yield _WEIGHTS, [_flat(folder, state.get("single_partition_of_fp32_groups"), group) for state in states]
    of_group = [_of_group(state.get("base_optimizer_state"), group) for state in states]
    for kind in _moments(of_group[0]):
        yield kind, [_flat(folder, [one.get(kind)], 0) for one in of_group]


def _of_group(optimizer: Any, group: int) -> Mapping[str, Any]:
    """Returns the optimizer's state of a group: of its first weight, which is the flat array."""
    if isinstance(optimizer, list):  # elastic checkpoints
        return optimizer[group] if len(optimizer) > group and isinstance(optimizer[group], Mapping) else {}
    if not isinstance(optimizer, Mapping):
        return {}
    groups, state = optimizer.get("param_groups", []), optimizer.get("state", {})
    keys = groups[group]["params"] if len(groups) > group else [group]
    found = state.get(keys[0], {}) if keys else {}
    return found if isinstance(found, Mapping) else {}


def _moments(state: Mapping[str, Any]) -> list[str]:
    return [kind for kind, value in state.items() if isinstance(value, np.ndarray) and value.ndim and kind != "step"]


def _flat(folder: pathlib.Path, groups: Any, group: int) -> np.ndarray:
    found = groups[group] if isinstance(groups, (list, tuple)) and len(groups) > group else None
    if not isinstance(found, np.ndarray):
        raise UserError(f"{folder}: a rank has no flat array of group {group}; copy the checkpoint again")
    return found.reshape(-1)


def _cut(
    folder: pathlib.Path, flats: Sequence[np.ndarray], shapes: Mapping[str, Any], places: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each weight of a group: at the places that each rank names, or one after the other."""
    total = sum(math.prod(shape) for shape in shapes.values())
    named = {name: [(rank, place[name]) for rank, place in enumerate(places) if name in place] for name in shapes}
    is_told = all(
        sum(int(found.field("numel", 0)) for _, found in named[name]) == math.prod(shape)
        for name, shape in shapes.items()
    )
    if not is_told and sum(flat.size for flat in flats) < total:
        raise UserError(
            f"{folder}: its ranks hold fewer than the {total} elements of a group of weights; copy it again"
        )
    whole = np.concatenate(flats) if not is_told else np.empty(0)
    offset = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        if is_told:
            pieces = [_piece(folder, name, flats[rank], found) for rank, found in named[name]]
            array = np.concatenate(pieces) if pieces else np.empty(0, np.float32)
        else:
            array, offset = whole[offset : offset + count], offset + count
        yield name, _float32(array).reshape(tuple(shape))


def _piece(folder: pathlib.Path, name: str, flat: np.ndarray, place: Any) -> np.ndarray:
    start, count = int(place.field("start", 0)), int(place.field("numel", 0))
    if start < 0 or start + count > flat.size:
        raise UserError(f"{folder}: {name} lies outside of its rank's flat array; copy it again")
    return flat[start : start + count]


def _merge_by_weight(
    folder: pathlib.Path, states: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]
) -> dict[str, Arrays]:
    """Returns {"params": ..., "exp_avg": ...} of stage 3: each weight is padded and cut among the ranks."""
    shapes = {name: tuple(shape) for group in models[0]["param_shapes"] for name, shape in group.items()}
    ranks = len(states)
    needed = sum(-(-math.prod(shape) // ranks) for shape in shapes.values())
    flats: dict[str, list[np.ndarray]] = {}
    for state in states:
        groups = state["fp32_flat_groups"]
        flats.setdefault(_WEIGHTS, []).append(np.concatenate([np.reshape(group, -1) for group in groups]))
        optimizer = state.get("optimizer_state_dict") or {}
        inner = [_of_group(optimizer, number) for number in range(len(groups))]
        for kind in _moments(inner[0]) if inner else ():
            flats.setdefault(kind, []).append(np.concatenate([np.reshape(one[kind], -1) for one in inner]))
    merged: dict[str, Arrays] = {}
    for kind, parts in flats.items():
        if len(parts) != ranks or any(part.size < needed for part in parts):
            raise UserError(
                f"{folder}: {kind}: a rank holds fewer than the {needed} elements of its weights; copy it again"
            )
        offset, merged[kind] = 0, {}
        for name, shape in shapes.items():
            count = math.prod(shape)
            each = -(-count // ranks)
            array = np.concatenate([part[offset : offset + each] for part in parts])[:count]
            merged[kind][name] = _float32(array).reshape(shape)
            offset += each
    return merged


def _frozen(models: Sequence[Mapping[str, Any]], *, cut: bool) -> Arrays:
    """Returns the weights that are not trained; at stage 3 each rank holds a part."""
    found: Arrays = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [np.reshape(model["frozen_param_fragments"][name], -1) for model in (models if cut else models[:1])]
        found[name] = np.concatenate(parts)[: math.prod(shape)].reshape(tuple(shape))
    return found


def _untrained(model: Mapping[str, Any], trained: Arrays) -> Arrays:
    """Returns the weights of the model's state that the optimizer does not keep. Stage 1 stores frozen ones nowhere else."""
    module = model.get("module")
    arrays = module if isinstance(module, Mapping) else {}
    others = {*trained, *(model.get("buffer_names") or ()), *_copies(model, arrays)}
    return {name: value for name, value in arrays.items() if name not in others and isinstance(value, np.ndarray)}


def _check_whole(folder: pathlib.Path, model: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of ZeRO without the optimizer's files: what is left are weights of 16 bits."""
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    kind = zero.get("stage") if isinstance(zero, Mapping) else None
    if kind and isinstance(kind, int):
        raise UserError(
            f"{folder}: holds no *_optim_states.pt, where ZeRO {kind} keeps the float32 weights and the moments; copy these beside it"
        )


def _read_whole(folder: pathlib.Path, path: pathlib.Path, model: Mapping[str, Any]) -> ZeroCheckpoint:
    """Reads a checkpoint of stage 0: the model's file holds the optimizer's state too."""
    module = _table(path, model.get("module"))
    buffers = set(model.get("buffer_names") or ())
    optimizer = model.get("optimizer")
    optimizer = optimizer if isinstance(optimizer, Mapping) else {}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    names = [name for name, value in module.items() if name not in buffers and isinstance(value, np.ndarray)]
    shared = _copies(model, names)
    names = [name for name in names if name not in shared]
    frozen = peft_weights.frozen({name: module[name] for name in names})
    names = [name for name in names if name not in frozen]
    flats = optimizer.get("fp32_groups_flat")
    if flats:
        groups = _groups_of(path, {name: module[name] for name in names}, [np.size(flat) for flat in flats])
        shapes = [{name: module[name].shape for name in group} for group in groups]
        state = {**optimizer, "single_partition_of_fp32_groups": list(flats), "base_optimizer_state": inner}
        merged = _merge_groups(folder, [state], {"param_shapes": shapes})
    else:
        masters = [array for group in optimizer.get("fp32_groups") or () for array in group]
        are_told = [np.shape(array) for array in masters] == [module[name].shape for name in names]
        weights = dict(zip(names, masters)) if are_told else module
        merged = {_WEIGHTS: {name: _float32(weights[name]) for name in names}}
        order = [number for group in inner.get("param_groups", []) for number in group["params"]]
        for number, name in zip(order, names if len(order) == len(names) else ()):
            state = inner.get("state", {}).get(number, {})
            for kind in _moments(state):
                if state[kind].shape != module[name].shape:
                    raise UserError(
                        f"{path}: {kind} of weight {number} has not the shape of {name}, so moments cannot be told apart"
                    )
                merged.setdefault(kind, {})[name] = _float32(state[kind])
    scaler = {key: value for key, value in optimizer.items() if key.startswith(("cur_", "last_overflow", "scale_"))}
    return _checkpoint(folder, model, merged, frozen, scaler or None, inner, _updates(inner), 1)


def _groups_of(path: pathlib.Path, weights: Arrays, sizes: Sequence[int]) -> list[list[str]]:
    """Returns the names of each flat group: all weights, or those that decay and the others, by their kinds or their dims.

    Raises:
      UserError: no such division has the groups' sizes.
    """
    divisions = [[list(weights)]]
    for decays in (lambda name, shape: kinds.of(name, shape) not in kinds.SPARED, lambda _, shape: len(shape) >= 2):
        decayed = [name for name, value in weights.items() if decays(name, value.shape)]
        others = [name for name in weights if name not in decayed]
        divisions += [[decayed, others], [others, decayed]]
    for groups in divisions:
        if [sum(weights[name].size for name in group) for group in groups] == list(sizes):
            return groups
    raise UserError(
        f"{path}: stage 0 stores {len(sizes)} groups of weights without their names; save it once at stage 1"
    )


def _read_universal(folder: pathlib.Path, model: Mapping[str, Any]) -> ZeroCheckpoint:
    """Reads a universal checkpoint: a folder for each weight, with a file for each array."""
    merged: dict[str, Arrays] = {}
    updates: dict[str, int] = {}
    held: dict[str, set[str]] = {}
    for weight in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
        for file in sorted(weight.glob("*.pt")):
            content = torch_files.read(file)
            value = content.get("param") if isinstance(content, Mapping) else content
            if file.stem == "step":
                updates[weight.name] = int(np.max(np.asarray(value)))
            elif isinstance(value, np.ndarray):
                merged.setdefault(_UNIVERSAL_FILES.get(file.stem, file.stem), {})[weight.name] = _float32(value)
                held.setdefault(weight.name, set()).add(file.stem)
    if _WEIGHTS not in merged:
        raise UserError(f"{folder / 'zero'}: holds no fp32.pt of any weight; convert the checkpoint again")
    _check_held(folder / "zero", held, updates)
    return _checkpoint(folder, model, merged, {}, None, None, max(updates.values(), default=0), 1)


def _check_held(folder: pathlib.Path, held: Mapping[str, set[str]], updates: Mapping[str, int]) -> None:
    """Refuses a weight that lacks a file that a weight with the same moments has, or that is of another step."""
    for name, own in held.items():
        other = next((other for other in held if own < held[other]), None)
        if other is not None or "fp32" not in own:
            lacking = min(held[other] - own) if other is not None else "fp32"
            raise UserError(
                f"{folder / name}: holds no {lacking}.pt{f', and {other} has one' if other else ''}; convert the checkpoint again"
            )
    if len(set(updates.values())) > 1:
        least, most = (pick(updates, key=updates.__getitem__) for pick in (min, max))
        raise UserError(
            f"{folder}: {least} is of update {updates[least]}, and {most} of {updates[most]}: files of two steps were mixed; convert the "
            "checkpoint again"
        )


def _checkpoint(
    folder: pathlib.Path,
    model: Mapping[str, Any],
    merged: dict[str, Arrays],
    frozen: Arrays,
    scaler: dict[str, Any] | None,
    optimizer: Any,
    updates: int,
    ranks: int,
) -> ZeroCheckpoint:
    params = {**merged.pop(_WEIGHTS), **frozen}
    trainable = tuple(name for name in params if name not in frozen)
    module = model.get("module")
    _check_copies(folder, params, module if isinstance(module, Mapping) else {})
    for name in model.get("buffer_names") or ():
        if isinstance(module, Mapping) and isinstance(module.get(name), np.ndarray):
            params.setdefault(name, module[name])
    config = model.get("ds_config")
    step, skipped = int(model.get("global_steps") or updates), int(model.get("skipped_steps") or 0)
    numbers = {"global_steps": step, "skipped_steps": skipped, "step of the optimizer": updates}
    numbers |= {name: (scaler or {}).get(name, 1) for name in ("cur_scale", "cur_iter", "cur_hysteresis")}
    for name, number in numbers.items():
        most = 2.0**128 if name == "cur_scale" else 2**31
        if not isinstance(number, int | float) or not 0 <= number < most:
            raise UserError(
                f"{folder}: {name} is {errors.shown(number)}, which no run counts; copy the checkpoint again"
            )
    return ZeroCheckpoint(
        folder=folder,
        params=params,
        moments=merged,
        trainable=trainable,
        copies=_copies(model, params),
        step=step,
        skipped=skipped,
        updates=max(0, step - skipped),
        loss_scaler=scaler,
        groups=_hyperparameters(optimizer),
        config=dict(config) if isinstance(config, Mapping) else {},
        ranks=ranks,
        version=str(model.get("ds_version") or "unknown"),
    )


def _check_copies(folder: pathlib.Path, params: Arrays, module: Mapping[str, Any]) -> None:
    """Compares the weights with the copies that the model computes with; stage 3 stores none.

    Raises:
      UserError: a weight is another than its copy, beyond the rounding of float16 and bfloat16.
    """
    for name, array in params.items():
        copy = module.get(name)
        if not isinstance(copy, np.ndarray) or copy.shape != array.shape or not copy.size:
            continue
        same = 0
        for first in range(0, copy.size, _PIECE):
            own, known = (_float32(one.reshape(-1)[first : first + _PIECE]) for one in (array, copy))
            with np.errstate(all="ignore"):
                same += int(np.sum((abs(own - known) <= abs(known) * 2**-6 + 2**-20) | ~np.isfinite(known)))
        share = same / copy.size
        if share < _SAME:
            raise UserError(
                f"{folder}: {name} of the optimizer's files differs from the model's copy in {1 - share:.0%} of its elements: files of "
                "ranks were swapped, or are of two steps; copy the checkpoint again"
            )


def _copies(model: Mapping[str, Any], names: Any) -> dict[str, str]:
    """Returns {name: the weight that it shares}."""
    shared = model.get("shared_params") or {}
    pairs = shared.items() if isinstance(shared, Mapping) else shared
    return {str(copy): str(name) for copy, name in pairs if str(name) in names}


def _scaler(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of the loss scaler, if it scales."""
    found = state.get("loss_scaler")
    if not isinstance(found, torch_files.PickledObject):
        return None
    fields = {name: value for name, value in vars(found).items() if not name.startswith("_")}
    return fields if fields.get("dynamic") or fields.get("cur_scale", 1.0) != 1.0 else None


def _hyperparameters(optimizer: Any) -> tuple[dict[str, Any], ...]:
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    found = [group for group in groups or () if isinstance(group, Mapping)]
    return tuple({str(name): value for name, value in group.items() if name != "params"} for group in found)


def _updates(optimizer: Any) -> int:
    if isinstance(optimizer, list):  # elastic checkpoints: a state for each group
        return _count(dict(enumerate(optimizer)))
    return _count(optimizer.get("state", {})) if isinstance(optimizer, Mapping) else 0


def _count(state: State) -> int:
    """Returns how often an optimizer has updated its first weight."""
    first: Any = next(iter(state.values()), None) if isinstance(state, Mapping) else None
    return int(np.max(np.asarray(first.get("step", 0)))) if isinstance(first, Mapping) else 0


def _float32(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32)


def _table(path: pathlib.Path, content: object) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: does not hold what DeepSpeed saves; copy it again")
    return content
