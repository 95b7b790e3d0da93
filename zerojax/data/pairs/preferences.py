"""Reads which of two answers is better, in the forms that datasets have. This module finds the prompt, the chosen and the rejected answer.

| an example has | the pair |
|---|---|
| chosen, rejected, perhaps prompt | as it is (TRL, UltraFeedback, HH-RLHF) |
| input.messages, preferred_output, non_preferred_output | these (OpenAI's preference files) |
| label, rejected, perhaps text | these: the fields that `answer`, `rejected` and `prompt` name by default |
| completions (or responses, answers) with scores (or ratings) | the answer of the highest score, and that of the lowest |
"""

from collections.abc import Mapping
from typing import Any

from zerojax import errors
from zerojax.data.pairs import templates
from zerojax.errors import UserError

FIELDS = PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
TEXT, LABEL = "text", "label"
ANSWERS, SCORES = ("completions", "responses", "answers"), ("scores", "ratings")
UNPAIRED = ("completion", "label")  # an answer that is good or bad, without another


def pair_of(example: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Returns an example with the fields CHOSEN and REJECTED, and PROMPT if it has one.

    Raises:
      UserError: it is of no known form, or its scores choose none.
    """
    if CHOSEN in example and REJECTED in example:
        return example
    if "preferred_output" in example and "non_preferred_output" in example:
        asked = templates.plain(example.get("input"))
        found = {**example, CHOSEN: example["preferred_output"], REJECTED: example["non_preferred_output"]}
        if isinstance(asked, Mapping) and "messages" in asked:
            found |= {PROMPT: asked["messages"], templates.TOOLS: asked.get(templates.TOOLS)}
        return found
    if LABEL in example and REJECTED in example:
        found = {**example, CHOSEN: example[LABEL]}
        return {**found, PROMPT: example[TEXT]} if PROMPT not in example and TEXT in example else found
    answers, scores = (next((name for name in names if name in example), "") for names in (ANSWERS, SCORES))
    if answers and scores:
        return {**example, **_by_score(example, answers, scores, place)}
    if all(name in example for name in UNPAIRED):
        raise UserError(
            f"{place}: has one answer that is good or bad ({', '.join(UNPAIRED)}), and two answers are compared here; give pairs of them"
        )
    raise UserError(
        f"{place}: has no {CHOSEN!r} with {REJECTED!r}, and no {' or '.join(ANSWERS)} with {' or '.join(SCORES)}; its fields: "
        f"{', '.join(map(str, example))}; name others in `prompt`, `answer` and `rejected`"
    )


def _by_score(example: Mapping[str, Any], answers: str, scores: str, place: str) -> dict[str, Any]:
    """Returns the answers of the highest and of the lowest score; of several the first."""
    found, rated = templates.plain(example[answers]), templates.plain(example[scores])
    is_rated = isinstance(rated, list) and all(isinstance(score, int | float) for score in rated)
    if not isinstance(found, list) or not is_rated or len(found) != len(rated) or len(found) < 2:
        raise UserError(
            f"{place}: {scores} must be a number for each of {answers}, two or more, and is {errors.shown(rated)} for "
            f"{len(found) if isinstance(found, list) else errors.shown(found)}"
        )
    best, worst = max(range(len(rated)), key=rated.__getitem__), min(range(len(rated)), key=rated.__getitem__)
    if not rated[best] > rated[worst]:
        raise UserError(f"{place}: all {scores} are alike ({rated[best]}), so none of the answers is better; remove it")
    return {CHOSEN: found[best], REJECTED: found[worst]}
