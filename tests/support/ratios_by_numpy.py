"""Losses of rewarded answers, one answer and one token after the other. This module is the plain form of `zerojax.ops.ratios`."""

import math
import statistics


def loss(variant, log_probs, old, advantages, counts, most, clip, clip_high, extra=None):
    """Returns the loss of a batch, from float[answers, tokens] and float[answers]; `extra` is added to the term of each token."""
    terms = []
    for row, advantage in enumerate(advantages):
        learned = [at for at, count in enumerate(counts[row]) if count]
        gains = [log_probs[row][at] - old[row][at] for at in learned]
        ratios = [math.exp(gain) for gain in gains]
        if variant == "gspo":
            ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
        if variant == "rloo":
            ratios = [math.prod(ratios)] * len(ratios)
        bounds = 1 - clip, 1 + (clip if clip_high == -1 else clip_high)
        bounded = [min(max(ratio, bounds[0]), bounds[1]) for ratio in ratios]
        own = [-min(ratio * advantage, bound * advantage) for ratio, bound in zip(ratios, bounded)]
        terms.append([term + (0 if extra is None else extra[row][at]) for term, at in zip(own, learned)])
    if variant == "dapo":
        return statistics.mean([term for answer in terms for term in answer])
    if variant == "dr_grpo":
        return sum(map(sum, terms)) / (len(terms) * most)
    return statistics.mean(map(statistics.mean, terms))
