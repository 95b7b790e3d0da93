"""Checks that a request gets the tokens that it gets alone, whatever is asked beside it. This module tests zerojax.inference.engine."""

import golden_models
import numpy as np
import pytest
from small_engine import LENGTH, NEW, engine, model

from zerojax.errors import UserError
from zerojax.inference.engine import engine as engine_lib


@pytest.mark.filterwarnings("ignore:mesh:UserWarning")  # four devices do not divide all heads and positions
@pytest.mark.parametrize(
    "name, ways",
    [
        ("llama", 2),
        ("t5", 1),
        *[
            pytest.param(name, ways, marks=pytest.mark.long)
            for name, ways in (
                ("llama", 1),
                ("llama", 4),
                ("qwen2", 1),
                ("qwen2", 2),
                ("t5", 2),
                ("bart", 1),
                ("bart", 4),
            )
        ],
    ],
)
def test_greedy_tokens_are_those_of_transformers_in_slots_that_change_hands(name, ways):
    loaded, expected = golden_models.load(name, 0, ways), golden_models.expected(name)
    is_pair = loaded.family.is_encoder_decoder
    mask = expected["attention_mask"] > 0 if is_pair else np.ones_like(expected["input_ids"], bool)
    prompts = [row[is_own] for row, is_own in zip(expected["input_ids"], mask)]
    wanted = expected["generated"][:, 1 if is_pair else mask.shape[1] :]
    chunk = 8 if is_pair else 32  # an encoder reads a longer prompt too
    own = engine_lib.Engine(loaded, slots=2, max_len=48, max_inputs=32, chunk=chunk)
    for request, row in zip(own.generate(prompts, max_tokens=NEW), wanted):
        assert request.tokens == row[: len(request.tokens)].tolist()
        assert len(request.tokens) == NEW or request.finish == "stop"


def test_requests_get_what_they_get_alone_and_leave_nothing_behind():
    """Prompts share beginnings, end at stops or are cancelled, and are longer than a program reads."""
    random, own = np.random.default_rng(1), engine()
    shared = random.integers(8, 61, 40).tolist()
    asked = []
    for number in range(24):
        prompt = shared[: random.integers(1, 41)] + random.integers(8, 61, random.integers(1, 8)).tolist()
        settings = {"max_tokens": int(random.integers(1, LENGTH - len(prompt)))}
        if number % 3:
            settings |= {"temperature": 0.8, "seed": number, "top_k": int(random.integers(0, 30)), "top_p": 0.9}
        if number % 4 == 1:
            settings |= {"repetition_penalty": 1.3, "logprobs": 3, "stop_strings": (" 1", "3 2")}
        asked.append((prompt, settings))
    own._reuses = False
    alone = []
    for prompt, settings in asked:
        request = own.submit(prompt, **settings)
        own.run()
        alone.append(request)
    own._reuses = True
    together, cancelled = [], []
    for number, (prompt, settings) in enumerate(asked):
        request = own.submit(prompt, **settings)
        together.append(request)
        if number % 5 == 4:
            cancelled.append(own.submit(prompt, max_tokens=20))
        for _ in range(random.integers(0, 6)):
            own.step()
        if cancelled and random.integers(2):
            own.cancel(cancelled[-1])
    own.run()
    for one, other in zip(alone, together):
        assert (one.tokens, one.finish, one.text) == (other.tokens, other.finish, other.text)
        np.testing.assert_allclose(
            [known.own for known in one.logprobs], [known.own for known in other.logprobs], atol=1e-4
        )
    assert {request.finish for request in alone} == {"stop", "length"}
    assert any(request.reused for request in together) and not any(request.reused for request in alone)
    assert own.is_idle and own.counts == {"waiting": 0, "running": 0} and not own._draws.is_live.any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_after_a_warm_up_no_request_compiles(name):
    loaded = golden_models.load(name, 0)
    own = engine_lib.Engine(loaded, slots=2, max_len=40, max_inputs=24, chunk=20)
    own.warm_up()
    assert own.is_idle
    made = [own._programs.first, own._programs.further, own._programs.decode]
    before = [program._cache_size() for program in made]
    for length in (1, 15, 16, 17, 20, 21, 24) + (() if name == "t5" else (30, 37, 38)):
        for settings in ({}, {"temperature": 1.0, "logprobs": 2, "repetition_penalty": 1.1}):
            own.submit([9] * length, max_tokens=2, **settings)
    own.run()
    assert [program._cache_size() for program in made] == before


def test_what_does_not_fit_is_refused_in_one_line():
    own = engine()
    for line, prompt, settings in (
        ("prompt: has 64 tokens, and at most 63 fit", [9] * 64, {}),
        ("max_tokens: is 62, and after a text of 3 tokens 61 fit", [9] * 3, {"max_tokens": 62}),
        ("prompt: holds 61, and the model knows ids from 0 to 60", [61], {}),
        ("prompt: must be token ids", [], {}),
        ("stop_ids: holds -1", [9], {"stop_ids": (-1,)}),
        ("top_p: must be above 0", [9], {"top_p": 0.0}),
        ("temperature: must be 0", [9], {"temperature": float("nan")}),
        ("logprobs: must be from 0 to 20", [9], {"logprobs": 21}),
    ):
        with pytest.raises(UserError, match=line):
            own.submit(prompt, **settings)
    assert own.is_idle
    with pytest.raises(UserError, match="format: must be one of none, int8, fp8, nf4, and is 'int3'"):
        engine_lib.Engine(model(), format="int3")
