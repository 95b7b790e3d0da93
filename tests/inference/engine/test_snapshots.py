"""Checks which copies of states are kept and found. This module tests zerojax.inference.engine.snapshots.

tests/inference/engine/test_engine.py compares the tokens of prompts that go on from them.
"""

import jax.numpy as jnp
import numpy as np

from zerojax.inference.engine import snapshots
from zerojax.models import decoding

SLOTS = 3
HELD = [(decoding.Held((1,)), decoding.Held((2,), positions=None))]


def caches():
    """Returns keys [slots, tokens, 1] and states [slots, 2]: slot n holds n."""
    numbers = jnp.arange(SLOTS, dtype=jnp.float32)
    return [(jnp.broadcast_to(numbers[:, None, None], (SLOTS, 8, 1)), jnp.broadcast_to(numbers[:, None], (SLOTS, 2)))]


def words(count):
    return np.arange(count)


def test_a_prompt_gets_the_longest_copy_whose_keys_a_slot_holds():
    kept, texts = snapshots.Snapshots(HELD, caches()), [[], list(range(5)), list(range(8))]
    kept.keep(caches(), 1, words(3), 0)
    kept.keep(caches(), 2, words(7), 0)
    assert kept.find(words(9), 0, texts) == (1, 2, 7)
    assert kept.find(words(9), 0, texts[:2]) == (0, 1, 3), "no slot holds the keys of 7 tokens"
    assert kept.find(words(6), 0, texts) == (0, 1, 3)
    assert kept.find(words(9), 1, texts) == (0, 0, 0), "it is another adapter's"
    assert kept.find(words(9)[::-1], 0, texts) == (0, 0, 0)
    [(keys, state)] = kept.restore(caches(), 0, 2, 0)
    assert np.all(keys[0] == 2) and np.all(state[0] == 1), "keys of a slot that holds more, and the state of the copy"
    assert np.all(keys[1] == 1) and np.all(state[1] == 1)
    kept.forget()
    assert kept.find(words(9), 0, texts) == (0, 0, 0)


def test_the_copy_that_was_neither_made_nor_used_for_longest_gives_way():
    kept, texts = snapshots.Snapshots(HELD, caches()), [list(range(8))]
    for count in (2, 3, 4):
        kept.keep(caches(), 0, words(count), 0)
    kept.restore(caches(), kept.find(words(3), 0, texts)[0], 0, 0)  # the one of 3 tokens
    kept.keep(caches(), 1, words(2), 0)  # it is there, and none is made
    kept.keep(caches(), 0, words(6), 0)
    found = [kept.find(words(count), 0, texts)[2] for count in (2, 3, 4, 5, 6)]
    assert found == [2, 3, 3, 3, 6]
