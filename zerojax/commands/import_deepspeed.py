"""Takes over a checkpoint of DeepSpeed (ZeRO 0 to 3, or universal). This module is the command line `zerojax import-deepspeed`.

zerojax import-deepspeed output/checkpoint-500 --out runs/imported

DIR/huggingface gets the weights of any model as safetensors, float32 where they were trained, and DIR/adapter an adapter of PEFT.
If the model's config.json (in the checkpoint, beside it, in --model, or --model_config) names a family, DIR/config.py gets the config and
DIR/run a checkpoint with weights, moments, step and loss scale, which this resumes:

python -m zerojax.train --config DIR/config.py --workdir DIR/run
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import errors, files, tree
from zerojax.checkpoint import checkpointer
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import huggingface, peft, tensor_files
from zerojax.launch import devices
from zerojax.migration import config_file, peft_weights, translate, weights_folder, zero_checkpoint
from zerojax.models import families
from zerojax.train_state import State
from zerojax.trainer import config as config_lib
from zerojax.trainer import program as program_lib
from zerojax.trainer import resume, workdir
from zerojax.trainer import settings as settings_lib
from zerojax.trainer import state as state_lib
from zerojax.tree import Leaf, PyTree

SEQ_LEN = 128  # of the base config
WEIGHTS, ADAPTER, CONFIG, RUN = "huggingface", "adapter", "config.py", "run"
UNFINISHED = ".unfinished"  # lies in the folder while it is written; the next import there begins anew
_NO_CONFIG = f"and no {peft.CONFIG} lies beside the checkpoint; name the one that PEFT wrote by --adapter"
# DeepSpeed's name of a moment -> its field in optax's states
MOMENTS: Mapping[str, tuple[str, ...]] = {
    "exp_avg": ("mu", "trace"),
    "exp_avg_sq": ("nu",),
    "momentum_buffer": ("trace",),
}


@arguments.command
def main() -> None:
    """Writes the folder, and a line for each part of it. A wrong input ends with one line and status 2."""
    given = _parse(sys.argv[1:])
    _check_out(given.out)
    found = zero_checkpoint.read(given.checkpoint)
    weights = {**found.params, **{copy: found.params[name] for copy, name in found.copies.items()}}
    divided, peft_config = peft_weights.divide(weights), _beside(given, "adapter", peft.CONFIG)
    described = _beside(given, "model_config", folder_lib.CONFIG)
    _check_model(given, divided)
    base_name = None if peft_config is None else folder_lib.read_json(peft_config).get("base_model_name_or_path")
    say(
        f"{found.folder}: DeepSpeed {found.version}, step {found.step} ({found.skipped} skipped), {found.ranks} parts, "
        f"{len(found.params)} tensors, moments: {', '.join(found.moments) or 'none'}"
    )
    with _writing(given.out):
        adapter = None
        if divided is None or peft_config is None:
            base = _write_model(weights, given.out / WEIGHTS, described)
            why = (
                ""
                if divided is None
                else f"{next(iter(divided.adapter.values()))} is a weight of an adapter, {_NO_CONFIG}"
            )
        else:
            adapter = given.out / ADAPTER
            own = {name: weights[full] for name, full in divided.adapter.items()}
            weights_folder.write(own, adapter, carried=_carried(peft_config, peft.CONFIG), only_file=peft.WEIGHTS)
            say(f"{adapter}: the adapter, float32, as a folder of PEFT")
            frozen = {name: weights[own] for name, own in divided.model.items()}
            base, why = _model_of_adapter(given, frozen, base_name, described)
            found = _of_adapter(found, weights, divided)
        why = why or _why_no_run(found, base, described, adapter)
        if why:
            return say(f"no checkpoint to resume was written: {why}")
        return _write_run(found, given.out, base, adapter)


def _check_out(out: pathlib.Path) -> None:
    """Checks that the folder is new, empty, or what an import left that did not end, and empties it.

    Raises:
      UserError: it is a file, holds other files, or cannot be changed.
    """
    files.check_path(out, "--out")
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out {out}: is a file; choose a new folder")
    with files.writing(out, "choose a new folder"):
        if (out / UNFINISHED).exists():
            for path in (out / WEIGHTS, out / ADAPTER, out / RUN, *out.glob(".*.partial")):
                shutil.rmtree(path, ignore_errors=True)
            for name in (CONFIG, f"{CONFIG}.new", UNFINISHED):
                (out / name).unlink(missing_ok=True)
        held = next(iter(sorted(out.iterdir())), None)
    if held is not None:
        raise UserError(f"--out {out}: holds {held.name}; choose a new folder")


@contextlib.contextmanager
def _writing(out: pathlib.Path) -> Iterator[None]:
    """Marks the folder as unfinished until the block ends without an error."""
    with files.writing(out, "make room, or choose another folder"):
        out.mkdir(parents=True, exist_ok=True)
        (out / UNFINISHED).touch()
    yield
    (out / UNFINISHED).unlink()


def say(text: str) -> None:
    """Prints a line."""
    print(text, flush=True)


def _check_model(given: argparse.Namespace, divided: peft_weights.Divided | None) -> None:
    """Refuses flags of an adapter where there is none, and a model that is not there."""
    for flag in ("adapter", "model"):
        if getattr(given, flag) is not None and divided is None:
            raise UserError(f"--{flag} {getattr(given, flag)}: the checkpoint holds no adapter of PEFT; leave it out")
    if given.model is not None and not (given.model / folder_lib.CONFIG).is_file():
        raise UserError(f"--model {given.model}: holds no {folder_lib.CONFIG}; name the folder of the adapter's model")


def _beside(given: argparse.Namespace, flag: str, name: str) -> pathlib.Path | None:
    """Returns the path of a file that a flag names, or its folder; without the flag, one in the checkpoint or beside it, or None."""
    named = getattr(given, flag)
    if named is not None:
        path = named / name if named.is_dir() else named
        if not path.is_file():
            raise UserError(f"--{flag} {named}: there is no such file; name the {name}, or its folder")
        return pathlib.Path(path)
    folders = (given.checkpoint, given.checkpoint.absolute().parent)
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _write_model(weights: Mapping[str, Any], folder: pathlib.Path, described: pathlib.Path | None) -> pathlib.Path:
    """Writes weights with the config.json of their model, and returns the folder."""
    weights_folder.write(weights, folder, carried=_carried(described, folder_lib.CONFIG))
    dtypes = sorted({array.dtype.name for array in weights.values()})
    say(f"{folder}: {', '.join(dtypes)} weights as safetensors")
    return folder


def _carried(config: pathlib.Path | None, name: str) -> dict[str, pathlib.Path]:
    """Returns a config and, beside it, the files of the tokenizer and of generation, by their names in a folder."""
    if config is None:
        return {}
    beside = {other: config.with_name(other) for other in huggingface.CARRIED}
    return {other: path for other, path in beside.items() if path.is_file()} | {name: config}


def _model_of_adapter(
    given: argparse.Namespace, frozen: Mapping[str, Any], name: Any, described: pathlib.Path | None
) -> tuple[pathlib.Path, str]:
    """Returns the folder of an adapter's model, and why there is none, or "". Frozen weights of the checkpoint become one.

    Args:
      given: the command line.
      frozen: the model's own weights in the checkpoint; there may be none.
      name: what PEFT calls the model: a folder, or a name on the Hub.
      described: the model's config.json.
    """
    told = pathlib.Path(name) if isinstance(name, str) and os.path.isdir(name) else None
    if given.model is not None:
        return given.model, ""
    if frozen:
        if described is None and told is not None and (told / folder_lib.CONFIG).is_file():
            described = told / folder_lib.CONFIG
        return _write_model(frozen, given.out / WEIGHTS, described), ""
    if told is None:
        why = f"the checkpoint holds the adapter alone, and its model {errors.shown(name)} is no folder here; name the model's by --model"
        return given.out, why
    return told, ""


def _of_adapter(
    found: zero_checkpoint.ZeroCheckpoint, weights: Mapping[str, Any], divided: peft_weights.Divided
) -> zero_checkpoint.ZeroCheckpoint:
    """Returns the adapter's part of a checkpoint, under the names of PEFT's folder."""
    names = divided.adapter

    def renamed(arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: arrays[own] for name, own in names.items() if own in arrays}

    moments = {kind: renamed(arrays) for kind, arrays in found.moments.items()}
    return dataclasses.replace(found, params=renamed(weights), moments=moments, trainable=tuple(names), copies={})


def _why_no_run(
    found: zero_checkpoint.ZeroCheckpoint,
    base: pathlib.Path,
    described: pathlib.Path | None,
    adapter: pathlib.Path | None,
) -> str:
    """Returns why no run can go on from the checkpoint, or ""."""
    config = base / folder_lib.CONFIG
    if not config.is_file():
        if adapter is not None:
            return f"{base} has no {folder_lib.CONFIG}; name the folder of the adapter's model by --model"
        return "the checkpoint has no config.json of its model; name it by --model_config"
    told = config if described is None or adapter is not None else described
    try:
        kind = folder_lib.read_json(config).get("model_type")
    except UserError as error:
        raise UserError(f"{told}: is not a model's config.json ({error}); name another by --model_config") from error
    if kind not in families.MODEL_TYPES:
        return f"model_type {kind!r} is not an architecture that zerojax computes; known: {', '.join(families.MODEL_TYPES)}"
    way_out = f"config.init_from={base}" + (f" and config.lora.init_from={adapter}" if adapter is not None else "")
    if not found.moments:
        return f"it holds no moments; start from the weights by {way_out}"
    try:
        source = folder_lib.open_folder(base)
    except UserError as error:
        return f"{told} describes another model ({error})"
    try:
        if adapter is not None:
            peft.open_adapter(adapter, source.family, source.model)
    except UserError as error:
        return str(error)
    try:
        translate.translate(found.config)
    except UserError as error:
        return f"its ds_config cannot be read ({error}); start from the weights by {way_out}"
    return ""


def _write_run(
    found: zero_checkpoint.ZeroCheckpoint, out: pathlib.Path, base: pathlib.Path, adapter: pathlib.Path | None
) -> None:
    """Writes the config, and the checkpoint that a run under it resumes.

    Args:
      found: the weights that are trained, and their moments.
      out: the folder to write.
      base: the folder of the model.
      adapter: the folder of its adapter; None: the whole model is trained.
    """
    translation = translate.translate(found.config)
    settings = {**translation.decided, "init_from": str(base.absolute())}
    if adapter is not None:
        dropout = peft.read_settings(adapter, peft.read_config(adapter)).dropout
        settings |= {"lora.init_from": str(adapter.absolute()), "lora.dropout": dropout, "export.format": "peft"}
    longest = folder_lib.open_folder(base).model.max_seq_len or SEQ_LEN
    settings["seq_len"] = min(SEQ_LEN, longest)
    tokenizers = [folder.absolute() / "tokenizer.json" for folder in (adapter, base) if folder is not None]
    tokenizer = next((path for path in tokenizers if path.is_file()), None)
    settings["data.tokenizer"] = "bytes" if tokenizer is None else str(tokenizer)
    settings["steps"] = max(settings.get("steps", 0), found.step + 100)
    settings["optimizer.warmup_steps"] = settings.get("optimizer.warmup_steps", 0)
    sources = {**translation.sources, "init_from": ("the model; a checkpoint's weights are its own",)}
    own, lines = _own_optimizer(found, settings)
    settings |= own
    sources |= dict.fromkeys(own, ("the optimizer's state",))
    text = config_file.text(settings, sources, origin=f"the checkpoint {found.folder.name}", path=str(out / CONFIG))
    config = _config(text)
    with contextlib.suppress(UserError):  # JAX has started in this process
        devices.emulate_cpu_devices(config.emulate_devices)
    program = program_lib.build(config)
    state = _state(program, found, out)
    target = out / RUN
    checkpointer.report_failed_writes_once()
    saver = checkpointer.Checkpointer(target / workdir.CHECKPOINTS, keep_last=1, keep_best=0)
    meta = {**resume.meta(program), resume.IMPORTED: f"DeepSpeed {found.version}"}
    saver.save(found.step, state, {}, meta=meta)
    saver.close()
    origin = {"from": str(found.folder.absolute()), "deepspeed": found.version, "step": found.step}
    with files.writing(target):
        files.replace(target / workdir.IMPORTED_FILE, json.dumps(origin, indent=2) + "\n")
        files.replace(out / CONFIG, text)  # last: without its checkpoint it would begin a run anew
    for told in lines:
        say(told)
    for line in translation.unsupported:
        say(f"{line.key}: is not supported: {line.text}")
    frozen = len(found.params) - len(found.trainable)
    if frozen:
        say(f"{frozen} tensors had no moments (frozen weights, buffers); theirs begin at 0")
    if tokenizer is None:
        say(
            'no tokenizer.json lies beside the checkpoint, so config.data.tokenizer is "bytes"; set it to the model\'s own'
        )
    say(f"{out / CONFIG}: the config; zerojax migrate reports each key of the ds_config")
    say(f"{target}: a checkpoint at step {found.step}; the data begin at their start. Set data and steps, then:")
    say(f"python -m zerojax.train --config {out / CONFIG} --workdir {target}")


def _own_optimizer(
    found: zero_checkpoint.ZeroCheckpoint, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of an optimizer that the training script made, and what to know about it; nothing if the ds_config has one."""
    if "optimizer.name" in settings:
        return {}, []
    own: dict[str, Any] = {}
    first = found.groups[0] if found.groups else {}
    if _are_numbers(first.get("betas"), 2) and _are_numbers((first.get("eps"), first.get("lr")), 2):
        decays = [group.get("weight_decay", 0.0) for group in found.groups]
        own = {
            "optimizer.name": "adamw",
            "optimizer.b1": float(first["betas"][0]),
            "optimizer.b2": float(first["betas"][1]),
            "optimizer.eps": float(first["eps"]),
            "optimizer.weight_decay": float(max(decays)) if _are_numbers(decays, len(decays)) else 0.0,
            "optimizer.weight_decay_on": "all" if all(decays) else "matrices",
        }
        lines = ["the ds_config has no optimizer: AdamW is taken, with the numbers of the optimizer's state"]
    else:
        lines = [
            "the ds_config has no optimizer, so config.optimizer is the base config's AdamW; set it to the script's"
        ]
    if own and "optimizer.schedule" not in settings:
        rate = own["optimizer.learning_rate"] = float(first["lr"])
        own["optimizer.schedule"] = "constant"
        lines.append(
            f"the ds_config has no scheduler: the rate stays at {rate:g}, the last one; set config.optimizer to the script's"
        )
    return own, lines


def _are_numbers(values: PyTree, count: int) -> bool:
    return (
        isinstance(values, (list, tuple))
        and len(values) == count
        and all(isinstance(value, (int, float)) and abs(value) <= sys.float_info.max for value in values)
    )


def _config(text: str) -> settings_lib.Config:
    """Returns the settings of the config's text."""
    names: dict[str, Any] = {}
    sys.path.append(str(pathlib.Path(__file__).parents[2]))  # of `configs`
    exec(compile(text, CONFIG, "exec"), names)
    return config_lib.from_dict(names["get_config"]())


def _state(program: program_lib.Program, found: zero_checkpoint.ZeroCheckpoint, out: pathlib.Path) -> State:
    """Returns the state in the form of checkpoints: sharded params and moments, counts, and the loss scale."""
    abstract, weights = program.logical_abstract_state, program.weights
    source = weights.source if weights.adapted is None else weights.adapted.opened
    assert source is not None, "the config names the folder of weights"
    params = _read(source, abstract.params)
    moments: dict[str, dict[str, Any]] = {}
    for kind, arrays in found.moments.items():
        if kind in MOMENTS:
            like = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), abstract.params)
            read = dict(tree.flatten(_read_moments(source, arrays, found, out, kind, like)))
            moments |= dict.fromkeys(MOMENTS[kind], read)
    first = state_lib.first(program)
    lacking: list[str] = []

    def fill(path: str, leaf: Leaf, initial: Any) -> Leaf:
        words = path.split("/")
        field = next((word for word in words if word in moments), None)
        if field is not None:
            return moments[field]["/".join(words[words.index(field) + 1 :])]
        if words[-1] == "count":
            return jnp.asarray(found.updates, leaf.dtype)
        if leaf.ndim:
            lacking.append(path)
        return initial

    logical = program_lib.logical_lib.to_logical(first)
    initials = dict(tree.flatten(logical.opt_state))
    opt_state = tree.map_with_path(lambda path, leaf: fill(path, leaf, initials[path]), abstract.opt_state)
    if lacking:
        raise UserError(
            f"{found.folder}: holds {', '.join(found.moments)}, and {program.config.optimizer.name} needs {lacking[0]}; "
            f"start from the weights by config.init_from={program.config.init_from}"
        )
    state = logical.replace(step=jnp.asarray(found.updates, jnp.int32), params=params, opt_state=opt_state)
    return state.replace(loss_scale=_loss_scale(found, logical.loss_scale))


def _read(source: folder_lib.Folder | peft.Adapter, like: PyTree) -> PyTree:
    """Returns the weights of a folder in the shardings of `like`."""
    if isinstance(source, folder_lib.Folder):
        return folder_lib.read_params(source, like)
    found = peft.read_leaves(source, dict(tree.flatten(like)))
    return tree.map_with_path(lambda path, _: found[path], like)


def _read_moments(
    source: folder_lib.Folder | peft.Adapter,
    arrays: Mapping[str, np.ndarray],
    found: zero_checkpoint.ZeroCheckpoint,
    out: pathlib.Path,
    kind: str,
    like: PyTree,
) -> PyTree:
    """Returns a moment of all weights, laid out as the params: it goes through a folder like theirs."""
    is_model = isinstance(source, folder_lib.Folder)
    raw = tensor_files.read_folder(source.path) if is_model else tensor_files.read_header(source.path / peft.WEIGHTS)
    folder = out / f".{kind}.partial"
    full = {
        name: arrays[name] if name in arrays else np.zeros(entry.shape, np.float32)
        for name, entry in raw.items()
        if name not in found.copies
    }
    try:
        weights_folder.write(full, folder)
        entries = tensor_files.read_folder(folder)
        by_place = {(entry.file.name, entry.start): name for name, entry in raw.items()}
        own = {name: entries[by_place[entry.file.name, entry.start]] for name, entry in source.entries.items()}
        return _read(dataclasses.replace(source, entries=own), like)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _loss_scale(found: zero_checkpoint.ZeroCheckpoint, initial: Any) -> Any:
    """Returns DeepSpeed's loss scale as ours; the initial one if either has none."""
    scaler = found.loss_scaler
    if scaler is None or not initial:
        return initial
    good = int(scaler.get("cur_iter", 0)) - int(scaler.get("last_overflow_iter", -1)) - 1
    return initial._replace(
        scale=jnp.asarray(scaler["cur_scale"], jnp.float32),
        hysteresis=jnp.asarray(scaler.get("cur_hysteresis", initial.hysteresis), jnp.int32),
        good_steps=jnp.asarray(max(0, good), jnp.int32),
        skipped_steps=jnp.asarray(found.skipped, jnp.int32),
    )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax import-deepspeed", doc=__doc__)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", type=pathlib.Path, help="a folder with `latest`, or one of a step")
    add("--out", type=pathlib.Path, required=True, metavar="DIR", help="a new folder")
    add("--model_config", type=pathlib.Path, metavar="config.json", help="the model's config.json of transformers")
    add(
        "--adapter",
        type=pathlib.Path,
        metavar="DIR",
        help="the folder with PEFT's adapter_config.json, if it lies elsewhere",
    )
    add(
        "--model",
        type=pathlib.Path,
        metavar="DIR",
        help="the folder of the model that PEFT adapts, if the checkpoint lacks its weights",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
