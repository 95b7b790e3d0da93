"""Continues prompts with a model that transformers saved. This module is the command line `zerojax generate`.

zerojax generate FOLDER --prompt "Once upon a time" --max_new_tokens 40    prints the text
zerojax generate FOLDER --file IN.jsonl --out OUT.jsonl    answers each example by the templates of the run that trained the model
zerojax generate FOLDER --ids IN.npz --out OUT.npz --stage 3    for scripts: token ids in; logits and token ids out
"""

import argparse
import contextlib
import io
import pathlib
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import bounded, errors, files
from zerojax import mesh as mesh_lib
from zerojax.commands import arguments
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import records, tasks
from zerojax.errors import UserError
from zerojax.inference import generate
from zerojax.inference import sampling as sampling_lib
from zerojax.inference.engine import engine as engine_lib
from zerojax.interop import folder as folder_lib
from zerojax.interop import hub, huggingface, pretrained
from zerojax.launch import devices, processes, program_cache
from zerojax.trainer import examples, setting_names
from zerojax.trainer.tuning import answers, predictions
from zerojax.tree import PyTree
from zerojax.zero.blocks import where_used

TOKENIZER = "tokenizer.json"
NEW_TOKENS = 64  # that are added if the user names no number
MOST_BYTES = 2**28  # of the arrays of token ids
COMPILING = "compiling, which may take a minute"


@arguments.command
def main() -> None:
    """Prints texts, or writes arrays. A UserError prints one line and ends with status 2. A process that fails waits for no other."""
    try:
        _generate()
    except UserError as error:
        if not jax.distributed.is_initialized():
            raise
        print(f"zerojax: {error}", file=sys.stderr, flush=True)
        processes.leave(2)


def _generate() -> None:
    given = _parse(sys.argv[1:])
    joined_by = given.coordinator, given.num_processes, given.process_id
    kept = program_cache.begin(is_one_host=processes.are_here(*joined_by))
    devices.emulate_cpu_devices(given.emulate_devices)
    processes.initialize(*joined_by)
    devices.start()
    if kept:
        _note(kept, "")
    if given.file:
        return _answer_file(given)
    arrays = _read(given.ids) if given.ids else None
    given.folder = hub.fetched(given.folder)
    has_texts = given.prompt and pathlib.Path(given.folder).is_dir()
    tokenizer, cleans = _tokenizer(given) if has_texts else (None, False)
    loaded = _load(given)
    if loaded.family.is_classifier:
        return _classify(loaded, tokenizer, arrays, given)
    if arrays is None:
        texts = _texts(loaded, tokenizer, given, cleans)
        if processes.is_primary():
            print("\n".join(texts))
        return
    _, is_token = generate.check(arrays["input_ids"], arrays.get("attention_mask"), loaded.config.vocab_size)
    generator = _generator(loaded, given, _new_tokens(loaded.folder, given, int(is_token.sum(axis=1).max())))
    forward = _forward(loaded, arrays)
    _note(COMPILING, "")
    generated = generator(loaded.params, arrays["input_ids"], arrays.get("attention_mask"), seed=given.seed)
    found = {**forward, "generated": generated}
    if processes.is_primary():
        _write_arrays(given.out, found)


def _classify(
    loaded: pretrained.Pretrained, tokenizer: Any, arrays: dict[str, np.ndarray] | None, given: argparse.Namespace
) -> None:
    """Prints the class of each --prompt, or writes the classes of --ids with their scores."""
    if arrays is None:
        scores = loaded.classifier()(loaded.params, *_prompts(tokenizer, given))
        if processes.is_primary():
            print("\n".join(loaded.config.classes[number] for number in scores.argmax(axis=1)))
        return
    names = ("input_ids", "attention_mask", "token_type_ids")
    scores = loaded.classifier()(loaded.params, *(arrays.get(name) for name in names))
    found = {"generated": scores.argmax(axis=1).astype(np.int32), "logits": scores}
    if (labels := arrays.get("labels")) is not None:
        _check_labels(labels[:, None] if labels.ndim == 1 else labels, len(scores), len(loaded.config.classes))
        found["loss"] = np.asarray(loaded.loss_of(jnp.asarray(scores), jnp.asarray(labels)))
    if processes.is_primary():
        _write_arrays(given.out, found)


def _write_arrays(path: str, found: dict[str, Any]) -> None:
    """Writes the file of --out."""
    with files.writing(path, "name another file with --out"), files.replacing(path) as new, open(new, "wb") as file:
        np.savez(file, **found)


def _check_no_text(given: argparse.Namespace) -> None:
    """Refuses what a classifier does not read."""
    usual = {"max_new_tokens": None, "temperature": 0.0, "top_k": 0, "top_p": 1.0}
    for name, default in usual.items():
        if getattr(given, name) != default:
            raise UserError(f"--{name}: the model is a classifier, which writes no text; omit it")


def _load(given: argparse.Namespace) -> pretrained.Pretrained:
    """Returns the model, and names its settings of generation that are not applied."""
    dtype = huggingface.DTYPES.get(given.dtype)
    if line := folder_lib.reading(given.folder):
        _note(line, "")
    loaded = pretrained.load_huggingface(given.folder, stage=given.stage, dtype=dtype, adapter=given.adapter)
    if loaded.family.is_classifier:
        _check_no_text(given)
    unread = pretrained.unread_settings(loaded.folder)
    if unread:
        file = folder_lib.GENERATION if loaded.folder.generation else folder_lib.CONFIG
        _note(f"{file} sets {', '.join(unread)}, which is not applied")
    return loaded


def _generator(loaded: pretrained.Pretrained, given: argparse.Namespace, new_tokens: int) -> Any:
    how = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p")}
    return loaded.generator(max_new_tokens=new_tokens, **how)


def _new_tokens(folder: folder_lib.Folder, given: argparse.Namespace, longest: int, default: int = NEW_TOKENS) -> int:
    """Returns the most tokens that are added to prompts of `longest` tokens: those given, or as many of the default as the model has
    positions for."""
    if given.max_new_tokens is not None:
        return given.max_new_tokens
    positions = folder.positions
    room = default if not positions else positions - (1 if folder.family.is_encoder_decoder else longest)
    if not 0 < room < default:
        return default  # where there is no room at all, the generator refuses the prompts
    _note(f"{room} tokens are added at most, and not {default}: the model has {positions} positions")
    return room


def _answer_file(given: argparse.Namespace) -> None:
    """Answers the examples of --file, and writes them with the answers to --out."""
    run = pathlib.Path(given.run) if given.run else predictions.run_of(given.adapter, given.folder)
    how = predictions.asking(run, given.template)
    predictions.check_out(given.out, given.file)
    source = records.Files(given.file, "--file")
    given.folder = hub.fetched(given.folder)
    folder = folder_lib.open_folder(given.folder)
    tokenizer = tokenizer_lib.load_tokenizer(str(_tokenizer_file(given)))
    # A decoder's prompt that is too long is cut.
    is_writer = not folder.family.is_classifier
    new_tokens = _new_tokens(folder, given, 1, how.answer_len or NEW_TOKENS) if is_writer else 1
    try:
        asked = predictions.encode(source, given.file, how, folder, tokenizer, new_tokens)
    except UserError as error:
        line = str(error).removeprefix("task='seq2seq': " if run is None else "")
        keys = setting_names.KEYS | ({"prompt": "--template"} if given.template else {})
        raise UserError(setting_names.in_config(line, keys)) from error
    with contextlib.ExitStack() as stack:
        is_primary = processes.is_primary()
        file = stack.enter_context(predictions.replacing(pathlib.Path(given.out))) if is_primary else None
        if run is not None:
            _note(f"the prompts are those of the run in {run}")
        for note in asked.notes:
            _note(setting_names.in_config(note))
        loaded = _load(given)
        told = predictions.write(
            source,
            asked,
            _answered(loaded, asked, new_tokens, given),
            _text_of(loaded, tokenizer, asked.ends),
            file=file,
        )
    if is_primary:
        print(f"{given.out}: {told}")


def _text_of(
    loaded: pretrained.Pretrained, tokenizer: tokenizer_lib.Tokenizer, ends: tuple[int, ...]
) -> Callable[[np.ndarray], str]:
    """Returns the function from an example's new tokens, or its class, to its answer."""
    if loaded.family.is_classifier:
        return lambda row: loaded.config.classes[row].strip()
    special = examples.special_tokens(loaded.family, loaded.folder, tokenizer, ends)
    return lambda row: answers.text_of(tokenizer, special.stops, row)


def _answered(
    loaded: pretrained.Pretrained, asked: tasks.Asked, new_tokens: int, given: argparse.Namespace
) -> Iterator[np.ndarray]:
    """Yields the new tokens of each prompt, or its class. `batch_size` are answered at once."""
    if loaded.family.is_classifier:
        classifier = loaded.classifier()
        return predictions.in_batches(
            asked.prompts,
            lambda ids, mask: classifier(loaded.params, ids, mask).argmax(axis=1),
            most=loaded.folder.positions or 1 << 30,
            batch_size=given.batch_size,
        )
    return _by_engine(loaded, asked, new_tokens, given)


def _by_engine(
    loaded: pretrained.Pretrained, asked: tasks.Asked, new_tokens: int, given: argparse.Namespace
) -> Iterator[np.ndarray]:
    """Yields the new tokens of each prompt, which depend on the seed and the prompt's number, not on the others."""
    sampling_lib.Sampling(given.temperature, given.top_k, given.top_p)  # refuses what cannot take effect
    prompts = asked.prompts
    longest = max(map(len, prompts))
    text = (1 if loaded.family.is_encoder_decoder else longest) + new_tokens
    generate.check_length(loaded.family, loaded.config, max(text, longest))
    ways = mesh_lib.size(loaded.partition.mesh, mesh_lib.SUMMED)  # over which rows are sharded
    slots = min(given.batch_size, len(prompts))
    how: dict[str, Any] = {"is_gathered": True, "together": ways} if ways > 1 else {}
    engine = engine_lib.Engine(loaded, slots=slots, max_len=text, max_inputs=longest, **how)
    settings = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p", "seed")}
    _note(COMPILING, "")
    requests = [
        engine.submit(prompt.tolist(), max_tokens=new_tokens, stream=number, stop_ids=asked.ends, **settings)
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        while not request.finish:
            engine.step()
        yield np.asarray(request.tokens)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax generate", doc=__doc__)
    add = parser.add_argument
    add(
        "folder",
        help="a folder with config.json, safetensors and, for --prompt, tokenizer.json; or a name on the Hugging Face hub",
    )
    add("--adapter", help="a folder of PEFT (adapter_config.json, adapter_model.safetensors) to apply to the model")
    add("--prompt", action="append", help="a text to continue; may be given several times")
    add(
        "--ids",
        help="an .npz file with input_ids and, if rows are padded, attention_mask; labels for an encoder-decoder or a classifier",
    )
    add("--file", help="examples to answer: .jsonl, .json, .csv, .tsv or .parquet; several with * in the name")
    add(
        "--run",
        help="the workdir whose config.json has the templates of --file's prompts; by default that of the adapter or of the model",
    )
    add("--template", help="the template of --file's prompts, with fields in braces; by default the run's")
    add("--batch_size", type=int, default=16, help="examples of --file that are answered at once (16)")
    add("--out", help="the file to write: JSON lines for --file; for --ids an .npz of generated, logits and loss")
    add(
        "--max_new_tokens",
        type=int,
        help=f"the most tokens that are added ({NEW_TOKENS}, or as many as fit; for --file the run's config.data.answer_len)",
    )
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
    if [bool(given.prompt), bool(given.ids), bool(given.file)].count(True) != 1:
        raise UserError("--prompt, --ids, --file: give one of them: a text, a file of token ids, or a file of examples")
    if bool(given.ids or given.file) != bool(given.out):
        raise UserError("--ids or --file, and --out: belong together: a file to read and one to write")
    if given.out:
        files.check_file(given.out, "--out")
    if not given.file and (given.run or given.template):
        raise UserError("--run, --template: are of --file's prompts; a --prompt is taken as it is")
    if given.batch_size < 1:
        raise UserError(f"--batch_size: must be 1 or more, and is {given.batch_size}")
    if given.emulate_devices < 1:
        raise UserError(f"--emulate_devices: must be 1 or more, and is {given.emulate_devices}")
    if not 0 <= given.seed < 2**32:
        raise UserError(f"--seed: must be from 0 to 2**32 - 1, and is {given.seed}")
    return given


def _note(line: str, kind: str = "note: ") -> None:
    """Prints a line on the primary process, beside the results."""
    if processes.is_primary():
        print(f"zerojax: {kind}{line}", file=sys.stderr, flush=True)


def _tokenizer_file(given: argparse.Namespace) -> pathlib.Path:
    """Returns the tokenizer's file: that of the adapter's folder, if the run that wrote it had another one than the model."""
    own = pathlib.Path(given.adapter or "") / TOKENIZER
    if given.adapter and own.is_file():
        return own
    path = pathlib.Path(given.folder) / TOKENIZER
    folder_lib.check_folder(path.parent)
    if not path.is_file():
        raise UserError(f"{path}: is missing, so texts cannot be read; save the tokenizer there, or give --ids")
    return path


def _tokenizer(given: argparse.Namespace) -> tuple[Any, bool]:
    path = _tokenizer_file(given)
    return tokenizer_lib.read_model(path, f"{path}:")


def _texts(loaded: pretrained.Pretrained, tokenizer: Any, given: argparse.Namespace, cleans: bool) -> list[str]:
    """Returns the texts after the prompts; a decoder's begin with them."""
    ids, mask = _prompts(tokenizer, given)
    longest = ids.shape[1]
    generator = _generator(loaded, given, _new_tokens(loaded.folder, given, longest))
    _note(COMPILING, "")
    found = generator(loaded.params, ids, mask, seed=given.seed)
    kept = np.ones_like(found)
    if not loaded.family.is_encoder_decoder:
        kept[:, :longest] = mask
    with tokenizer_lib.refused("the tokenizer cannot decode an answer", "mend the tokenizer, or give --ids"):
        decoded = [tokenizer.decode(row[is_kept > 0].tolist()) for row, is_kept in zip(found, kept)]
        return [*map(tokenizer_lib.cleaned, decoded)] if cleans else decoded


def _prompts(tokenizer: Any, given: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids and the mask of the prompts, padded at their ends."""
    # Bytes that Python could not decode
    if any(0xD800 <= ord(char) <= 0xDFFF for prompt in given.prompt for char in prompt):
        raise UserError("--prompt: is not a text in UTF-8; correct it")
    with tokenizer_lib.refused("--prompt: the tokenizer cannot encode it", "shorten the text, or mend the tokenizer"):
        rows = [tokenizer.encode(prompt).ids for prompt in given.prompt]
    if not all(rows):
        raise UserError("--prompt: a text without any token cannot be read; give at least one word")
    longest = max(map(len, rows))
    ids = np.array([row + [0] * (longest - len(row)) for row in rows])
    return ids, np.array([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def _read(path: str) -> dict[str, np.ndarray]:
    try:
        with bounded.open_file(path, MOST_BYTES) as file, zipfile.ZipFile(file) as archive:
            if (size := sum(info.file_size for info in archive.infolist())) > MOST_BYTES:
                raise ValueError(f"its arrays have {size} bytes, and at most {MOST_BYTES} are read")
            if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in archive.infolist()):
                raise ValueError("it is compressed otherwise than numpy.savez does")
            arrays = {info.filename.removesuffix(".npy"): _array(archive, info) for info in archive.infolist()}
    except Exception as error:  # numpy, zipfile and zlib raise many kinds for damaged files
        why = getattr(error, "strerror", None) or errors.one_line(error, 160)
        raise UserError(f"--ids {path}: cannot be read as .npz ({why}); write it with numpy.savez") from error
    if "input_ids" not in arrays:
        raise UserError(f"--ids {path}: has no input_ids; it holds {', '.join(arrays) or 'nothing'}")
    return arrays


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Returns an array of an .npz file. Only the bytes that the archive's directory tells are unpacked."""
    with archive.open(info) as file:
        return np.load(io.BytesIO(file.read(info.file_size)), allow_pickle=False)


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
    is_own = np.arange(count + -count % mesh_lib.size(mesh, mesh_lib.SUMMED)) < count

    def forward(params: PyTree, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # Rows that fill the mesh have no labels
        labels = jnp.where(is_own[:, None], batch["labels"], pretrained.NO_LABEL)
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
