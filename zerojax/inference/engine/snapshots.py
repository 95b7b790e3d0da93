"""States of recurrent layers, kept beside the slots for prompts that go on from there. This module holds them.

Keys and values of a text are also those of its beginnings. A recurrent state is that after the last token alone, so it is copied where the
first part of a prompt ends, and the last. There are as many copies as slots; one that was neither made nor used for longest gives way.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.tree import PyTree


@dataclasses.dataclass
class _Snapshot:
    """What a copy is of: the tokens read, the number of their adapter, and when it was made or used last."""

    text: np.ndarray
    adapter: int
    used: int


class Snapshots:
    """The copies.

    Args:
      held: of the caches (`Family.caches`), of which some arrays are recurrent.
      caches: the arrays; the copies have their shapes and shardings.
    """

    def __init__(self, held: PyTree, caches: PyTree):
        self._is_recurrent = [one.positions is None for one in jax.tree.leaves(held)]
        shardings = [array.sharding for array in jax.tree.leaves(caches)]
        own, empty = self._recurrent(shardings), functools.partial(jax.tree.map, jnp.zeros_like)
        self.arrays = jax.jit(empty, out_shardings=own)(self._recurrent(caches))
        self._of_rows: list[_Snapshot | None] = [None] * len(self.arrays[0])
        self._clock = 0
        self._copied = jax.jit(_copied, donate_argnums=0, out_shardings=own)
        self._restored = jax.jit(self._with_state, donate_argnums=0, out_shardings=shardings)

    def forget(self) -> None:
        """Forgets all copies, such as those of other weights."""
        self._of_rows = [None] * len(self._of_rows)

    def keep(self, caches: PyTree, slot: int, text: np.ndarray, adapter: int) -> None:
        """Copies the state of a slot, which has read `text`."""
        row = next((n for n, _ in self._beginning(text, adapter) if len(self._text(n)) == len(text)), None)
        if row is None:
            row = min(range(len(self._of_rows)), key=lambda n: -1 if (one := self._of_rows[n]) is None else one.used)
            self.arrays = self._copied(self.arrays, self._recurrent(caches), row, slot)
        self._note(row, text, adapter)

    def find(self, prompt: np.ndarray, adapter: int, texts: list[list[int]]) -> tuple[int, int, int]:
        """Returns the copy of the longest beginning of a prompt, the slot that holds keys and values of these tokens, and their number.

        Args:
          prompt: its tokens.
          adapter: the number of its adapter.
          texts: those whose keys and values the slots hold with that adapter.
        """
        best = 0, 0, 0
        for row, length in self._beginning(prompt, adapter):
            holding = [0]
            if not all(self._is_recurrent):
                holding = [n for n, text in enumerate(texts) if np.array_equal(text[:length], prompt[:length])]
            if length > best[2] and holding:
                best = row, holding[0], length
        return best

    def restore(self, caches: PyTree, row: int, source: int, slot: int) -> PyTree:
        """Returns the caches with a copy's state, and the keys and values of slot `source`, in a slot. The caches are donated."""
        found = self._of_rows[row]
        assert found is not None
        self._note(row, found.text, found.adapter)
        leaves, form = jax.tree.flatten(caches)
        return jax.tree.unflatten(form, self._restored(leaves, self.arrays, row, source, slot))

    def _beginning(self, text: np.ndarray, adapter: int) -> list[tuple[int, int]]:
        """Returns the copies whose tokens begin a text, and how many these are."""
        found = []
        for row, one in enumerate(self._of_rows):
            if one is not None and one.adapter == adapter and np.array_equal(one.text, text[: len(one.text)]):
                found.append((row, len(one.text)))
        return found

    def _text(self, row: int) -> np.ndarray:
        found = self._of_rows[row]
        assert found is not None
        return found.text

    def _note(self, row: int, text: np.ndarray, adapter: int) -> None:
        self._clock += 1
        self._of_rows[row] = _Snapshot(text, adapter, self._clock)

    def _recurrent(self, caches: PyTree) -> list[Any]:
        return [leaf for leaf, is_one in zip(jax.tree.leaves(caches), self._is_recurrent) if is_one]

    def _with_state(
        self, leaves: list[jax.Array], arrays: list[jax.Array], row: int, source: int, slot: int
    ) -> list[jax.Array]:
        states = iter(arrays)
        return [
            leaf.at[slot].set(next(states)[row] if is_one else leaf[source])
            for leaf, is_one in zip(leaves, self._is_recurrent)
        ]


def _copied(arrays: list[jax.Array], states: list[jax.Array], row: int, slot: int) -> list[jax.Array]:
    return [array.at[row].set(state[slot]) for array, state in zip(arrays, states)]
