"""The loss of a student that learns a teacher's probabilities. This module holds what `config.distill` adds to a step.

A batch has the teacher's last states beside its tokens (`tuning/lessons.py`), and the frozen weights of its head are among the params. So
the logits of both models exist for a few tokens at a time (`ops.divergences`), and no step runs or differentiates the teacher's layers.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.data import parts
from zerojax.models import family as family_lib
from zerojax.models import layers
from zerojax.models.family import ModelConfig
from zerojax.ops import divergences
from zerojax.trainer import settings as settings_lib
from zerojax.trainer import teacher as teacher_lib
from zerojax.tree import PyTree
from zerojax.zero.sharded_batch import outputs


def loss(
    config: settings_lib.Config, family: family_lib.Family, model: ModelConfig, teacher: teacher_lib.Teacher
) -> Callable[..., Any]:
    """Returns f(params, batch, *keys) -> (the mean divergence over the labels of a batch, metrics)."""
    chosen = config.distill

    def of_labels(params: PyTree, batch: Mapping[str, jax.Array], *keys: jax.Array) -> tuple[Any, dict[str, Any]]:
        read = {name: array for name, array in batch.items() if name != teacher_lib.KEY}
        student: Any = family.loss(model, params, read, *keys, by_token=layers.SCORED)
        other = teacher.scored(batch[teacher_lib.KEY], params[teacher_lib.KEY])
        terms = divergences.by_token(student, other, chosen.loss, share=chosen.share, temperature=chosen.temperature)
        shape = student.labels.shape
        counts = (parts.labeled(batch) > 0 if "labeled" in batch else jnp.ones(shape)).astype(jnp.float32)

        mean = functools.partial(outputs.weighted_mean, weights=counts)

        return mean(terms.divergence), {"student_loss": mean(terms.student), "teacher_loss": mean(terms.teacher)}

    return of_labels
