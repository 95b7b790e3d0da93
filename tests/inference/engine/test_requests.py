"""Checks what a request is told. This module tests zerojax.inference.engine.requests."""

import jax
import numpy as np
from small_engine import CONFIG, DECODER, engine, model


def test_a_penalty_of_repetition_and_logarithms_are_those_of_the_definition():
    own, prompt = engine(), [9, 9, 30, 31] * 5  # which is read in two parts
    request = own.generate([prompt], max_tokens=6, repetition_penalty=1.7, logprobs=5, ignores_end=True)[0]
    text, params = list(prompt), model().params
    logits = jax.jit(lambda tokens: DECODER.logits(CONFIG, params, {}, tokens))
    for token, known in zip(request.tokens, request.logprobs):
        scores = np.asarray(logits(np.array([text + [0] * (32 - len(text))])))[0, len(text) - 1]
        logs = scores - np.log(np.exp(scores).sum())
        assert list(known.likeliest) == np.argsort(-logs, kind="stable")[:5].tolist()
        np.testing.assert_allclose(
            [known.own, *known.likeliest.values()], [logs[token], *np.sort(logs)[::-1][:5]], atol=1e-3
        )
        seen = np.isin(np.arange(len(scores)), text)
        penalised = np.where(seen, np.where(scores > 0, scores / 1.7, scores * 1.7), scores)
        assert token == penalised.argmax()
        text.append(token)
