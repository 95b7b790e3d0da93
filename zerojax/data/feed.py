"""Feeds a run. This module gives each process its rows of every global batch, placed on its devices."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import mesh as mesh_lib
from zerojax.data import batches, objectives
from zerojax.data import tokenizer as tokenizer_lib

Batch = dict[str, jax.Array]  # name -> int32[(accum,) batch, length]


class Feed:
    """The batches of a run: this process's rows of each global batch, placed on its devices."""

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        tokenizer: tokenizer_lib.Tokenizer,
        objective: objectives.Objective,
        *,
        name: str,
        text_key: str,
        train_split: str,
        eval_split: str,
        data_dir: str | os.PathLike,
        global_batch_size: int,
        grad_accum: int,
        seq_len: int,
        seed: int,
    ):
        """Opens the training text, and the held-out text where `eval_split` is not "".

        Args:
          mesh: the devices.
          tokenizer, objective: how text becomes the arrays of a row.
          name, text_key, data_dir: see `batches.open_batches`.
          train_split, eval_split: splits of the dataset; "" for no held-out text.
          global_batch_size: rows of a batch.
          grad_accum: passes over which a batch is divided.
          seq_len: tokens a sequence.
          seed: of the order of the training text; the held-out text takes the next one.

        Raises:
          UserError: see `batches.open_batches`.
        """
        self.tokenizer = tokenizer
        self._mesh, self._shape = mesh, (grad_accum, global_batch_size // grad_accum)
        self._local = _local_indices(mesh, self._shape[1])
        rows = [a * self._shape[1] + i for a in range(grad_accum) for i in self._local]

        def opened(split: str, seed: int, *, shuffle: bool) -> batches.Batches:
            return batches.open_batches(
                name,
                tokenizer,
                text_key=text_key,
                split=split,
                data_dir=data_dir,
                rows=rows,
                num_rows=global_batch_size,
                seq_len=seq_len,
                seed=seed,
                shuffle=shuffle,
                objective=objective,
            )

        self._train = opened(train_split, seed, shuffle=True)
        self._held_out = None
        if eval_split:  # opened now, lest a wrong name be found after hours of training
            self._held_out = opened(eval_split, seed + 1, shuffle=False)
            self._held_out_start = self._held_out.get_state()

    def next(self) -> Batch:
        """Returns the next training batch: {name: int32[(accum,) batch, length]}."""
        accum, rows = self._shape
        local = next(self._train)
        if accum == 1:
            return self._placed(local, (rows,))
        return self._placed({name: self._by_pass(array) for name, array in local.items()}, (accum, rows))

    def position(self) -> dict[str, Any]:
        """Returns the position behind the last training batch, by row of this process."""
        return self._train.get_state()

    def move_to(self, position: dict[str, Any]) -> None:
        """Continues at a position, which may hold more rows than this process reads."""
        self._train.set_state(position)

    def held_out_mean(self, measure: Callable[[Batch], jax.Array], count: int) -> float | None:
        """Returns the mean of `measure(batch)` over the first `count` global batches of held-out text, always the same.

        None where there is no such text.
        """
        if self._held_out is None:
            return None
        accum, rows = self._shape
        self._held_out.set_state(self._held_out_start)
        total = jnp.zeros(())
        for _ in range(count):
            local = {name: self._by_pass(array) for name, array in next(self._held_out).items()}
            for number in range(accum):
                batch = self._placed({name: array[number] for name, array in local.items()}, (rows,))
                # One at a time: on emulated devices, programs with collectives that do not wait for each other can starve
                # each other of threads.
                total = jax.block_until_ready(total + measure(batch))
        return float(total) / (count * accum)

    def close(self) -> None:
        """Ends the reading threads."""
        self._train.close()
        if self._held_out is not None:
            self._held_out.close()

    def _by_pass(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(self._shape[0], len(self._local), -1)

    def _placed(self, local: dict[str, np.ndarray], rows: tuple[int, ...]) -> Batch:
        """Places this process's rows of arrays whose leading dims are `rows` in all."""
        sharding = mesh_lib.batch_sharding(self._mesh, len(rows) - 1)
        place = jax.make_array_from_process_local_data
        return {name: place(sharding, array, (*rows, array.shape[-1])) for name, array in local.items()}


def _local_indices(mesh: jax.sharding.Mesh, rows: int) -> list[int]:
    """Returns which of a batch's rows lie on this process's devices, in order."""
    places = mesh_lib.batch_sharding(mesh).addressable_devices_indices_map((rows,))
    return sorted({row for place in places.values() if place for row in range(*place[0].indices(rows))})
