"""Checks rows whose next tokens a grammar allows, beside rows without one. This module tests zerojax.inference.engine.engine."""

import numpy as np
import pytest
import small_engine

from zerojax.errors import UserError
from zerojax.inference.engine import engine as engine_lib

VOCAB, STOP = small_engine.CONFIG.vocab_size, 7
SCRIPT = [3, 60, 3, 32, 31, 9, 0, 1, 2, 59]


class Listed:
    """Allows tokens of a list: "only 3 9", or those that follow each other: "then 3 9"."""

    def __init__(self, text, size, stops):
        if size != VOCAB or stops != (STOP,):
            raise UserError("grammar: is another model's")
        self._kind, *words = text.split()
        self._tokens, self._at, self.seen = list(map(int, words)), 0, []

    def mask(self):
        own = self._tokens if self._kind == "only" else self._tokens[self._at : self._at + 1]
        bits = np.isin(np.arange(64), own)
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def add(self, token):
        self.seen.append(token)
        self._at += 1
        return self._kind == "then" and self._at == len(self._tokens)


def made(**how):
    return engine_lib.Engine(
        small_engine.model(), max_len=64, chunk=16, text_of=small_engine.text_of, grammar_of=Listed, **how
    )


@pytest.fixture(scope="module")
def engine():
    return made(slots=3)


def then(script):
    return "then " + " ".join(map(str, script))


def test_a_row_gets_the_tokens_that_its_grammar_allows_and_others_the_same_as_alone(engine):
    alone = small_engine.engine().generate([[9, 11, 40]], max_tokens=20, ignores_end=True)[0].tokens
    bound = engine.submit([5, 6], grammar=then(SCRIPT), max_tokens=30)
    drawn = engine.submit([5, 6], grammar=then(SCRIPT[::-1]), temperature=1.0, seed=3, top_k=2, logprobs=0)
    free = engine.submit([9, 11, 40], max_tokens=20, ignores_end=True)
    later = engine.submit(list(range(20, 50)), grammar=then([5]), max_tokens=2)  # its prompt is read in parts
    engine.run()
    assert (bound.tokens, bound.finish, bound.grammar.seen) == (SCRIPT, "stop", SCRIPT)
    assert (drawn.tokens, len(drawn.logprobs)) == (SCRIPT[::-1], len(SCRIPT))
    assert free.tokens == alone and (later.tokens, later.finish) == ([5], "stop")
    assert engine.generate([[9, 11, 40]], max_tokens=20, ignores_end=True)[0].tokens == alone


def test_among_allowed_tokens_the_models_likeliest_is_taken_and_one_that_ends_ends(engine):
    prompt, new = [9, 11, 40], []
    wanted = [3, 9, 33, 58]
    found = engine.generate([prompt], grammar="only 3 9 33 58", max_tokens=6)[0]
    for _ in range(6):  # the likeliest of all tokens are told in order
        told = (
            small_engine.engine().generate([prompt + new], max_tokens=1, logprobs=20, ignores_end=True)[0].logprobs[0]
        )
        ranks = [token for token in told.likeliest if token in wanted]
        if not ranks:  # beyond the first twenty
            break
        new.append(ranks[0])
    assert new and found.tokens[: len(new)] == new and {*found.tokens} <= {*wanted} and found.finish == "length"
    (ended,) = engine.generate([prompt], grammar=f"only {STOP}", max_tokens=6)
    assert (ended.tokens, ended.finish, ended.text, ended.grammar.seen) == ([STOP], "stop", "", [])


def test_an_engine_of_one_slot_adds_one_token_a_program_to_such_a_row():
    engine = made(slots=1)
    assert engine._programs.steps > 1
    (free,) = engine.generate([[9, 11, 40]], max_tokens=10, ignores_end=True)
    (bound,) = engine.generate([[9, 11, 40]], grammar=then(SCRIPT), max_tokens=30)
    assert bound.tokens == SCRIPT and (bound.finish, engine.is_idle) == ("stop", True)
    assert engine.generate([[9, 11, 40]], max_tokens=10, ignores_end=True)[0].tokens == free.tokens


def test_without_grammars_the_programs_have_no_such_argument(engine):
    engine._sent = None
    assert engine._settings().allowed is None


def test_a_grammar_that_cannot_be_read_is_refused():
    with pytest.raises(UserError, match="grammar: the engine reads none; pass grammar_of"):
        small_engine.engine().submit([3], grammar="only 3")
    assert small_engine.engine().is_idle
