"""Continues prompts. This module generates token by token with a cache, from a model whose weights stay sharded.

One compiled program reads the prompts and then runs a loop that adds a token to every row. The loop ends when all rows have ended. All
devices take that decision from the same value inside the program, so no process can wait for another that has left the loop. Weights in
host memory are fetched block by block instead (`by_block`).
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import display, errors, signatures, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.inference import by_block
from zerojax.inference import choice as choice_lib
from zerojax.inference import sampling as sampling_lib
from zerojax.models import decoding
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.tree import PyTree
from zerojax.zero.blocks import where_used
from zerojax.zero.host import budget, selection
from zerojax.zero.sharded_batch import arguments
from zerojax.zero.weights import partition as partition_lib

SCORES = 3  # arrays [rows, heads, length, length] that attention over the prompts holds at a time
MOST_TOKENS = 2**24  # of a text, which float32 counts exactly


def make_generator(
    family: family_lib.Family,
    config: Any,
    partition: partition_lib.Partition,
    *,
    new_tokens: int,
    special: family_lib.SpecialTokens,
    sampling: sampling_lib.Sampling | None = None,
    compute_dtype: DTypeLike | None = None,
) -> Callable[..., np.ndarray]:
    """Builds `generate(params, input_ids, attention_mask=None, *, seed=0) -> int32[rows, length]`.

    `input_ids` are int[rows, length], and `attention_mask` is 0 where a prompt is padded, on any side. Every row gets what it would get
    alone. A decoder's result holds the prompts as they were given, then the new tokens; an encoder-decoder's begins with its start token.
    A row is padded after its end. The result is as long as the longest row. All processes must call it with the same arrays. Each shape of
    `input_ids` is compiled once.

    Args:
      family, config: the model.
      partition: the shardings of its params. Rows are sharded over the mesh's replica and data axes.
      new_tokens: the most tokens that are added to a row.
      special: the tokens that begin, end and pad a row.
      sampling: how a token is picked; by default the likeliest.
      compute_dtype: the dtype of floating weights in the model; None keeps the stored one.

    Raises:
      UserError: `new_tokens` is below 1. `generate` refuses ids that the model does not know, and texts longer than its positions; where
        these have no weights it warns.
    """
    if not 0 < new_tokens <= MOST_TOKENS:
        raise UserError(f"max_new_tokens: must be 1 or more, and {MOST_TOKENS} at most, and is {new_tokens}")
    mesh, choice = partition.mesh, choice_lib.Choice(new_tokens, special, sampling or sampling_lib.Sampling())
    make: Callable[..., Callable[..., jax.Array]] = (
        by_block.Loop if selection.are_params_on_host(partition) else _make_loop
    )
    run = make(family, config, partition, choice, compute_dtype)
    heads = config.num_heads if any(held.positions for held in jax.tree.leaves(family.caches(config))) else 0

    @signatures.checked
    def generate(params: PyTree, input_ids: Any, attention_mask: Any = None, *, seed: int = 0) -> np.ndarray:
        tree.untraced(tree.undeleted(params))
        if not 0 <= seed < 2**32:
            raise UserError(f"seed: must be 0 or more and below 2^32, and is {seed}")
        prompts, mask = check(input_ids, attention_mask, config.vocab_size)
        count, inputs = len(prompts), {}
        if family.is_encoder_decoder:
            inputs = {"inputs": prompts, "mask": mask}
            texts = np.full((count, 1), special.start, np.int32)
            lengths = np.ones(count, np.int32)
        else:
            texts, lengths = _text_first(prompts, mask)
        _check_memory(mesh, heads, prompts.shape)
        longest = max(int(lengths.max()) + new_tokens, prompts.shape[1] if inputs else 0)
        check_length(family, config, longest)
        check_params(params, partition)

        def read(texts: np.ndarray, lengths: np.ndarray, part: choice_lib.AnswerPart) -> np.ndarray:
            shape = prompts.shape if inputs else texts.shape
            _check_memory(mesh, heads, shape)
            arrays = sharded_rows((inputs, texts, lengths, part), mesh)
            with _out_of_memory(shape), arguments.in_own_mesh(mesh), jax.numpy_rank_promotion("allow"):
                return np.array(run(params, *arrays, np.uint32(seed)))[:count]

        stretch = family.stretch(config)
        after = stretch.after if stretch is not None and stretch.is_read_anew else None
        new = _in_parts(read, texts, lengths, new_tokens, special.stops, after)
        before = texts if inputs else np.asarray(input_ids, np.int32)
        return np.concatenate([before, new[:, : _longest(new, special)]], axis=1)

    return generate


def _in_parts(
    read: Callable[[np.ndarray, np.ndarray, choice_lib.AnswerPart], np.ndarray],
    texts: np.ndarray,
    lengths: np.ndarray,
    new_tokens: int,
    stops: Sequence[int],
    after: int | None,
) -> np.ndarray:
    """Returns the new tokens of texts, int32[rows, new_tokens].

    Args:
      read: (texts, lengths, which of the new tokens) -> the new tokens of rows that are read once.
      texts, lengths: the prompts.
      new_tokens: the most of a row.
      stops: the tokens that end a row.
      after: the tokens beyond which a text that grows is read anew; None for none.
    """
    most = np.full_like(lengths, new_tokens)
    if after is not None:
        most = np.where(lengths > after, most, np.minimum(most, after + 1 - lengths))
    new = read(texts, lengths, choice_lib.AnswerPart(np.zeros_like(most), most))
    is_cut = (most < new_tokens) & ~np.isin(np.where(np.arange(new_tokens) < most[:, None], new, -1), stops).any(axis=1)
    rows = np.flatnonzero(is_cut)
    if after is None or not rows.size:
        return new
    longer = np.zeros((len(texts), after + 1), np.int32)  # all that grew beyond have this length
    for row in rows:
        longer[row] = [*texts[row, : lengths[row]], *new[row, : most[row]]]
    left = np.where(is_cut, new_tokens - most, 1).astype(np.int32)
    further = read(longer, np.full_like(lengths, after + 1), choice_lib.AnswerPart(most, left))
    for row in rows:
        new[row, most[row] :] = further[row, : left[row]]
    return new


def check_length(family: family_lib.Family, config: ModelConfig, longest: int) -> None:
    """Raises a UserError if the model has no positions for a text of `longest` tokens; warns if it was not trained on so long a text."""
    positions = family.positions(config)
    if positions is not None and longest > positions:
        raise UserError(
            f"max_new_tokens: the longest text would have {longest} tokens, and the model has {positions} positions; "
            "shorten the prompt or lower max_new_tokens"
        )
    if positions is None and config.max_seq_len and longest > config.max_seq_len:
        warnings.warn(
            f"max_new_tokens: the longest text may have {longest} tokens, and the model was trained on {config.max_seq_len} at most "
            "(max_position_embeddings), so later ones may make no sense; shorten the prompt or lower max_new_tokens",
            stacklevel=3,
        )


def _check_memory(mesh: Mesh, num_heads: int, shape: tuple[int, ...]) -> None:
    """Raises a UserError if the scores of attention over the prompts exceed the memory of a host without accelerators, which would swap."""
    rows, length = shape
    limit = budget.read_host().least
    needed = SCORES * np.dtype(np.float32).itemsize * num_heads * rows * length**2
    if limit is not None and mesh.devices.flat[0].platform == "cpu" and needed > limit:
        raise _too_long(
            shape, f"its scores of attention take {display.human(needed)}, and this host has {display.human(limit)}"
        )


@contextlib.contextmanager
def _out_of_memory(shape: tuple[int, ...]) -> Iterator[None]:
    """Turns an allocator's error into a UserError that names the prompts."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _too_long(shape, errors.first_line(error)) from error


def _too_long(shape: tuple[int, ...], why: str) -> UserError:
    return UserError(
        f"input_ids: {shape[0]} prompts of up to {shape[1]} tokens need more memory than there is ({why}); shorten the prompt, or give "
        "fewer at a time"
    )


def sharded_rows(arrays: PyTree, mesh: Mesh) -> Any:
    """Returns arrays [rows, ...], equal on all processes, sharded by row. Copies of the first one make them divide."""
    rows, ways = mesh_lib.row_sharding(mesh), mesh_lib.size(mesh, mesh_lib.SUMMED)

    def put(array: np.ndarray) -> jax.Array:
        padded = np.concatenate([array, np.repeat(array[:1], -len(array) % ways, axis=0)])
        return jax.make_array_from_callback(padded.shape, rows, lambda index: padded[index])

    return jax.tree.map(put, arrays)


def _make_loop(
    family: family_lib.Family,
    config: ModelConfig,
    partition: partition_lib.Partition,
    choice: choice_lib.Choice,
    compute_dtype: DTypeLike,
) -> Callable[..., jax.Array]:
    """Returns the program that reads the prompts and adds tokens: int32[rows, new_tokens]."""
    how = family_lib.gathering(family, config, compute_dtype)
    start, extend = (
        where_used.forward_only(functools.partial(function, config), partition.placements, **how)
        for function in (family.start, family.extend)
    )
    rows = mesh_lib.row_sharding(partition.mesh)

    def generate(
        params: PyTree,
        inputs: Mapping[str, jax.Array],
        tokens: jax.Array,
        lengths: jax.Array,
        part: choice_lib.AnswerPart,
        seed: jax.Array,
    ) -> jax.Array:
        length = tokens.shape[1]
        slots = length + choice.new_tokens
        scores, caches = start(params, inputs, tokens, lengths, slots)

        def add(carry: tuple) -> tuple:
            found, caches = carry
            caches = jax.lax.with_sharding_constraint(caches, rows)
            step = decoding.next_step(lengths, length, found.num_tokens - 1, slots)
            scores, caches = extend(params, caches, step, found.token)
            return choice.add(found, scores, part, seed), caches

        first = (choice.first(scores, lengths, part, seed), caches)
        return jax.lax.while_loop(lambda carry: choice.goes_on(carry[0]), add, first)[0].tokens

    return jax.jit(generate, out_shardings=NamedSharding(partition.mesh, P()))


def check_params(params: Any, partition: partition_lib.Partition) -> None:
    """Raises a UserError if params are not the modules of a partition's, such as a state that holds them."""
    wanted = dict.fromkeys(path.split("/")[1] for path in partition.placements)
    if not isinstance(params, Mapping) or params.keys() != wanted.keys():
        found = ", ".join(map(str, params)) if isinstance(params, Mapping) else errors.shown(params)
        raise UserError(f"params: must hold {', '.join(wanted)}, and are {found}; pass loaded.params, or state.params")


def check(input_ids: Any, attention_mask: Any, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids as int32[rows, length] and the mask as bool[rows, length].

    Raises:
      UserError: they are not numbers of one shape, a row has no token, or the model does not know one.
    """
    rule = "input_ids: must be integers [rows, length]"
    try:
        ids = np.asarray(input_ids)
    except ValueError as error:
        raise UserError(f"{rule}, and rows differ in length; pad them, with an attention_mask") from error
    if isinstance(input_ids, Mapping):
        raise UserError(
            f"{rule}, and are a batch of {', '.join(input_ids)}; give batch['input_ids'], batch['attention_mask']"
        )
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{rule}, and are {ids.dtype}{list(ids.shape)}")
    given = np.ones(ids.shape, bool) if attention_mask is None else np.asarray(attention_mask)
    if given.dtype.kind not in "biuf":
        raise UserError(f"attention_mask: must be 0 where a row is padded, else 1, and holds {given.dtype}")
    mask = given > 0
    if mask.shape != ids.shape:
        raise UserError(f"attention_mask: has shape {mask.shape}, and input_ids have {ids.shape}; give both the same")
    if not mask.any(axis=1).all():
        raise UserError(f"attention_mask: row {np.argmin(mask.any(axis=1))} is 0 everywhere; give each prompt a token")
    wrong = ids[mask & ((ids < 0) | (ids >= vocab_size))]
    if wrong.size:
        raise UserError(
            f"input_ids: hold {wrong[0]}, and the model knows ids from 0 to {vocab_size - 1}; "
            "use the tokenizer of the model"
        )
    return np.where(mask, ids, 0).astype(np.int32), mask


def _text_first(prompts: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompts with their padding at the end, and their lengths."""
    order = np.argsort(~mask, axis=1, kind="stable")
    lengths = mask.sum(axis=1).astype(np.int32)
    return np.take_along_axis(prompts, order, axis=1), lengths


def _longest(new: np.ndarray, special: family_lib.SpecialTokens) -> int:
    """Returns the number of new tokens of the longest row, with the token that ends it."""
    ends = np.isin(new, special.stops)
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, new.shape[1])
    return int(lengths.max())
