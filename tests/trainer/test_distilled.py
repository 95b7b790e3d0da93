"""Checks a student's loss against all logits of both models. This module tests zerojax.trainer.distilled."""

import asking
import divergences_by_numpy
import jax
import numpy as np
import pytest
import runs

from zerojax.trainer import state as state_lib
from zerojax.trainer import teacher
from zerojax.zero.update import padding

ROUNDING = 2e-5  # the same float32 sums in another order


def logits_of(family, model, params, tokens):
    return np.asarray(jax.jit(lambda params, tokens: family.logits(model, params, {}, tokens))(params, tokens))


def teachers_logits(built, tokens):
    """Returns those of the teacher, on one device."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    own, made = built.weights.teacher, built.weights.teacher.abstract(np.float32)
    made = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), made)
    return logits_of(own.family, own.model, own.read(made), tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 3, "grad_accum": 2, "mesh__replica": 2, "distill__own": 1.0},
        {"zero__stage": 0, "distill__loss": "reverse_kl", "distill__temperature": 2.0, "data__pack": False},
        {"zero__stage": 3, "lora__r": 4, "distill__loss": "jsd", "distill__share": 0.2},
    ],
    ids=["stage 3, own answers", "stage 0, reverse", "LoRA, mixture"],
)
def test_the_loss_is_the_mean_divergence_of_all_logits(texts_file, teacher_folder, cache_dir, changes):
    built, made = asking.taught(texts_file, teacher_folder, **changes)
    state = state_lib.first(built)
    batch = made.next(1, state.params)
    assert made.told == ({"own": 1.0} if "distill__own" in changes else {})
    read = {name: np.asarray(array).reshape(8, -1) for name, array in batch.items() if name != teacher.KEY}
    counts = read["labeled"][:, 1:] > 0
    params = jax.tree.map(np.asarray, padding.unpad({"params": state.params}, built.partition)["params"])
    with runs.on_devices(1):
        logits = []
        for row, tokens in enumerate(read["tokens"][:, :-1]):  # texts of a packed row see themselves alone
            segments = read["segments"][row, :-1] if "segments" in read else np.ones(len(tokens), int)
            own = [np.zeros((len(tokens), built.model.vocab_size))] * 2
            for number in set(segments.tolist()) - {0}:
                at = np.flatnonzero(segments == number)
                found = (
                    logits_of(built.weights.family, built.model, params, tokens[None, at]),
                    teachers_logits(built, tokens[None, at]),
                )
                for place, (whole, part) in enumerate(zip(own, found)):
                    own[place] = whole.copy()
                    own[place][at] = part[0]
            logits.append(own)
    student, other = (np.stack([own[number] for own in logits]) for number in range(2))
    chosen = built.config.distill
    terms = divergences_by_numpy.divergence(chosen.loss, student, other, chosen.share, chosen.temperature)
    _, metrics = built.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], terms[counts].mean(), rtol=ROUNDING)
    for name, scores in (("student_loss", student), ("teacher_loss", other)):
        logs = np.asarray(jax.nn.log_softmax(scores))
        wanted = -np.take_along_axis(logs, read["tokens"][:, 1:, None], axis=-1)[..., 0][counts].mean()
        np.testing.assert_allclose(metrics[name], wanted, rtol=ROUNDING)
