"""Gives a block the random streams of its Linen scope as inputs. This module makes them draw inside the block what they would draw without
it, also if it is traced again.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax.core.scope import LazyRng

from zerojax import tree
from zerojax.zero.sharded_batch import keys as keys_lib


class Streams:
    """The random streams of a scope that has some.

    Attributes:
      words: inputs of the block: the words of the streams' keys, and the numbers that are folded into the keys of an `apply` inside.
    """

    def __init__(self, scope: Any):
        self._scope, self._before = scope, _copied(scope.rng_counters)
        self._lazy = dict(scope.rngs)
        keys = [lazy.rng for lazy in self._lazy.values()]
        self._impls = [*map(tree.key_impl, keys)]
        self.words = [*map(tree.key_words, keys), *keys_lib.numbers()]

    @contextlib.contextmanager
    def running(self, scope: Any, words: Sequence[jax.Array]) -> Iterator[None]:
        """Gives the streams to another scope of the same module. Afterwards the block's own scope has drawn as often."""
        count = len(self._impls)
        keys = map(tree.keys_again, words[:count], self._impls)
        scope.rngs = {name: LazyRng(key, lazy.suffix) for key, (name, lazy) in zip(keys, self._lazy.items())}
        scope.rng_counters = _copied(self._before)
        counters = scope.rng_counters
        with keys_lib.folding(tuple(words[count:])):
            yield
        self._scope.rng_counters.update(_copied(counters))


def _copied(counters: Any) -> dict[str, Any]:
    """Returns a copy of Linen's counts of draws, of a scope and those inside it."""
    return {key: _copied(count) if isinstance(count, dict) else count for key, count in counters.items()}
