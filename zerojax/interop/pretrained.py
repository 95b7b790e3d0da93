"""Loads a model that transformers wrote for one's own code. This module holds `load_huggingface` and `export_huggingface`."""

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import files, precision, signatures, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.inference import generate, sampling, texts
from zerojax.interop import adapted, huggingface, layout, merged, peft, tensor_files
from zerojax.interop import folder as folder_lib
from zerojax.lora import adapters as adapters_lib
from zerojax.lora import families, settings, targets
from zerojax.models import family as family_lib
from zerojax.ops import losses
from zerojax.tree import PyTree
from zerojax.zero import stages
from zerojax.zero.blocks import tensor_parallel
from zerojax.zero.update import padding
from zerojax.zero.weights import partition as partition_lib

READ = ("input_ids", "attention_mask", "labels")  # of a batch; some families read more
NO_LABEL = -100  # transformers' label of a token that the loss leaves out
# settings of generation that change what transformers' greedy search gives, and the value that changes nothing
UNREAD = {
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "penalty_alpha": None,
    "guidance_scale": None,
    "stop_strings": None,
    "token_healing": False,
    "dola_layers": None,
    "watermarking_config": None,
}


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model from a folder.

    Attributes:
      params: the weights, in the shardings of `partition`.
      partition: of {"params": params}; its `placements` are those of the weights.
      config: the model's config.
      family: the model's family.
      folder: the folder that was read.
      adapters: the adapters among the weights; None for none.
    """

    params: Any
    partition: partition_lib.Partition
    config: Any
    family: family_lib.Family
    folder: folder_lib.Folder
    adapters: targets.Targets | None = None

    @property
    def trainable(self) -> str:
        """Returns the regex for `trainable=` of `shard_train_state`: adapters and what is trained beside them, or "" without adapters."""
        return "" if self.adapters is None else self.adapters.trainable

    @property
    def blocks(self) -> str:
        """Returns the regex over the model's repeated modules, for `make_train_step` and `where_used`."""
        return self.family.blocks

    @property
    def heads(self) -> str:
        """Returns the regex over its output projections, for `make_train_step` and `where_used`."""
        return family_lib.heads(self.family, self.config)

    @property
    def activations(self) -> tuple[tuple, ...]:
        """Returns what tensor parallelism shards of its activations, for `make_train_step`."""
        return self.family.parallel.activations

    @property
    def special(self) -> family_lib.SpecialTokens:
        """Returns the tokens that begin, end and pad a generated text."""
        return special_tokens(self.folder)

    @signatures.checked
    def apply(self, params: PyTree, batch: Mapping[str, Any]) -> jax.Array:
        """Returns the model's logits float32[batch, length, vocab], or of a classifier float32[batch, classes], of a model that gives
        texts values float32[batch, 1]. The function is written for unsharded weights.

        Args:
          params: the weights.
          batch: arrays [batch, length] under transformers' names: input_ids and, where rows are padded, attention_mask. An encoder-decoder
            also needs decoder_input_ids, or labels, from which they are made. A classifier's may have token_type_ids. An id that the model
            does not know makes its row NaN; arrays that it does not read are warned of.
        """
        inputs, tokens = self._inputs(batch)
        generate.check_params(params, self.partition)
        longest = self.family.positions(self.config) or math.inf
        for found in (inputs.get("inputs", tokens), tokens):
            if found.shape[1] > longest:
                raise UserError(
                    f"batch: has texts of {found.shape[1]} tokens, and the model has {longest} positions; shorten them"
                )
        with jax.numpy_rank_promotion("allow"):
            return self.family.logits(self.config, params, inputs, tokens)

    @signatures.checked
    def loss(self, params: PyTree, batch: Mapping[str, Any]) -> jax.Array:
        """Returns the mean cross-entropy of `batch["labels"]`, float32[], without those that are -100, as transformers does.

        A decoder's labels are its own inputs: the scores after a token are compared with the label of the next one. A classifier's are
        int[batch].
        """
        return self.loss_of(self.apply(params, batch), _array(batch, "labels"))

    def loss_of(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns `loss` from the logits that `apply` returns. A label that is no class makes it NaN, but for -100."""
        if math.prod(labels.shape) != math.prod(logits.shape[:-1]):
            raise UserError(
                f"batch/labels: has shape {labels.shape}, and the logits are of {logits.shape[:-1]}; give both the same"
            )
        labels = jnp.where(labels == NO_LABEL, labels, _known(labels, logits.shape[-1]))
        if self.family.is_classifier:
            return losses.cross_entropy(logits, labels.reshape(-1), ignored=NO_LABEL)
        if not self.family.is_encoder_decoder:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return losses.cross_entropy(logits, labels, ignored=NO_LABEL)

    @signatures.checked
    def generator(
        self,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        compute_dtype: DTypeLike | None = None,
        partition: partition_lib.Partition | None = None,
    ) -> Callable[..., np.ndarray]:
        """Returns `generate(params, input_ids, attention_mask=None, *, seed=0)`; see `inference.generate.make_generator`.

        Args:
          max_new_tokens: the most tokens that are added to a row.
          temperature, top_k, top_p: see `inference.sampling.Sampling`.
          compute_dtype: the dtype of floating weights in the model; None keeps the stored one.
          partition: that of the state whose params these are, where it is sharded or offloaded otherwise; None: as loaded.
        """
        if not family_lib.writes_text(self.family, self.config):
            raise UserError("generator: the model is a classifier, which writes no text; use `classifier`")
        return generate.make_generator(
            self.family,
            self.config,
            partition or self.partition,
            new_tokens=max_new_tokens,
            special=self.special,
            sampling=sampling.Sampling(temperature, top_k, top_p),
            compute_dtype=compute_dtype,
        )

    @signatures.checked
    def classifier(self, *, compute_dtype: DTypeLike | None = None) -> Callable[..., np.ndarray]:
        """Returns `classify(params, input_ids, attention_mask=None, token_type_ids=None)`, the scores of `config.classes`, or of a
        model that gives texts values these, float32[rows, 1]; see `inference.texts.make_classifier`.

        Raises:
          UserError: the model is no classifier.
        """
        if family_lib.writes_text(self.family, self.config):
            raise UserError(f"classifier: the model of {self.folder.path} has no classes; use `generator`")
        return texts.make_classifier(self.family, self.config, self.partition, compute_dtype=compute_dtype)

    @signatures.checked
    def embedder(self, *, pooling: str = "last", compute_dtype: DTypeLike | None = None) -> Callable[..., np.ndarray]:
        """Returns `embed(params, input_ids, attention_mask=None)`, the vectors of texts; see `inference.texts.make_embedder`.

        Raises:
          UserError: the model is no decoder that gives states.
        """
        return texts.make_embedder(
            self.family, self.config, self.partition, pooling=pooling, compute_dtype=compute_dtype
        )

    @signatures.checked
    def read_adapter(self, path: str | os.PathLike[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Reads a folder of PEFT for `zerojax.Engine(adapters=...)`: {module's path: (A float32[inputs, r], scale * B [r, outputs])}.

        Raises:
          UserError: the folder is not one of an adapter of this model, or has other weights of modules in full.
        """
        opened = peft.open_adapter(path, self.folder.family, self.config)
        chosen = opened.chosen
        changed = [*chosen.saved, *(path for path in chosen.carried if not self._has_tensor(opened, path))]
        if changed:
            raise UserError(
                f"{opened.path}: has {changed[0]} in full, and one beside others has only low ranks; merge it (zerojax merge)"
            )
        others = [one.name for path in chosen.adapted if (one := chosen.linear[path]).has_no_module or one.is_embedding]
        if chosen.lora.dora or others:
            what = "magnitudes (DoRA)" if chosen.lora.dora else f"an adapter of {others[0]}"
            raise UserError(
                f"{opened.path}: has {what}, and one beside others has only low ranks of linear modules; merge it (zerojax merge)"
            )
        same = NamedSharding(self.partition.mesh, P())
        shapes = adapters_lib.shapes(chosen)
        wanted = {leaf: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=same) for leaf, shape in shapes.items()}
        found = jax.tree.map(np.asarray, peft.read_leaves(opened, wanted))
        return {
            module: (found[f"{module}/{targets.A}"], found[f"{module}/{targets.B}"] * np.float32(chosen.scale(module)))
            for module in chosen.adapted
        }

    def _has_tensor(self, opened: peft.Adapter, path: str) -> bool:
        """Returns whether a weight that an adapter's folder carries is the model's own."""
        own = {tensor.path: tensor.name for tensor in layout.tensors(self.family, self.config)}[path]
        entry = self.folder.entries.get(own)
        return entry is not None and tensor_files.is_equal(opened.entries[opened.tensors[path].name], entry)

    def _inputs(self, batch: Mapping[str, Any]) -> tuple[dict[str, jax.Array], jax.Array]:
        """Returns a family's inputs and tokens."""
        is_seq2seq, is_classifier = self.family.is_encoder_decoder, self.family.is_classifier
        inputs, ids, size = {}, _array(batch, "input_ids"), self.config.vocab_size
        has_kinds = is_classifier and self.config.num_kinds > 0
        read = READ + ("decoder_input_ids",) * is_seq2seq + ("token_type_ids",) * has_kinds
        if unread := [str(name) for name in batch if name not in read]:
            warnings.warn(f"batch: {', '.join(unread)} are not read; the model reads {', '.join(read)}", stacklevel=4)
        is_read: Any = True
        if "attention_mask" in batch:
            inputs["mask"] = is_read = jnp.asarray(batch["attention_mask"]) > 0
            if is_read.shape != ids.shape:
                raise UserError(
                    f"batch/attention_mask: has shape {is_read.shape}, and input_ids have {ids.shape}; give both the same"
                )
        ids = _known(ids, size, is_read)
        if has_kinds and "token_type_ids" in batch:
            inputs["kinds"] = _known(_array(batch, "token_type_ids"), self.config.num_kinds, is_read)
        if not is_seq2seq:
            return inputs, ids
        inputs["inputs"] = ids
        if "decoder_input_ids" in batch:
            return inputs, _known(_array(batch, "decoder_input_ids"), size)
        labels, special = _array(batch, "labels"), self.special
        labels = jnp.where(labels == NO_LABEL, special.pad, labels)
        shifted = jnp.pad(labels, ((0, 0), (1, 0)), constant_values=start_of_labels(self.folder))[:, :-1]
        if getattr(self.config, "starts_with_last", False):
            last_B1 = jnp.sum(labels != special.pad, axis=1, keepdims=True) - 1
            shifted = shifted.at[:, :1].set(jnp.take_along_axis(labels, last_B1, axis=1))
        return inputs, shifted


def _array(batch: Mapping[str, Any], name: str) -> jax.Array:
    if name not in batch:
        raise UserError(f"batch: lacks {name}, and has {', '.join(map(str, batch)) or 'nothing'}; add {name} to it")
    found = jnp.asarray(batch[name])
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise UserError(f"batch/{name}: must be integers, and is {found.dtype}{list(found.shape)}")
    return found


def _known(ids: jax.Array, count: int, is_read: jax.Array | bool = True) -> jax.Array:
    """Returns ids, of which a negative one is as one beyond the last: jnp.take and the losses count it from the end. Padding's are 0."""
    return jnp.where(ids < 0, jnp.where(is_read, count, 0), ids)


def load_huggingface(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    stage: int = 3,
    dtype: DTypeLike | None = None,
    lora: settings.Lora | None = None,
    adapter: str | os.PathLike[str] | None = None,
    seed: int = 0,
    **options: Any,
) -> Pretrained:
    """Loads a folder of transformers (config.json and safetensors) into sharded params.

    Every process reads only the bytes of its own shards.

    Args:
      path: the folder.
      mesh: from `make_mesh`; None: all devices along `data`. Along `model` the family's table shards weights (tensor parallelism).
      stage: the ZeRO stage, 0 to 3. At stage 3 params are sharded.
      dtype: of the params; None: of the largest tensor in the files, or with adapters each as it is stored. Adapters are float32.
      lora: adds fresh adapters; all other weights are frozen, and stored as `lora.quantize` says.
      adapter: a folder of PEFT, whose adapters are added. `lora` may then only say `dropout` and `quantize`; its other fields are the
        folder's.
      seed: of fresh adapters.
      **options: `overrides`, `min_size`, `indivisible`, `trainable` and, for weights in host memory, `offload` of `partition_state`.

    Raises:
      UserError: a folder is not one of a model or an adapter that zerojax computes, or is damaged; the line names what is wrong.

    >>> loaded = load_huggingface("opt/my-model", mesh=make_mesh(), stage=3, dtype=jnp.bfloat16)
    >>> logits = jax.jit(where_used(loaded.apply, loaded.partition.placements, blocks=loaded.blocks))(loaded.params, batch)
    """
    folder = folder_lib.open_folder(path)
    if folder.drawn and adapter is None:
        warnings.warn(
            f"{folder.path}: has no {', '.join(folder.drawn)}, so its classes mean nothing until it is trained",
            stacklevel=2,
        )
    mesh = mesh_lib.make_mesh() if mesh is None else mesh
    if lora is not None or adapter is not None:
        return _load_adapted(folder, mesh, stage, precision.floating("dtype", dtype), lora, adapter, seed, options)
    dtype = precision.floating("dtype", folder.dtype if dtype is None else dtype)
    abstract = tree.of_dtype(family_lib.abstract_params(folder.family.parts, folder.model), dtype)
    options = _with_table(options, folder, abstract, mesh)
    partition = stages.partition_state({"params": abstract}, mesh=mesh, stage=stage, **options)
    params = folder_lib.read_params(folder, partition.abstract_state["params"])
    return Pretrained(params, partition, folder.model, folder.family, folder)


def _with_table(options: dict[str, Any], folder: folder_lib.Folder, abstract: PyTree, mesh: Mesh) -> dict[str, Any]:
    """Returns the options with the overrides of the family's table of tensor parallelism behind the caller's own."""
    own = tuple(options.get("overrides", ()))
    shapes = {path: leaf.shape for path, leaf in tree.flatten({"params": abstract})}
    table, but = folder.family.parallel.weights, [row[0] for row in own]
    rows, whole = tensor_parallel.overrides(table, shapes, mesh_lib.completed(mesh), but)
    if whole:
        warnings.warn(f"mesh: {whole}", stacklevel=3)
    return {**options, "overrides": (*own, *rows)}


def _load_adapted(
    folder: folder_lib.Folder,
    mesh: Mesh,
    stage: int,
    dtype: DTypeLike,
    lora: settings.Lora | None,
    adapter: str | os.PathLike[str] | None,
    seed: int,
    options: dict[str, Any],
) -> Pretrained:
    """Loads a model with adapters; see `load_huggingface`."""
    opened, chosen = peft.start(folder.family, folder.model, lora, adapter)
    stored = adapted.dtypes(folder)
    abstract = adapted.abstract(
        folder.family, folder.model, chosen, frozen=lambda path: stored[path] if dtype is None else dtype
    )
    options = {"trainable": chosen.trainable} | _with_table(options, folder, abstract, mesh)
    partition = stages.partition_state({"params": abstract}, mesh=mesh, stage=stage, **options)
    params = adapted.read(partition.abstract_state["params"], folder, chosen, adapter=opened, key=jax.random.key(seed))
    family = families.with_adapters(folder.family, chosen)
    return Pretrained(params, partition, folder.model, family, folder, chosen)


def export_huggingface(
    params: PyTree,
    loaded: Pretrained,
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = huggingface.SHARD_BYTES,
) -> None:
    """Writes weights as transformers does, with the config, the settings of generation and the tokenizer of the folder that was loaded.

    All processes must call it; the first one writes. Adapters are merged into their kernels.

    Args:
      params: the weights, in the structure of `loaded.params`, with any sharding.
      loaded: from `load_huggingface`.
      path: new, empty, or with an earlier export.
      dtype: of the tensors; None: as they were in the folder.
      max_shard_bytes: limit on the tensors of one file.

    Raises:
      UserError: a leaf is missing, unknown or of another shape, the folder holds other files, or the disk is full.
    """
    files.check_path(path, "path")
    dtype = precision.floating("dtype", dtype)
    params = padding.unpad({"params": tree.untraced(tree.undeleted(params))}, loaded.partition)["params"]
    if loaded.adapters is not None:
        params = merged.of_params(params, loaded.adapters)
    huggingface.export(
        params,
        loaded.family,
        loaded.config,
        path,
        dtype=dtype,
        source=loaded.folder.path,
        max_shard_bytes=max_shard_bytes,
    )


def export_adapter(params: PyTree, loaded: Pretrained, path: str | os.PathLike[str]) -> None:
    """Writes the adapters among the weights as PEFT does: adapter_config.json and adapter_model.safetensors.

    All processes must call it; the first one writes.

    Args:
      params: the weights, in the structure of `loaded.params`, with any sharding.
      loaded: from `load_huggingface` with adapters.
      path: the folder; an earlier adapter in it is replaced.

    Raises:
      UserError: the model was loaded without adapters, or the disk is full.
    """
    if loaded.adapters is None:
        raise UserError(
            "export_adapter: the model was loaded without adapters; pass load_huggingface(..., lora=zerojax.Lora(...))"
        )
    params = padding.unpad({"params": tree.untraced(tree.undeleted(params))}, loaded.partition)["params"]
    peft.export(params, loaded.adapters, loaded.family, loaded.config, path, base=str(loaded.folder.path))


def special_tokens(folder: folder_lib.Folder) -> family_lib.SpecialTokens:
    """Returns the tokens that a folder's configs name.

    Raises:
      UserError: an id is not one, or an encoder-decoder has no start token, or one for each row.
    """
    stops = _ids(folder, "eos_token_id")
    start = _ids(folder, "decoder_start_token_id") or _ids(folder, "bos_token_id")
    if folder.family.is_encoder_decoder and len(start) != 1:
        is_what = f"is {list(start)}, and rows begin with the same; name one" if start else "is missing; add it"
        raise UserError(f"{folder.path}: decoder_start_token_id {is_what}")
    return family_lib.SpecialTokens(
        stops=stops,
        pad=(_ids(folder, "pad_token_id") or stops or (0,))[0],
        start=start[0] if start else 0,
        # of several, those that transformers' greedy search takes
        forced_first=min(_ids(folder, "forced_bos_token_id"), default=None),
        forced_last=min(_ids(folder, "forced_eos_token_id"), default=None),
    )


def start_of_labels(folder: folder_lib.Folder) -> int:
    """Returns the token before an encoder-decoder's labels: config.json's, as in transformers, whatever that of generation is."""
    named = folder.raw.get("decoder_start_token_id", folder.family.huggingface.starts.get(folder.raw["model_type"]))
    return named if _is_id(folder, named) else special_tokens(folder).start


def unread_settings(folder: folder_lib.Folder) -> list[str]:
    """Returns the folder's settings of generation that change a result in transformers, and that are not applied here.

    Without generation_config.json they are those of config.json, as in transformers.
    """
    found = {name: value for name, value in (folder.generation or folder.raw).items() if name in UNREAD}
    return [f"{name}={value}" for name, value in found.items() if value not in (None, UNREAD[name])]


def _is_id(folder: folder_lib.Folder, value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < folder.model.vocab_size


def _ids(folder: folder_lib.Folder, name: str) -> tuple[int, ...]:
    """Returns the ids of a setting: a number, a list, or nothing."""
    value = folder.setting(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_id(folder, token) for token in ids):
        raise UserError(
            f"{folder.path}: {name} is {value!r}, and ids are from 0 to {folder.model.vocab_size - 1}; mend it"
        )
    return tuple(ids)
