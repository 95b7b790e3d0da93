"""Continues prompts with a model that transformers saved. This module is the command line `zerojax generate`.

zerojax generate FOLDER --prompt "Once upon a time" --max_new_tokens 40    prints the text
zerojax generate FOLDER --ids IN.npz --out OUT.npz --stage 3    for scripts: token ids in; logits and token ids out
"""

import argparse
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import errors, files
from zerojax import mesh as mesh_lib
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.inference import generate
from zerojax.interop import folder as folder_lib
from zerojax.interop import huggingface, pretrained
from zerojax.launch import devices, processes
from zerojax.zero import where_used

TOKENIZER = "tokenizer.json"


def main() -> None:
    """Prints texts, or writes arrays. A UserError prints one line and ends with status 2."""
    arguments.run(_leaving)


def _leaving() -> None:
    """Generates. A process that fails does not wait for the others."""
    try:
        _generate()
    except UserError as error:
        if not jax.distributed.is_initialized():
            raise
        print(f"zerojax: {error}", file=sys.stderr, flush=True)
        processes.leave(2)


def _generate() -> None:
    given = _parse(sys.argv[1:])
    devices.emulate_cpu_devices(given.emulate_devices)
    processes.initialize(given.coordinator, given.num_processes, given.process_id)
    arrays = _read(given.ids) if given.ids else None
    tokenizer = _tokenizer(given.folder) if given.prompt and pathlib.Path(given.folder).is_dir() else None
    loaded = pretrained.load_huggingface(
        given.folder, stage=given.stage, dtype=huggingface.DTYPES.get(given.dtype), adapter=given.adapter
    )
    _note(loaded)
    generator = loaded.generator(
        max_new_tokens=given.max_new_tokens, temperature=given.temperature, top_k=given.top_k, top_p=given.top_p
    )
    if arrays is None:
        texts = _texts(loaded, generator, tokenizer, given)
        if processes.is_primary():
            print("\n".join(texts))
        return
    generate.check(arrays["input_ids"], arrays.get("attention_mask"), loaded.config.vocab_size)
    forward = _forward(loaded, arrays)
    generated = generator(loaded.params, arrays["input_ids"], arrays.get("attention_mask"), seed=given.seed)
    found = {**forward, "generated": generated}
    if processes.is_primary():
        with files.writing(given.out, "name another file with --out"), open(given.out, "wb") as file:
            np.savez(file, **found)  # type: ignore[arg-type]


def _parse(words: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser(
        prog="zerojax generate",
        description=arguments.described(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", help="a folder with config.json, safetensors and, for --prompt, tokenizer.json")
    add("--adapter", help="a folder of PEFT (adapter_config.json, adapter_model.safetensors) to apply to the model")
    add("--prompt", action="append", help="a text to continue; may be given several times")
    add(
        "--ids",
        help="an .npz file with input_ids and, if rows are padded, attention_mask; labels for an encoder-decoder",
    )
    add("--out", help="the .npz file to write: generated, and logits and loss of a forward pass")
    add("--max_new_tokens", type=int, default=64, help="the most tokens that are added (64)")
    add("--temperature", type=float, default=0.0, help="divides the scores; 0 takes the likeliest token (0)")
    add("--top_k", type=int, default=0, help="draws among this many tokens; 0: all (0)")
    add("--top_p", type=float, default=1.0, help="draws among the likeliest tokens of this probability in sum (1)")
    add("--seed", type=int, default=0, help="of the draws (0)")
    add("--stage", type=int, default=0, choices=range(4), help="ZeRO stage; 3 shards the weights over the devices (0)")
    add(
        "--dtype",
        default="auto",
        choices=("auto", *huggingface.DTYPES),
        help="of the weights; auto: as they are stored",
    )
    add("--emulate_devices", type=int, default=1, help="CPU devices to emulate if there is no accelerator (1)")
    add("--coordinator", help="host:port of process 0, to join processes without a scheduler")
    add("--num_processes", type=int, help="processes in the run")
    add("--process_id", type=int, help="this process's number, from 0")
    given = parser.parse_args(words)
    if bool(given.prompt) == bool(given.ids):
        raise UserError("--prompt, --ids: give one of them: a text, or a file of token ids")
    if bool(given.ids) != bool(given.out):
        raise UserError("--ids, --out: belong together: a file to read and one to write")
    if given.emulate_devices < 1:
        raise UserError(f"--emulate_devices: must be 1 or more, and is {given.emulate_devices}")
    if not 0 <= given.seed < 2**32:
        raise UserError(f"--seed: must be from 0 to 2**32 - 1, and is {given.seed}")
    return given


def _note(loaded: pretrained.Pretrained) -> None:
    """Names the folder's settings of generation that are not applied."""
    unread = pretrained.unread_settings(loaded.folder)
    if unread and processes.is_primary():
        file = folder_lib.GENERATION if loaded.folder.generation else folder_lib.CONFIG
        print(f"zerojax: note: {file} sets {', '.join(unread)}, which is not applied", file=sys.stderr)


def _tokenizer(folder: str) -> tokenizers.Tokenizer:
    path = pathlib.Path(folder) / TOKENIZER
    if not path.is_file():
        raise UserError(f"{path}: is missing, so --prompt cannot be read; save the tokenizer there, or give --ids")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path}: is not a tokenizer.json ({errors.one_line(error)}); save it again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _texts(loaded: pretrained.Pretrained, generator: Any, tokenizer: Any, given: argparse.Namespace) -> list[str]:
    """Returns the texts after the prompts; a decoder's begin with them."""
    if any(
        0xD800 <= ord(char) <= 0xDFFF for prompt in given.prompt for char in prompt
    ):  # bytes that Python could not decode
        raise UserError("--prompt: is not a text in UTF-8; correct it")
    rows = [tokenizer.encode(prompt).ids for prompt in given.prompt]
    if not all(rows):
        raise UserError("--prompt: a text without any token cannot be continued; give at least one word")
    longest = max(map(len, rows))
    ids = np.array([row + [0] * (longest - len(row)) for row in rows])
    mask = np.array([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    found = generator(loaded.params, ids, mask, seed=given.seed)
    kept = np.ones_like(found)
    if not loaded.family.is_encoder_decoder:
        kept[:, :longest] = mask
    return [tokenizer.decode(row[is_kept > 0].tolist()) for row, is_kept in zip(found, kept)]


def _read(path: str) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy, zipfile and zlib raise many kinds for damaged files
        raise UserError(f"--ids {path}: cannot be read as .npz; write it with numpy.savez") from error
    if "input_ids" not in arrays:
        raise UserError(f"--ids {path}: has no input_ids; it holds {', '.join(arrays) or 'nothing'}")
    return arrays


def _forward(loaded: pretrained.Pretrained, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the logits and the loss of a forward pass.

    A decoder's labels are its inputs. An encoder-decoder's are given; without them there is no forward pass.
    """
    names = [name for name in ("input_ids", "attention_mask") if name in arrays]
    batch: dict[str, np.ndarray] = {name: arrays[name] for name in names}
    if loaded.family.is_encoder_decoder:
        if "labels" not in arrays:
            return {}
        batch["labels"] = arrays["labels"]
    else:
        is_text = batch.get("attention_mask", np.ones_like(batch["input_ids"])) > 0
        batch["labels"] = np.where(is_text, batch["input_ids"], pretrained.NO_LABEL)
    _check_labels(batch["labels"], len(batch["input_ids"]), loaded.config.vocab_size)
    mesh, count = loaded.partition.mesh, len(batch["input_ids"])
    is_own = np.arange(count + -count % mesh_lib.ways(mesh)) < count

    def forward(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        labels = jnp.where(
            is_own[:, None], batch["labels"], pretrained.NO_LABEL
        )  # not those of the rows that fill the mesh
        logits = loaded.apply(params, batch)
        return logits, loaded.loss_of(logits, labels)

    placements = loaded.partition.placements
    sharded = where_used.where_used(forward, placements, blocks=loaded.blocks, heads=loaded.heads, remat="full")
    compiled = jax.jit(sharded, out_shardings=NamedSharding(mesh, P()))
    logits, loss = compiled(loaded.params, generate.sharded_rows(batch, mesh))
    return {"logits": np.asarray(logits)[:count], "loss": np.asarray(loss)}


def _check_labels(labels: np.ndarray, rows: int, vocab_size: int) -> None:
    if labels.ndim != 2 or not labels.size or len(labels) != rows or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"labels: must be integers [{rows}, length], and are {labels.dtype}{list(labels.shape)}")
    wrong = labels[((labels < 0) & (labels != pretrained.NO_LABEL)) | (labels >= vocab_size)]
    if wrong.size:
        raise UserError(
            f"labels: hold {wrong[0]}, and the model knows ids from 0 to {vocab_size - 1}; {pretrained.NO_LABEL} marks padding"
        )


if __name__ == "__main__":
    main()
