"""Feeds a run. This module gives each process its rows of every global batch, placed on its devices, and measures held-out loss."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax.data import batches
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.trainer import program as program_lib


class Streams:
    """The batches of a run: this process's rows of each global batch, placed on its devices."""

    def __init__(self, program: program_lib.Program, tokenizer: tokenizer_lib.Tokenizer, data_dir: pathlib.Path):
        self.tokenizer = tokenizer
        self._program, self._data_dir = program, data_dir
        sizes = program.sizes
        self._shape = (sizes.grad_accum, sizes.global_batch_size // sizes.grad_accum)
        self._local = _local_indices(program.mesh, self._shape[1])
        self._rows = [a * self._shape[1] + i for a in range(self._shape[0]) for i in self._local]
        config = program.config
        self._train = self._open(config.data.train_split, config.seed, shuffle=True)
        self._held_out = None
        if config.data.eval_split:  # opened now, lest a wrong name be found after hours of training
            self._held_out = self._open(config.data.eval_split, config.seed + 1, shuffle=False)
            self._held_out_start = self._held_out.get_state()

    def next(self) -> dict[str, jax.Array]:
        """Returns the next training batch: {"tokens": int32[(accum,) batch, length + 1]}."""
        tokens = next(self._train)["tokens"]
        shape: tuple[int, ...] = (*self._shape, tokens.shape[-1])
        local = tokens.reshape(self._shape[0], len(self._local), -1)
        if self._shape[0] == 1:
            shape, local = shape[1:], local[0]
        return {"tokens": jax.make_array_from_process_local_data(self._program.batch_sharding, local, shape)}

    def position(self) -> dict[str, Any]:
        """Returns where the training batches stand, by row of this process."""
        return self._train.get_state()

    def move_to(self, position: dict[str, Any]) -> None:
        """Continues at a position, which may hold more rows than this process reads."""
        self._train.set_state(position)

    def evaluation_loss(self, params: Any) -> float | None:
        """Returns the mean loss over the first `evaluate.batches` global batches of held-out text, always the same.

        None where the config names no such text.
        """
        if self._held_out is None:
            return None
        count, (accum, rows) = self._program.config.evaluate.batches, self._shape
        sharding = mesh_lib.batch_sharding(self._program.mesh)
        self._held_out.set_state(self._held_out_start)
        total = jnp.zeros(())
        for _ in range(count):
            tokens = next(self._held_out)["tokens"]
            for local in tokens.reshape(accum, len(self._local), -1):
                placed = jax.make_array_from_process_local_data(sharding, local, (rows, local.shape[-1]))
                # One at a time: on emulated devices, programs with collectives that do not wait for each other can starve
                # each other of threads.
                total = jax.block_until_ready(total + self._program.eval_loss(params, placed))
        return float(total) / (count * accum)

    def close(self) -> None:
        """Ends the reading threads."""
        self._train.close()
        if self._held_out is not None:
            self._held_out.close()

    def _open(self, split: str, seed: int, *, shuffle: bool) -> batches.Batches:
        config = self._program.config
        return batches.open_batches(
            config.data,
            self.tokenizer,
            split=split,
            data_dir=self._data_dir,
            rows=self._rows,
            num_rows=self._program.sizes.global_batch_size,
            seq_len=config.seq_len,
            seed=seed,
            shuffle=shuffle,
        )


def _local_indices(mesh: jax.sharding.Mesh, rows: int) -> list[int]:
    """Returns which of a batch's rows lie on this process's devices, in order."""
    places = mesh_lib.batch_sharding(mesh).addressable_devices_indices_map((rows,))
    return sorted({row for place in places.values() if place for row in range(*place[0].indices(rows))})
