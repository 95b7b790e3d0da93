"""Compares an engine's tokens with those that transformers computed. This module asks engines as many clients would.

Prompts arrive while others are answered, are read in parts, and go on from slots that hold what they begin with.
"""

import golden_models

from zerojax.inference.engine import engine as engine_lib
from zerojax.models import decoding

NEW = 12  # tokens that transformers added


def golden_prompts(loaded, expected):
    """Returns the prompts, and the tokens of transformers after them."""
    generated = expected["generated"].tolist()
    if loaded.family.is_encoder_decoder:
        prompts = [row[mask > 0].tolist() for row, mask in zip(expected["input_ids"], expected["attention_mask"])]
        return prompts, [row[1:] for row in generated]
    length = len(generated[0]) - NEW
    return [row[:length] for row in generated], [row[length:] for row in generated]


def assert_tokens_of_transformers(name, loaded):
    """Checks an engine of a golden model, and returns it."""
    prompts, wanted = golden_prompts(loaded, golden_models.expected(name))
    own = engine_lib.Engine(loaded, slots=2, max_len=48, max_inputs=32, chunk=16)
    asked = []

    def ask(row, known=0):
        prompt, rest = prompts[row] + wanted[row][:known], wanted[row][known:]
        asked.append((own.submit(prompt, max_tokens=len(rest)), rest))
        own.step()
        own.step()

    for row in range(3):
        ask(row)
    if not loaded.family.is_encoder_decoder:
        own.run()
        for row in (2, 0, 1):
            ask(row, known=10)
    cancelled = own.submit(prompts[1], max_tokens=NEW)
    own.step()
    own.cancel(cancelled)
    own.run()
    for request, rest in asked:
        assert request.tokens == rest[: len(request.tokens)]
        assert len(request.tokens) == len(rest) or request.finish == "stop"
    is_recurrent = decoding.is_recurrent(loaded.family.caches(loaded.config))
    reuses = not loaded.family.is_encoder_decoder and not is_recurrent
    assert any(request.reused for request, _ in asked) == reuses
    assert own.is_idle
    return own
