"""Takes over a checkpoint of DeepSpeed. This module is the command line `zerojax import-deepspeed`.

zerojax import-deepspeed output/checkpoint-500 --out runs/imported

DIR/huggingface gets the float32 weights of any model as safetensors. If its config.json (in the checkpoint, beside it, or --model_config)
names a family, DIR/config.py gets the config and DIR/run a checkpoint with weights, moments, step and loss scale, which this resumes:

python -m zerojax.train --config DIR/config.py --workdir DIR/run
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import files, tree
from zerojax.checkpoint import checkpointer
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import tensor_files
from zerojax.interop.deepspeed import config_file, translate, weights_folder, zero_checkpoint
from zerojax.launch import devices
from zerojax.models import families
from zerojax.trainer import config as config_lib
from zerojax.trainer import program as program_lib
from zerojax.trainer import resume, workdir

SEQ_LEN = 128  # of the base config
WEIGHTS, CONFIG, RUN = "huggingface", "config.py", "run"
CARRIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
# DeepSpeed's name of a moment -> its field in optax's states
MOMENTS: Mapping[str, tuple[str, ...]] = {
    "exp_avg": ("mu", "trace"),
    "exp_avg_sq": ("nu",),
    "momentum_buffer": ("trace",),
}


def main() -> None:
    """Writes the folder, and a line for each part of it. A wrong input ends with one line and status 2."""
    arguments.run(_import)


def _import() -> None:
    given = _parse(sys.argv[1:])
    if given.out.exists() and any(given.out.iterdir()):
        raise UserError(f"--out {given.out}: holds files; choose a new folder")
    found = zero_checkpoint.read(given.checkpoint)
    described = _model_config(given)
    say(
        f"{found.folder}: DeepSpeed {found.version}, step {found.step} ({found.skipped} skipped), {found.ranks} parts, "
        f"{len(found.params)} tensors, moments: {', '.join(found.moments) or 'none'}"
    )
    weights = {**found.params, **{copy: found.params[name] for copy, name in found.copies.items()}}
    beside = [] if described is None else [described.with_name(name) for name in CARRIED]
    weights_folder.write(weights, given.out / WEIGHTS, carried=[path for path in beside if path.is_file()])
    if described is not None:
        shutil.copyfile(described, given.out / WEIGHTS / folder_lib.CONFIG)
    say(f"{given.out / WEIGHTS}: float32 weights as safetensors")
    why = _why_no_run(found, described, given.out / WEIGHTS)
    if why:
        return say(f"no checkpoint to resume was written: {why}")
    return _write_run(found, given.out)


def say(text: str) -> None:
    """Prints a line."""
    print(text, flush=True)


def _model_config(given: argparse.Namespace) -> pathlib.Path | None:
    """Returns the path of the model's config.json, or None."""
    if given.model_config is not None:
        if not given.model_config.is_file():
            raise UserError(f"--model_config {given.model_config}: there is no such file; name the model's config.json")
        return pathlib.Path(given.model_config)
    for folder in (given.checkpoint, given.checkpoint.absolute().parent):
        if (folder / folder_lib.CONFIG).is_file():
            return pathlib.Path(folder / folder_lib.CONFIG)
    return None


def _why_no_run(found: zero_checkpoint.ZeroCheckpoint, described: pathlib.Path | None, weights: pathlib.Path) -> str:
    """Returns why no run can go on from the checkpoint, or ""."""
    adapter = next((name for name in found.params if re.search(r"\.lora_[AB]\.", name)), "")
    if adapter:
        return f"{adapter} is a weight of an adapter; name PEFT's folder of it by config.lora.init_from, or merge it into the model first"
    if described is None:
        return "the checkpoint has no config.json of its model; name it by --model_config"
    try:
        kind = json.loads(described.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{described}: is not a model's config.json; name another by --model_config") from error
    if kind not in families.MODEL_TYPES:
        return f"model_type {kind!r} is not an architecture that zerojax computes; known: {', '.join(families.MODEL_TYPES)}"
    if not found.moments:
        return f"it holds no moments; start from the weights by config.init_from={WEIGHTS}"
    try:
        folder_lib.open_folder(weights)
    except UserError as error:
        return f"{described} describes another model ({error})"
    try:
        translate.translate(found.config)
    except UserError as error:
        return f"its ds_config cannot be read ({error}); start from the weights by config.init_from={WEIGHTS}"
    return ""


def _write_run(found: zero_checkpoint.ZeroCheckpoint, out: pathlib.Path) -> None:
    """Writes the config, and the checkpoint that a run under it resumes."""
    translation = translate.translate(found.config)
    settings = {**translation.settings, "init_from": str((out / WEIGHTS).absolute())}
    longest = folder_lib.open_folder(out / WEIGHTS).model.max_seq_len or SEQ_LEN
    settings["seq_len"] = min(SEQ_LEN, longest)
    tokenizer = (out / WEIGHTS / "tokenizer.json").absolute()
    settings["data.tokenizer"] = str(tokenizer) if tokenizer.is_file() else "bytes"
    settings["steps"] = max(settings.get("steps", 0), found.step + 100)
    settings["optimizer.warmup_steps"] = settings.get("optimizer.warmup_steps", 0)
    sources = {**translation.sources, "init_from": ("the model; a checkpoint's weights are its own",)}
    with files.writing(out):
        text = config_file.text(settings, sources, origin=f"the checkpoint {found.folder.name}", path=str(out / CONFIG))
        files.replace(out / CONFIG, text)
    config = _config(out / CONFIG)
    with contextlib.suppress(UserError):  # JAX has started in this process
        devices.emulate_cpu_devices(config.emulate_devices)
    program = program_lib.build(config)
    state = _state(program, found, out)
    target = out / RUN
    saver = checkpointer.Checkpointer(target / workdir.CHECKPOINTS, keep_last=1, keep_best=0)
    meta = {**resume.meta(program), resume.IMPORTED: f"DeepSpeed {found.version}"}
    saver.save(found.step, state, {}, meta=meta)
    saver.close()
    origin = {"from": str(found.folder.absolute()), "deepspeed": found.version, "step": found.step}
    with files.writing(target):
        files.replace(target / workdir.IMPORTED_FILE, json.dumps(origin, indent=2) + "\n")
    for line in translation.unsupported:
        say(f"{line.key}: is not supported: {line.text}")
    frozen = len(found.params) - len(found.trainable)
    if frozen:
        say(f"{frozen} tensors had no moments (frozen weights, buffers); theirs begin at 0")
    if not tokenizer.is_file():
        say(
            'no tokenizer.json lies beside the checkpoint, so config.data.tokenizer is "bytes"; set it to the model\'s own'
        )
    say(f"{out / CONFIG}: the config; zerojax migrate reports each key of the ds_config")
    say(f"{target}: a checkpoint at step {found.step}; the data begin at their start. Set data and steps, then:")
    say(f"python -m zerojax.train --config {out / CONFIG} --workdir {target}")


def _config(path: pathlib.Path) -> config_lib.Config:
    """Returns the settings of the written config."""
    names: dict[str, Any] = {}
    sys.path.append(str(pathlib.Path(__file__).parents[2]))  # of `configs`
    exec(compile(path.read_text(), path, "exec"), names)
    return config_lib.from_dict(names["get_config"]())


def _state(program: program_lib.Program, found: zero_checkpoint.ZeroCheckpoint, out: pathlib.Path) -> Any:
    """Returns the state in the form of checkpoints: sharded params and moments, counts, and the loss scale."""
    abstract = program.logical_abstract_state
    source = program.source
    assert source is not None, "the config names the folder of weights"
    params = folder_lib.read_params(source, abstract.params)
    moments: dict[str, dict[str, Any]] = {}
    for kind, arrays in found.moments.items():
        if kind in MOMENTS:
            like = jax.tree.map(functools.partial(_as, jnp.float32), abstract.params)
            read = dict(tree.flatten(_read_moments(source, arrays, found, out, kind, like)))
            moments |= dict.fromkeys(MOMENTS[kind], read)
    first = program_lib.init_state(program)
    lacking: list[str] = []

    def fill(path: str, leaf: Any, initial: Any) -> Any:
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
            f"start from the weights by config.init_from={out / WEIGHTS}"
        )
    state = logical.replace(step=jnp.asarray(found.updates, jnp.int32), params=params, opt_state=opt_state)
    return state.replace(loss_scale=_loss_scale(found, logical.loss_scale))


def _as(dtype: Any, leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def _read_moments(
    source: folder_lib.Folder,
    arrays: Mapping[str, np.ndarray],
    found: zero_checkpoint.ZeroCheckpoint,
    out: pathlib.Path,
    kind: str,
    like: Any,
) -> Any:
    """Returns a moment of all weights, laid out as the params: it goes through a folder like theirs."""
    raw = tensor_files.read_folder(source.path)
    folder = out / f".{kind}.partial"
    full = {
        name: arrays[name] if name in arrays else np.zeros(entry.shape, np.float32)
        for name, entry in raw.items()
        if name not in found.copies
    }
    weights_folder.write(full, folder)
    try:
        entries = tensor_files.read_folder(folder)
        by_place = {(entry.file.name, entry.start): name for name, entry in raw.items()}
        own = {name: entries[by_place[entry.file.name, entry.start]] for name, entry in source.entries.items()}
        return folder_lib.read_params(dataclasses.replace(source, entries=own), like)
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
    parser = arguments.OneLineParser(
        prog="zerojax import-deepspeed",
        usage="python -m zerojax.commands.import_deepspeed CHECKPOINT --out DIR [--model_config config.json]",
        description="Turns a checkpoint of DeepSpeed (ZeRO 0 to 3, or universal) into safetensors, and into a run that resumes.",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=pathlib.Path, help="a folder with `latest`, or one of a step"
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--model_config", type=pathlib.Path, metavar="config.json", help="the model's config.json of transformers"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
