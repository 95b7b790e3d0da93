"""Checks the form of answers. That a stream has the text of a whole answer is in test_app.py. This module tests zerojax.serve.responses."""

import json
import math

import numpy as np

from zerojax.inference.engine import detokenizer, requests
from zerojax.serve import responses, tokenizer


def ended(tokens, **settings):
    """Returns a request that has got its tokens."""
    chosen = requests.RequestSettings(**settings)
    text = detokenizer.Growing(tokenizer.Words().text_of)
    request = requests.Request(np.array([1, 2]), chosen, len(tokens), so_far=text)
    for token in tokens:
        logarithm = requests.LogProb(-math.inf, {token: -0.5, 3: -math.inf})
        request.add(token, None if chosen.logprobs is None else logarithm, ())
    return request


def test_a_prompt_is_counted_once_for_all_of_its_answers():
    made = responses.Writer(tokenizer.Words(), "m", is_chat=False, prompts=2, choices=[ended([5, 6]) for _ in range(6)])
    assert {name: made.usage()[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
    }


def test_what_may_begin_a_stop_string_is_sent_when_it_is_none():
    request = ended([12], stop_strings=("2 7",))
    request.finish = ""  # as if more tokens came
    made = responses.Writer(tokenizer.Words(), "m", is_chat=False, prompts=1, choices=[request])
    assert made.changes(has_usage=False)[0]["choices"][0]["text"] == "1"
    assert not made.changes(has_usage=False)
    request.most = 3
    request.add(8, None, ())
    assert made.changes(has_usage=False)[0]["choices"][0]["text"] == "2 8"


def test_logarithms_are_numbers_that_json_has():
    for is_chat in (False, True):
        made = responses.Writer(tokenizer.Words(), "m", is_chat=is_chat, prompts=1, choices=[ended([5], logprobs=2)])
        text = json.dumps(made.whole(), allow_nan=False)
        assert str(responses.LEAST_LOGPROB) in text and "Infinity" not in text


def test_a_part_of_a_letter_has_no_bytes():
    own = tokenizer.Words()
    own.name_of = lambda token: {5: "é", 6: detokenizer.CUT}.get(token, "")
    made = responses.Writer(own, "m", is_chat=True, prompts=1, choices=[ended([5, 6], logprobs=0)])
    content = made.whole()["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[195, 169], None]


def test_the_kind_of_an_error_follows_from_its_status():
    kinds = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error", 503: "server_error"}
    for status, kind in kinds.items():
        found = {"message": "x", "type": kind, "param": None, "code": "c"}
        assert responses.error(status, "x", None, "c") == {"error": found}
