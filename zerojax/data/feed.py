"""Feeds a run with batches. This module shards every global batch over the devices; each process reads only its own rows."""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import mesh as mesh_lib
from zerojax.data import batches, damaged, fingerprints, mixture, objectives, parts
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import splits
from zerojax.errors import UserError

MOST_TIMES = 100  # that an evaluation may read its text

Batch = dict[str, jax.Array]  # name -> int32[(accum,) batch, length]


class Feed:
    """The sharded global batches of a run. This process reads the rows of its addressable devices.

    Attributes:
      times: how often an evaluation reads the held-out text, at least; 1 if it reads a part of it, and 0 without such text.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        tokenizer: tokenizer_lib.Tokenizer,
        objective: objectives.Objective,
        places: batches.Places,
        *,
        text_key: str,
        global_batch_size: int,
        grad_accum: int,
        seq_len: int,
        seed: int,
        eval_batches: int = 1,
        pairs: splits.Splits | mixture.SourceMixture | None = None,
        order: parts.Order | None = None,
        held_out: tuple[jax.sharding.Mesh, int] | None = None,
        on_bad: str = damaged.STOP,
    ):
        """Opens the training text, and the held-out text if there is some.

        Args:
          mesh: the devices.
          tokenizer, objective: turn text into the arrays of a row.
          places, text_key: where the text comes from, and the feature that has it.
          global_batch_size: rows in a batch.
          grad_accum: passes into which a batch is divided.
          seq_len: tokens in a sequence.
          seed: the seed of the order of the training text. The held-out text uses seed + 1.
          eval_batches: the number of batches that `held_out_mean` will be asked for.
          pairs: examples with answers, or several sources, which are read instead of the text of `places`; None for that.
          order: of the tokens on devices that each hold a part of every row; None: a device has all tokens of its rows.
          held_out: the devices and the passes of held-out batches; None: those of training.
          on_bad: what follows from a document of `places` that cannot be read, one of `damaged.ON_BAD`.

        Raises:
          UserError: see `batches.open_batches`; the held-out text is far shorter than `eval_batches`.
        """
        self.tokenizer = tokenizer
        self._passes = _Passes(mesh, grad_accum, global_batch_size // grad_accum, order)
        others = (mesh, grad_accum) if held_out is None else held_out
        self._held_passes = _Passes(others[0], others[1], global_batch_size // others[1], order)

        self._pairs, self._held_out, self.times = pairs, None, 0.0
        self._places, self._text_key, self._damaged = places, text_key, damaged.Damaged(on_bad)
        if pairs is not None:
            self._train = pairs.open(True, self._passes.own, global_batch_size, seed)
            if pairs.held_out is not None:
                self._held_out = pairs.open(False, self._held_passes.own, global_batch_size, seed)
                self._held_out_start = self._held_out.get_state()
            return
        open_batches = functools.partial(
            batches.open_batches,
            places,
            tokenizer,
            text_key=text_key,
            num_rows=global_batch_size,
            seq_len=seq_len,
            objective=objective,
            damaged=self._damaged,
        )
        self._train = open_batches(is_train=True, rows=self._passes.own, seed=seed)
        if places.has_held_out:  # opened now, so that a wrong name is an error before training
            self._held_out = open_batches(is_train=False, rows=self._held_passes.own, seed=seed + 1)
            window = objective.form(tokenizer, seq_len).window
            self.times = _times_read(self._held_out, global_batch_size * window, eval_batches)
            self._held_out_start = self._held_out.get_state()

    @property
    def examples(self) -> "splits.Splits | mixture.SourceMixture | None":
        """Returns the examples that are read, or the sources; None for one stream of documents."""
        return self._pairs

    def next(self) -> Batch:
        """Returns the next training batch: {name: int32[(accum,) batch, length]}."""
        return self._sharded(next(self._train))

    def placed(self, rows: Mapping[str, np.ndarray]) -> Batch:
        """Returns a training batch of rows that all processes have: {name: int32[global_batch_size, length]}."""
        return self._sharded({name: array[self._passes.own] for name, array in rows.items()})

    def _sharded(self, local: dict[str, np.ndarray]) -> Batch:
        own = self._passes
        if own.count == 1:
            return own.shard(local, (own.rows,))
        return own.shard(own.divided(local), (own.count, own.rows))

    def position(self) -> dict[str, Any]:
        """Returns the position after the last training batch, by row of this process."""
        return self._train.get_state()

    def fingerprints(self) -> dict[str, str]:
        """Returns the fingerprints of the training text and the tokenizer. Random tokens have no text. All processes must call it."""
        found = {"tokenizer": fingerprints.of_tokenizer(self.tokenizer)}
        if self._pairs is not None:
            found |= {"text": self._pairs.fingerprint} if self._pairs.fingerprint else {}
        elif not self._places.is_random:
            opened = damaged.Readable(self._places.open(True, self._text_key), self._text_key, self._damaged)
            found["text"] = fingerprints.of_text(opened, self._text_key)
        return found

    @property
    def failure(self) -> UserError | None:
        """Returns why fewer than `batches.IN_HAND` training batches come after the last; None as long as they do."""
        return self._train.failure

    def summary(self) -> list[str]:
        """Returns lines about what was read and what was skipped since the start. All processes must call it."""
        return (
            self._pairs.summary(self._train)
            if isinstance(self._pairs, mixture.SourceMixture)
            else self._damaged.summary()
        )

    def move_to(self, position: dict[str, Any]) -> None:
        """Continues from a position, which may have more rows than this process reads."""
        self._train.set_state(position)

    def held_out_mean(self, measure: Callable[[Batch], jax.Array], count: int) -> float | None:
        """Returns the mean of `measure(batch)` over the first `count` global batches of held-out text, or None without such text.

        Every call uses the same batches. With labels in the batch, the mean is over all of them, and no example is read twice.
        """
        if self._held_out is None:
            return None
        own = self._held_passes
        self._held_out.set_state(self._held_out_start)
        total, weight = jnp.zeros(()), jnp.zeros(())
        if self._pairs is not None:
            every = self._pairs.batches(own.count * own.rows)
            count = min(count or every, every)
        for _ in range(count):
            local = own.divided(next(self._held_out))
            for number in range(own.count):
                batch = own.shard({name: array[number] for name, array in local.items()}, (own.rows,))
                labels = 1 if self._pairs is None else self._pairs.weight(batch)
                # One at a time: on emulated devices, concurrent programs with collectives can starve each other of threads.
                total = jax.block_until_ready(total + measure(batch) * labels)
                weight = weight + labels
        return float(total) / max(float(weight), 1.0)

    def close(self) -> None:
        """Stops the reading threads."""
        self._train.close()
        if self._held_out is not None:
            self._held_out.close()


@dataclasses.dataclass(frozen=True)
class _Passes:
    """A global batch as `count` passes of `rows` rows, each sharded over the devices of `mesh`; `order` is that of their tokens."""

    mesh: jax.sharding.Mesh
    count: int
    rows: int
    order: parts.Order | None

    @functools.cached_property
    def _local(self) -> list[int]:
        """Returns the rows of a batch that are on this process's addressable devices, in order."""
        indices = mesh_lib.batch_sharding(self.mesh).addressable_devices_indices_map((self.rows,))
        return sorted({row for index in indices.values() if index for row in range(*index[0].indices(self.rows))})

    @property
    def own(self) -> list[int]:
        """Returns the rows of a global batch that this process reads."""
        return [number * self.rows + row for number in range(self.count) for row in self._local]

    def divided(self, local: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns this process's rows by pass."""
        return {name: array.reshape(self.count, len(self._local), -1) for name, array in local.items()}

    def shard(self, local: dict[str, np.ndarray], rows: tuple[int, ...]) -> Batch:
        """Returns global arrays with leading dims `rows`, made of this process's rows."""
        sharding = mesh_lib.batch_sharding(self.mesh, len(rows) - 1, has_tokens=True)
        arrays = local if self.order is None else parts.of_rows(local, self.order)

        def of_device(array: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
            first, stop, _ = index[len(rows) - 1].indices(rows[-1])
            own = slice(bisect.bisect_left(self._local, first), bisect.bisect_left(self._local, stop))
            return array[(*index[: len(rows) - 1], own, *index[len(rows) :])]

        return {
            name: jax.make_array_from_callback(
                (*rows, array.shape[-1]), sharding, functools.partial(of_device, array), dtype=array.dtype
            )
            for name, array in arrays.items()
        }


def _times_read(held_out: batches.Batches, tokens: int, count: int) -> float:
    """Returns how often `count` batches of `tokens` tokens read the held-out text, at least, and 1 or more.

    Raises:
      UserError: more often than anyone can mean.
    """
    held = held_out.count_tokens(tokens * count)
    times = tokens * count / held
    if times > MOST_TIMES and count > 1:
        raise UserError(
            f"eval_batches: {count} batches of {tokens} tokens would read the {held} tokens of `eval_split` "
            f"{times:.0f} times; set `eval_batches={max(1, held // tokens)}`"
        )
    return times
