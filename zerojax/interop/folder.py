"""A model's folder as transformers writes it. This module checks it against its family, and reads its weights into their shardings.

Every process reads the bytes of its own devices' shards: one shard at a time, a few rows at a time, in the dtype that is stored, straight
into the layout and the dtype that are wanted. No process ever holds a whole model.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import re
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from zerojax import bounded, display, errors, files, tree
from zerojax.checkpoint import files as step_files
from zerojax.errors import UserError
from zerojax.interop import fp8_blocks, hub, layout, mxfp4, other_forms, other_types, tensor_files
from zerojax.models import families
from zerojax.models import family as family_lib
from zerojax.tree import PyTree

CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
EXPORT = "export"  # of a run's folder
_SUFFIXES = (".json", ".safetensors", ".jinja")  # of the files of a model, an adapter and a tokenizer
LARGE = 2**30  # bytes of a folder that takes a while to read
READERS = 8  # threads, each of which reads a shard
SAMPLES, SAMPLE_BYTES = 8, 512  # of a tensor, for the fingerprint of a folder
MOST_BYTES = 2**30  # of the shards that are read at a time, unless one shard is larger


Entry = tensor_files.Entry | mxfp4.PackedEntry | fp8_blocks.ScaledEntry
_PACKED = (mxfp4.PackedEntry, fp8_blocks.ScaledEntry)


def stored_dtype(entry: Entry) -> np.dtype:
    """Returns the dtype of a tensor of weights; of a packed one bfloat16, which holds all numbers of MXFP4, and is that of DeepSeek-V3."""
    return tensor_files.DTYPES["BF16" if isinstance(entry, _PACKED) else entry.dtype]


@dataclasses.dataclass(frozen=True)
class TensorFiles:
    """A checked folder of tensors.

    Attributes:
      path: the folder.
      entries: each tensor in the files, by name. Optional ones of a model may be missing.
      first_odd: taken by the first reading that finds NaN or infinity, which warns.
      first_read: taken by the first reading, which compares checksums.
    """

    path: pathlib.Path
    entries: Mapping[str, Any]
    first_odd: threading.Lock = dataclasses.field(default_factory=threading.Lock, compare=False, kw_only=True)
    first_read: threading.Lock = dataclasses.field(default_factory=threading.Lock, compare=False, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Folder(TensorFiles):
    """The folder of a model."""

    raw: Mapping[str, Any]  # the contents of config.json
    generation: Mapping[str, Any]  # the contents of generation_config.json; {} if there is none
    family: family_lib.Family  # the model's family
    model: Any  # the model's config

    @property
    def dtype(self) -> np.dtype:
        """Returns the dtype of most weights: that of the largest tensor."""
        largest = max(self.entries.values(), key=lambda entry: int(np.prod(entry.shape)))
        return stored_dtype(largest)

    @property
    def drawn(self) -> tuple[str, ...]:
        """Returns the names of the tensors that the files lack, and that are drawn."""
        tensors = layout.tensors(self.family, self.model)
        return tuple(t.name for t in tensors if t.entry.drawn and t.name not in self.entries)

    @property
    def positions(self) -> int | None:
        """Returns how many positions the model was made for; None if its config does not tell."""
        return self.family.positions(self.model) or self.model.max_seq_len or None

    def setting(self, name: str) -> Any:
        """Returns a setting of generation: from generation_config.json, or else from config.json; None if neither has it."""
        value = self.generation.get(name)
        return self.raw.get(name) if value is None else value


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Reads the configs and the headers of a folder, and checks that its tensors are those of its model. Reads no weights.

    The path may be the name of a model on the Hugging Face hub (`hub.fetched`).

    Raises:
      UserError: a file is missing, damaged or pickled; the architecture is unknown; or a tensor is missing, unknown, or of another shape
        or dtype. The line names it.
    """
    path = pathlib.Path(hub.fetched(path))
    check_folder(path)
    raw = read_json(path / CONFIG)
    text = other_types.read_for_text(raw)
    if has_images := (kind := text.get("model_type", "")) in families.MODEL_TYPES:
        raw = {**text, "architectures": list(families.MODEL_TYPES[kind].huggingface.architectures[kind][:1])}
    family, raw = _family(path, raw), other_types.by_own_names(raw)
    try:
        stored = tensor_files.read_folder(path)
        entries = _canonical(family, raw, _of_text(stored) if has_images else stored)
    except UserError as error:
        if not str(error).startswith(CONFIG):
            raise
        raise UserError(f"{path}/{error}") from error
    with errors.below(f"{path}/"):
        model = family.huggingface.read(raw, entries)
    _check(path, layout.tensors(family, model), entries, family.huggingface.prefix)
    generation = read_json(path / GENERATION) if (path / GENERATION).is_file() else {}
    return Folder(path, entries, raw, generation, family, model)


def reading(path: str | os.PathLike[str]) -> str:
    """Returns the line to show before a large folder is read, which takes a while; "" for another."""
    size = files.folder_bytes(path) if os.path.isdir(path) else 0
    return f"reading {os.fspath(path)}, {display.human(size)}" if size > LARGE else ""


def check_folder(path: pathlib.Path, config: str = CONFIG) -> None:
    """Checks that a path may be the folder of a model, or with ADAPTER that of an adapter.

    Raises:
      UserError: it is no folder, or that of the other, of a run or of another program (`other_forms`), and the line says which to name; or
        a file is none, such as a link to one that is gone, and would be taken for one that the folder lacks. A folder of none of them
        passes.
    """
    if not os.path.isdir(path):  # not `path.is_dir`, which raises for a name that is too long
        by = "PEFT" if config == ADAPTER else "transformers"
        why = other_forms.told(path, ()) or f"is not a folder; name one that save_pretrained of {by} wrote"
        raise UserError(f"{path}: {why}")
    for entry in sorted(path.iterdir()):
        if entry.suffix in _SUFFIXES and not entry.is_file():
            with files.reading(entry, "copy the folder again"):
                bounded.open_file(entry).close()
    if (path / EXPORT / config).is_file() and not any(path.glob("*.safetensors")):
        raise UserError(f"{path}: is the folder of a run; name its export, {path / EXPORT}")
    if (path / step_files.CARD).is_file() and not any(path.glob("*.safetensors")):
        if (path / step_files.SIZES).is_file():
            raise UserError(f"{path}: is a checkpoint of a run; name the run's export, a folder of safetensors")
        if config == CONFIG and (path / EXPORT / ADAPTER).is_file():
            raise UserError(
                f"{path}: is the folder of a run that exported an adapter; name the folder of its model, and {path / EXPORT} as the adapter"
            )
        raise UserError(
            f"{path}: is the folder of a run that exported no model; run it with an export format, and name {path / EXPORT}"
        )
    if config == CONFIG and (path / ADAPTER).is_file() and not (path / CONFIG).is_file():
        raise UserError(
            f"{path}: holds an adapter and no model; name the folder of its model, and this one as the adapter"
        )
    if not (path / config).is_file() or (config == CONFIG and not any(path.glob("*.safetensors"))):
        if any((step / step_files.SIZES).is_file() for step in path.iterdir()):
            raise UserError(f"{path}: holds the checkpoints of a run; name the run's export, a folder of safetensors")
        if why := other_forms.told(path, (config,)):
            raise UserError(f"{path}: {why}")


def fingerprint(folder: Folder) -> str:
    """Returns a hash of a folder's tensors: their names, dtypes and shapes, and a sample of the bytes of each.

    It reads 4 KiB of a tensor, so it tells models of one shape apart, but not two that differ in a few weights.
    """
    found = hashlib.sha256()
    for name, entry in sorted(folder.entries.items()):
        found.update(f"{name} {entry.dtype} {entry.shape}".encode())
        nbytes = entry.nbytes
        with open(entry.file, "rb") as file:
            for part in range(SAMPLES):
                file.seek(entry.start + nbytes * part // SAMPLES)
                found.update(file.read(min(SAMPLE_BYTES, nbytes)))
    return found.hexdigest()[:16]


def read_params(folder: Folder, abstract: PyTree) -> PyTree:
    """Reads the weights into their shardings. All processes must call it, and each reads its own shards.

    Args:
      folder: from `open_folder`.
      abstract: ShapeDtypeStructs with shardings, in the structure of the model's params. Shapes may be padded at their ends (with 0).

    Returns:
      The params, as `abstract` describes them.
    """
    tensors = {tensor.path: tensor for tensor in layout.tensors(folder.family, folder.model)}
    found = read_leaves(folder, tensors, dict(tree.flatten(abstract)))
    return tree.map_with_path(lambda path, _: found[path], abstract)


def read_leaves(
    source: TensorFiles, tensors: Mapping[str, layout.ModelTensor], abstract: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Reads leaves into their shardings. All processes must call it, and each reads its own shards.

    Args:
      source: the files.
      tensors: the tensor of each leaf, by path.
      abstract: ShapeDtypeStructs with shardings, by path.

    Raises:
      UserError: see `check_files`.
    """
    check_files(source)
    budget = _Budget(MOST_BYTES)
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        reading = {
            path: pool.submit(_read_leaf, read_shard, source, tensors[path], like, budget)
            for path, like in abstract.items()
        }
        return {path: future.result() for path, future in reading.items()}


def read_packed(folder: Folder, tensor: layout.ModelTensor, parts: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads a matrix that the files hold in MXFP4 as it is (`mxfp4.read_packed`), into the shardings of `parts`, by their names."""
    check_files(folder)
    entry, budget = folder.entries[tensor.name], _Budget(MOST_BYTES)
    assert isinstance(entry, mxfp4.PackedEntry)

    def read(name: str, *given: Any) -> np.ndarray:
        return mxfp4.read_packed(entry, name, tensor.leaf_shape, given[2])

    return {
        name: _read_leaf(functools.partial(read, name), folder, tensor, like, budget) for name, like in parts.items()
    }


def read_blocks(
    folder: Folder, tensors: Mapping[str, layout.ModelTensor], parts: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Reads those of the parts `PATH/fp8_block` and `PATH/block_scales` of kernels that the files hold so, as they are (`read_leaves`)."""
    stored = dataclasses.replace(folder, entries=fp8_blocks.as_stored(folder.entries))
    found = {path: fp8_blocks.part_of(tensors[path.rpartition("/")[0]], path.rpartition("/")[2]) for path in parts}
    there = {path for path, part in found.items() if all(member.name in stored.entries for member in part.members)}
    return read_leaves(stored, found, {path: like for path, like in parts.items() if path in there})


def check_files(source: TensorFiles) -> None:
    """Compares the files with the checksums beside them, if any, before the first reading. Each process compares some of them.

    Raises:
      UserError: a file is another than it was when it was written.
    """
    if source.first_read.acquire(blocking=False):
        entries = list(source.entries.values())
        paths = {entry.file for entry in entries + [one.scales for one in entries if isinstance(one, _PACKED)]}
        tensor_files.check(paths, slice(jax.process_index(), None, jax.process_count()))


def read_shard(
    folder: TensorFiles, tensor: layout.ModelTensor, index: tuple[slice, ...], dtype: DTypeLike
) -> np.ndarray:
    """Returns a slice of one leaf, in our layout. Parts of the slice beyond the leaf's shape are 0.

    The first slice of the files that holds NaN or infinity is warned of. All weights pass here, and only those that a process reads anyway
    are checked.

    Raises:
      UserError: that slice holds nothing but NaN.
    """
    bounds = [part.indices(1 << 62)[:2] for part in index]
    if (members := tensor.members) != [tensor]:  # an expert each
        shape = [stop - start for start, stop in bounds]
        found = np.zeros(shape, dtype)
        for place, member in enumerate(members[slice(*bounds[0])]):
            found[place] = read_shard(folder, member, index[1:], dtype)
        return found
    lengths = [stop - start for start, stop in bounds]
    inside = [slice(min(start, size), min(stop, size)) for (start, stop), size in zip(bounds, tensor.leaf_shape)]
    entry = folder.entries.get(tensor.name)
    if entry is None and not tensor.entry.drawn:
        return np.zeros(lengths, dtype)
    found = _draw(tensor)[tuple(inside)].astype(dtype) if entry is None else _read_slice(entry, tensor, inside, dtype)
    if entry is not None and not tensor_files.is_finite(found) and folder.first_odd.acquire(blocking=False):
        _warn_of_odd(entry, tensor, inside, found.dtype)
    extra = [(0, length - size) for length, size in zip(lengths, found.shape)]
    return np.pad(found, extra) if any(after for _, after in extra) else found


def _read_slice(entry: Entry, tensor: layout.ModelTensor, index: list[slice], dtype: DTypeLike) -> np.ndarray:
    if isinstance(entry, mxfp4.PackedEntry):
        return mxfp4.read(entry, tensor.leaf_shape, index, dtype)
    read = (
        functools.partial(fp8_blocks.read, entry)
        if isinstance(entry, fp8_blocks.ScaledEntry)
        else functools.partial(tensor_files.read, entry)
    )
    return read(tensor.view, tensor.source_index(index), tensor.order, dtype)


def _draw(tensor: layout.ModelTensor) -> np.ndarray:
    """Returns a leaf that the files lack. It is the same on all processes."""
    random = np.random.RandomState(np.random.PCG64(zlib.crc32(tensor.name.encode())))
    return random.standard_normal(tensor.leaf_shape) * tensor.entry.drawn


def _warn_of_odd(entry: Entry, tensor: layout.ModelTensor, index: list[slice], dtype: np.dtype) -> None:
    """Warns of NaN or infinity in a slice of a leaf, in the file or as `dtype`. Refuses one of NaN alone."""
    found = _read_slice(entry, tensor, index, stored_dtype(entry))
    if np.isnan(found).all():
        raise UserError(
            f"{entry.file}: tensor {tensor.name} holds nothing but NaN, so the model computes nothing else; copy the file again, or choose "
            "another folder"
        )
    line = (
        f"holds numbers beyond the range of {dtype}, which become infinity; choose bf16 or fp32"
        if tensor_files.is_finite(found)
        else "holds NaN or infinity, and so may what the model computes; copy the file again, or choose another folder"
    )
    warnings.warn(f"{entry.file}: tensor {tensor.name} {line}", stacklevel=3)


class _Budget:
    """Bytes that threads share. A thread waits until its bytes are free, or until it is alone if it needs more than there are."""

    def __init__(self, total: int):
        self._total = self._free = total
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        nbytes = min(nbytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free += nbytes
                self._changed.notify_all()


def _read_leaf(
    read: Callable[..., np.ndarray], folder: TensorFiles, tensor: layout.ModelTensor, like: PyTree, budget: _Budget
) -> jax.Array:
    """Reads this process's shards of one leaf. A shard that several devices hold is read once."""
    devices: dict[tuple, list] = {}
    for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
        full = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, like.shape))
        devices.setdefault(tuple((part.start, part.stop) for part in full), []).append(device)
    shards = []
    kind = like.sharding.memory_kind
    for bounds, holders in devices.items():
        nbytes = like.dtype.itemsize * math.prod(stop - start for start, stop in bounds)
        with budget.taken(nbytes):
            array = read(folder, tensor, tuple(slice(*bound) for bound in bounds), like.dtype)
            placed = [
                jax.device_put(array, jax.sharding.SingleDeviceSharding(device, memory_kind=kind)) for device in holders
            ]
            del array
            jax.block_until_ready(placed)  # the host's copy may go
        shards += placed
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _family(path: pathlib.Path, raw: Mapping[str, Any]) -> family_lib.Family:
    kind, classes = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(kind, str) or kind not in families.MODEL_TYPES:
        known = ", ".join(families.MODEL_TYPES)
        raise UserError(
            f"{path / CONFIG}: model_type {errors.shown(kind)} is not an architecture that zerojax computes{_hint(path, raw)}; "
            f"known: {known}"
        )
    family = families.MODEL_TYPES[kind]
    computed = family.huggingface.architectures[kind]
    classes = [classes] if not isinstance(classes, list) else classes
    for name in classes:
        if name not in computed:
            raise UserError(
                f"{path / CONFIG}: architecture {name!r} is not one that zerojax computes; known for {kind}: {', '.join(computed)}"
            )
    if not raw.get("is_causal", True) and not family.is_classifier:
        raise UserError(
            f"{path / CONFIG}: is_causal must be true, since a decoder's tokens see no later ones, and is {raw['is_causal']}; choose "
            "a folder whose model has that"
        )
    quantized = raw.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
    if quantized and (kind, method) not in family.huggingface.quantized:
        raise UserError(
            f"{path / CONFIG}: has quantization_config, and weights of {kind} that are quantized by {method!r} are not read; name a "
            "folder of float weights"
        )
    return family


def _hint(path: pathlib.Path, raw: Mapping[str, Any]) -> str:
    """Returns what is known of a model_type that is unknown: the one that computes the same, or its text model; "" for nothing."""
    inner = other_types.text_model(raw)
    if (text := inner.get("model_type")) in families.MODEL_TYPES:
        with contextlib.suppress(UserError):
            families.MODEL_TYPES[text].huggingface.read(inner, ())
            return (
                f", but its text model is {text!r}, which it does: save that alone with transformers (a model of that class with the "
                "weights of language_model and lm_head), and name its folder"
            )
    kind = other_types.SAME.get(str(raw.get("model_type")), "")
    if kind not in families.MODEL_TYPES:
        return ""
    family, as_kind = families.MODEL_TYPES[kind], {**raw, "model_type": kind}
    forms = {_form(name): name for name in family.huggingface.architectures[kind]}
    same = forms.get(_form(raw.get("architectures")), "")
    with contextlib.suppress(UserError):
        entries = _canonical(family, as_kind, tensor_files.read_folder(path))
        model = family.huggingface.read(as_kind, entries)
        _check(path, layout.tensors(family, model), entries, family.huggingface.prefix)
        read = lambda raw: family.huggingface.read(raw, entries)  # noqa: E731
        if same and not other_types.unread(as_kind, read, family.huggingface.write):
            return f", but computes what {kind!r} does: set model_type to {kind!r} and architectures to [{same!r}]"
    return ""


def _of_text(entries: Mapping[str, tensor_files.Entry]) -> dict[str, tensor_files.Entry]:
    """Returns the tensors of the text model of a folder whose model reads images too."""
    found = {other_types.names_of_text(name): entry for name, entry in entries.items()}
    dropped = [name for name in entries if not other_types.names_of_text(name)]
    found.pop("", None)
    first = (
        f"{len(dropped)} tensors such as {dropped[0]} are of parts that see images, and are not read; "
        if dropped
        else ""
    )
    warnings.warn(f"{CONFIG}: {first}the text model is taken alone, and exported so", stacklevel=3)
    return found


def _form(architectures: Any) -> str:
    """Returns what a class is for: "ForCausalLM" of "MistralForCausalLM"; "" if none is named."""
    found = re.search(
        r"(For|Model).*", str(architectures[0] if isinstance(architectures, list) and architectures else architectures)
    )
    return found[0] if found else ""


def _canonical(
    family: family_lib.Family, raw: Mapping[str, Any], entries: Mapping[str, tensor_files.Entry]
) -> dict[str, Any]:
    """Returns the tensors without those that hold no weights, and without copies of tied weights, by the names of the full model."""
    table, found = family.huggingface, dict[str, Any](entries)
    if any(method == mxfp4.METHOD and kind == raw["model_type"] for kind, method in table.quantized):
        found = mxfp4.joined(found)
    quantization = raw.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == fp8_blocks.METHOD:
        found = fp8_blocks.joined(found, fp8_blocks.block_of(quantization))
    for old, new in table.renamed:
        found = {re.sub(old, new, name): entry for name, entry in found.items()}
    if table.prefix and not any(name.startswith(table.prefix) for name in found):
        found = {name if name in table.outside else table.prefix + name: entry for name, entry in found.items()}
    for pattern, original in table.copies(raw).items():
        for name in [name for name in found if re.fullmatch(pattern, name)]:
            if original in found and tensor_files.is_equal(found[name], found[original]):
                del found[name]
    for pattern in filter(None, (table.ignored, table.unused(raw))):
        found = {name: entry for name, entry in found.items() if not re.fullmatch(pattern, name)}
    further = table.further(raw)
    left = {name: entry for name, entry in found.items() if not (further and re.fullmatch(further, name))}
    if len(left) < len(found):
        first = next(name for name in found if name not in left)
        warnings.warn(
            f"{found[first].file}: {len(found) - len(left)} tensors such as {first} are of modules that predict tokens further ahead, and "
            "are not read",
            stacklevel=3,
        )
    return left


def _check(path: pathlib.Path, tensors: list[layout.ModelTensor], entries: Mapping[str, Entry], added: str) -> None:
    """Checks names, shapes and dtypes. `_canonical` has put `added` before all names if none began with it."""
    expected = {member.name: member for tensor in tensors for member in tensor.members}
    missing = [name for name, tensor in expected.items() if name not in entries and not tensor.entry.is_optional]
    if missing:
        longer = next((name for name in entries if name.endswith(f".{missing[0]}")), missing[0])
        prefix, way_out = longer.removesuffix(missing[0]), "copy the folder again, or mend its config.json"
        if prefix and all(f"{prefix}{name}" in entries for name in missing):
            own = prefix.removeprefix(added) or prefix
            way_out = f"names there begin with {own!r}: save the tensors without it"
        elif missing == ["lm_head.weight"]:
            way_out = (
                "copy the folder again, or set tie_word_embeddings to true in config.json if the head is the embedding"
            )
        raise UserError(f"{path}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} are); {way_out}")
    unknown = [name for name in entries if name not in expected]
    if unknown:
        raise UserError(
            f"{path}: tensor {unknown[0]} is not one of the model that config.json describes ({len(unknown)} of {len(entries)} are not); "
            "mend config.json, or choose a folder without it"
        )
    for name, entry in entries.items():
        if entry.shape != expected[name].shape:
            raise UserError(
                f"{path}: tensor {name} has shape {entry.shape}, and config.json describes {expected[name].shape}; mend config.json"
            )
        if entry.dtype not in tensor_files.DTYPES and entry.dtype not in (mxfp4.DTYPE, fp8_blocks.DTYPE):
            raise UserError(
                f"{path}: tensor {name} is stored as {entry.dtype}, and only {', '.join(tensor_files.DTYPES)} are read; "
                "name a folder of float weights"
            )


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the table in a JSON file. Raises UserError if there is none."""
    way_out = "name a folder that save_pretrained of transformers wrote"
    with files.reading(path, way_out, "is not JSON ({}); copy the folder again"):
        found = bounded.parse_json(bounded.read_bytes(path), is_strict=True)
    if not isinstance(found, dict):
        raise UserError(f"{path}: is not a table of settings; copy the folder again")
    return found
