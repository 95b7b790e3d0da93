"""Writes a model as transformers does. This module exports weights as safetensors, with the files that belong to them.

The family defines names and layouts. Leaves are exported one at a time: each is gathered, cast, laid out as [out, in] and
written to its file. No host ever holds the full model.
"""

import contextlib
import functools
import json
import math
import os
import pathlib
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import bounded, errors, tree
from zerojax.errors import UserError
from zerojax.interop import layout, other_types, tensor_files
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.tree import Leaf, PyTree
from zerojax.zero.host import storage

SHARD_BYTES = 5 * 2**30
MORE_TEMPLATES = "additional_chat_templates"  # the folder of a tokenizer's further chat templates
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION, SPECIAL_TOKENS, CHAT_TEMPLATE = "generation_config.json", "special_tokens_map.json", "chat_template.jinja"
CONFIG, INDEX, ONE_FILE = "config.json", tensor_files.INDEX, tensor_files.ONE_FILE
# by name in a config
DTYPES: Mapping[str, Any] = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
# Vocabularies of tokenizers without a tokenizer.json: SentencePiece's, those of words or of merges, Mistral's and tiktoken's.
OTHER_TOKENIZERS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
)
# Files beside the weights that an export of an imported model carries along: settings of generation, and any tokenizer's.
CARRIED = (
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    SPECIAL_TOKENS,
    "added_tokens.json",
    *OTHER_TOKENIZERS,
    "target.spm",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
)


def export(
    params: PyTree,
    family: family_lib.Family,
    model: ModelConfig,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    dtype: DTypeLike | None = None,
    source: str | os.PathLike[str] | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    ends: Mapping[int, str] | None = None,
    template: str = "",
) -> None:
    """Writes safetensors and config.json for `from_pretrained` of the family's class in transformers.

    All processes must call it; the first one writes. The directory is created, or replaces an earlier export, only when it is
    complete.

    Args:
      params: the model's parameters, with any sharding and without padding. Leaves may be `Made`.
      family: the model's family.
      model: the model's config.
      directory: new, empty, or with an earlier export.
      max_shard_bytes: limit on the tensors of one file. A larger tensor gets its own file.
      dtype: of the tensors; None: each has that of its tensor in `source`, or bfloat16 without a source.
      source: the folder that the model was imported from. Its config.json is kept, and its files in `CARRIED` are copied. None for a model
        that was not imported.
      bos_token_id: the token that begins a text, for config.json; without `source`, or with a `tokenizer`.
      eos_token_id: the token that ends a text, likewise.
      tokenizer: the contents of tokenizer.json, in place of those of `source`. None for these, or none.
      ends: {id: name} of the tokens that end the answers that the model has learned, before those that the files name; None for no others.
      template: the chat template that was learned, in place of that of `source`; "" for none.

    Raises:
      UserError: a leaf is missing, unknown or of another shape, the directory holds other files, or the disk is full.
    """
    leaves = dict(tree.flatten(params, is_leaf=lambda node: isinstance(node, Made)))
    tensors = layout.written(family, model)
    _check(leaves, tensors)
    tensors = [member for tensor in tensors for member in tensor.members]
    dtypes = dtypes_of(tensors, dtype, source)
    shards = tensor_files.packed(tensors, lambda tensor: _nbytes(tensor, dtypes), max_shard_bytes)
    directory = pathlib.Path(directory).resolve()  # a link stays, and its folder is replaced
    is_primary = jax.process_index() == 0
    fetch = make_fetch(is_primary)
    texts = _texts(family.huggingface.write(model), source, dtypes, shards)
    carried = _carried(source)
    if source is None or tokenizer is not None:
        ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
        if GENERATION in carried:
            texts[GENERATION] = bounded.parse_json(bounded.read_bytes(carried[GENERATION])) | ids
        texts[CONFIG] = texts[CONFIG] | ids
        carried = {}
    if tokenizer is not None:
        texts |= {TOKENIZER: tokenizer, TOKENIZER_CONFIG: _tokenizer_config(tokenizer, texts[CONFIG])}
    if ends:
        _end_with(ends, texts, carried)
    with writing(directory) as partial:
        if is_primary:
            _prepare(directory, partial)
        _write(leaves, shards, dtypes, partial, fetch, is_primary)
        if is_primary:
            for name, content in texts.items():
                (partial / name).write_text(json.dumps(content, indent=2) + "\n")
            for name, path in carried.items():
                (partial / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, partial / name)
            if template:
                (partial / CHAT_TEMPLATE).write_text(template)
            tensor_files.write_checksums(partial)
            _replace(directory, partial)


@contextlib.contextmanager
def writing(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives the folder in which the files of `directory` are written. At the end all processes wait for each other.

    Raises:
      UserError: a file could not be written. What was written is deleted.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        yield partial
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = "no space left on the disk; free some" if errors.is_disk_full(error) else f"{error.strerror}; fix that"
        raise UserError(f"{directory}: export failed: {cause} or choose another directory") from error
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("zerojax export")


def _end_with(ends: Mapping[int, str], texts: dict[str, Any], carried: dict[str, pathlib.Path]) -> None:
    """Writes into the texts of files which tokens end an answer; files of the source that say otherwise are no longer carried."""
    for name in (CONFIG, GENERATION, TOKENIZER_CONFIG, SPECIAL_TOKENS):
        if name in carried:
            texts[name] = bounded.parse_json(bounded.read_bytes(carried.pop(name)))
        if name not in texts:
            continue
        if name in (CONFIG, GENERATION):
            known = texts[name].get("eos_token_id", texts[CONFIG].get("eos_token_id"))
            known = known if isinstance(known, list) else [] if known is None else [known]
            found = list(dict.fromkeys([*ends, *known]))
            texts[name] = texts[name] | {"eos_token_id": found if len(found) > 1 else found[0]}
        else:
            texts[name] = texts[name] | {"eos_token": next(iter(ends.values()))}


def _tokenizer_config(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tokenizer_config.json: transformers then reads tokenizer.json as it is, and not as its class for the model's family."""
    names = {token["id"]: token["content"] for token in tokenizer.get("added_tokens", ())}
    special = {role: names.get(config.get(f"{role}_id")) for role in ("bos_token", "eos_token", "pad_token")}
    known = {role: name for role, name in special.items() if name is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | known


def _check(leaves: Mapping[str, Any], tensors: list[layout.ModelTensor]) -> None:
    """Checks every leaf against the model."""
    shapes = {tensor.path: tensor.leaf_shape for tensor in tensors}
    for path in [*shapes, *leaves]:
        if path not in leaves or path not in shapes:
            what = "is missing" if path in shapes else "is not a weight of this model"
            raise UserError(f"params/{path}: {what}; export with the config that the weights were trained with")
    for path, expected in shapes.items():
        shape = tuple(leaves[path].shape)
        if shape != expected:
            raise UserError(
                f"params/{path}: has shape {shape}, but the model's config gives {expected}; "
                f"export with the config that the weights were trained with, unpadded"
            )


def dtypes_of(
    tensors: list[layout.ModelTensor], dtype: DTypeLike | None, source: str | os.PathLike[str] | None
) -> dict[str, np.dtype]:
    """Returns each tensor's dtype, by its name."""
    if dtype is not None or source is None:
        return {tensor.name: np.dtype(jnp.bfloat16 if dtype is None else dtype) for tensor in tensors}
    stored = tensor_files.read_folder(pathlib.Path(source))
    found = {
        name: tensor_files.DTYPES[entry.dtype] for name, entry in stored.items() if entry.dtype in tensor_files.DTYPES
    }
    usual = statistics.mode(found.values())
    return {tensor.name: found.get(tensor.name, usual) for tensor in tensors}


def _nbytes(tensor: layout.ModelTensor, dtypes: Mapping[str, np.dtype]) -> int:
    return dtypes[tensor.name].itemsize * math.prod(tensor.shape)


def _carried(source: str | os.PathLike[str] | None) -> dict[str, pathlib.Path]:
    """Returns the files beside the weights of `source` that an export copies, by their names in it."""
    if source is None:
        return {}
    folder = pathlib.Path(source)
    paths = [*(folder / name for name in CARRIED), *sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
    return {str(path.relative_to(folder)): path for path in paths if path.is_file()}


def _texts(
    written: Mapping[str, Any],
    source: str | os.PathLike[str] | None,
    dtypes: Mapping[str, np.dtype],
    shards: Mapping[str, list[layout.ModelTensor]],
) -> dict[str, Any]:
    """Returns the contents of config.json and, if there are several files, of their index, by file name."""
    config = dict(written)
    if source is not None:
        stored = bounded.parse_json(bounded.read_bytes(pathlib.Path(source) / CONFIG))
        config = {**(other_types.read_for_text(stored) or stored)}
        config["architectures"] = written["architectures"]  # a model without its head now has one
        config.pop("quantization_config", None)  # what is written is not quantized
        if config.get("tie_word_embeddings") and written.get("tie_word_embeddings") is False:
            ties = ("tie_word_embeddings", "scale_decoder_outputs")
            config |= {name: written[name] for name in ties if name in written}
    if "id2label" in written:  # those of the run
        config.pop("num_labels", None)
        config |= {name: written[name] for name in ("id2label", "label2id", "problem_type")}
    is_new = "dtype" in config  # transformers 5 has another name for it
    usual = statistics.mode(dtypes.values()).name
    texts: dict[str, Any] = {CONFIG: config | {"dtype" if is_new else "torch_dtype": usual}}
    if len(shards) > 1:
        total = sum(_nbytes(tensor, dtypes) for group in shards.values() for tensor in group)
        files = {tensor.name: file_name for file_name, group in shards.items() for tensor in group}
        texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": files}
    return texts


class Made(NamedTuple):
    """A leaf that is made when it is written, so that few exist at a time.

    Attributes:
      shape: its shape.
      parts: a function that returns the arrays that it is made of; of a stack, all have its first dim.
      make: f(parts gathered, dtype) -> the leaf, or the entry of which the parts are. The primary process alone calls it: a program over
        several devices could round otherwise than one over others.
    """

    shape: tuple[int, ...]
    parts: Callable[[], PyTree]
    make: Callable[[PyTree, np.dtype], np.ndarray]


def make_fetch(is_primary: bool) -> Callable[..., np.ndarray | None]:
    """Returns fetch(leaf, dtype, part=None), which gathers one leaf, or an entry of its first dim, in a dtype and, on the primary process,
    copies it to the host."""
    # The last leaf of which a part was fetched, and its arrays on the device: the next part is often its own
    known: list[Any] = [None, None]

    @functools.partial(jax.jit, static_argnums=1)
    def cast(leaf: jax.Array, dtype: np.dtype, part: int | None) -> jax.Array:
        return jnp.copy((leaf if part is None else leaf[part]).astype(dtype))

    def on_device(leaf: Leaf | Made, part: int | None) -> PyTree:
        if part is None or known[0] is not leaf:
            known[:] = leaf, storage.to_device(leaf.parts() if isinstance(leaf, Made) else leaf)
        found = known[1]
        if part is None:
            known[:] = None, None
        return found

    def gathered(leaf: Leaf, dtype: np.dtype, part: int | None) -> Any:
        if not isinstance(leaf, jax.Array):
            return np.asarray(leaf if part is None else leaf[part]).astype(dtype)
        # Always a new array: an array caches its numpy copy, and the copies would add up to the full model.
        leaf = cast(leaf, dtype, part)
        if leaf.is_fully_addressable:
            return leaf
        return jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, P())).addressable_data(0)

    def fetch(leaf: Leaf | Made, dtype: np.dtype, part: int | None = None) -> np.ndarray | None:
        near = on_device(leaf, part)
        if isinstance(leaf, Made):
            parts = jax.tree.map(lambda own: gathered(own, own.dtype, part), near)
            return leaf.make(parts, dtype) if is_primary else None
        found = gathered(near, dtype, part)
        return np.asarray(found) if is_primary else None

    return fetch


def _write(
    leaves: Mapping[str, Any],
    shards: Mapping[str, list[layout.ModelTensor]],
    dtypes: Mapping[str, np.dtype],
    partial: pathlib.Path,
    fetch: Callable[..., np.ndarray | None],
    is_primary: bool,
) -> None:
    """Writes the weights' files. All processes take part in gathering each leaf."""
    if not is_primary:
        for tensor in (tensor for group in shards.values() for tensor in group):
            fetch(leaves[tensor.path], dtypes[tensor.name], tensor.part)
        return
    for file_name, group in shards.items():
        with open(partial / file_name, "wb") as file:
            tensor_files.write_header(file, {tensor.name: (tensor.shape, dtypes[tensor.name]) for tensor in group})
            for tensor in group:
                array = fetch(leaves[tensor.path], dtypes[tensor.name], tensor.part)
                assert array is not None
                write_tensor(file, tensor, array)


def write_tensor(file: BinaryIO, tensor: layout.ModelTensor, array: np.ndarray) -> None:
    """Writes one array as Hugging Face's tensor in row-major order."""
    file.write(tensor.to_theirs(array).view(np.uint8).data)


def _prepare(directory: pathlib.Path, partial: pathlib.Path) -> None:
    """Creates the empty directory `partial`, after checking the contents of the final directory."""
    old = _old(directory)
    if old.exists() and not directory.exists():
        old.rename(directory)  # an export was killed between its two renames
    if directory.is_mount():
        raise UserError(f"{directory}: a file system is mounted there, so it cannot be replaced; name a folder in it")
    if directory.exists():
        for entry in sorted(directory.iterdir()):
            is_ours = entry.name in (CONFIG, INDEX, tensor_files.CHECKSUMS, MORE_TEMPLATES, *CARRIED) or entry.match(
                "model*.safetensors"
            )
            if not is_ours:
                raise UserError(
                    f"{directory}: holds {entry.name}, which no export wrote; move it away or choose another directory"
                )
    for leftover in (partial, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)


def _replace(directory: pathlib.Path, partial: pathlib.Path) -> None:
    """Renames the complete export to its final name, and deletes an earlier export."""
    old = _old(directory)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    if old.exists():
        shutil.rmtree(old)


def _old(directory: pathlib.Path) -> pathlib.Path:
    return directory.with_name(f".{directory.name}.replaced")
