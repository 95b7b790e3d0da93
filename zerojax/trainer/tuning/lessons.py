"""Makes the batches of a student. This module runs the teacher on texts that are given, or on the student's own answers.

The teacher's last states of a batch are made before the step, by a program without a backward pass that gathers its weights block by block.
Which steps learn from own answers, their prompts and the draws depend on the seed and the step alone, so a run that resumes has the same.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zerojax.data import batches, feed
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import rows, splits, tasks
from zerojax.models import layers
from zerojax.trainer import beside, examples
from zerojax.trainer import program as program_lib
from zerojax.trainer import teacher as teacher_lib
from zerojax.trainer.tuning import drawing, rollouts
from zerojax.tree import PyTree

_OWN = 2306_13649  # makes the choice of steps differ from other draws with the same seed and step


class Lessons:
    """Makes the batch of each step, with the teacher's last states of its tokens.

    Args:
      program: of the run, which has a teacher.
      tokenizer: of both models.
      pairs: the examples with prompts; None for windows of text.
      streams: gives the texts.
      tell: prints a line.
    """

    has_labels = True
    line = "compiling the program of the teacher"

    def __init__(
        self,
        program: program_lib.Program,
        tokenizer: tokenizer_lib.Tokenizer,
        pairs: splits.Splits | None,
        streams: feed.Feed,
        tell: Callable[[str], object] = lambda line: None,
    ):
        self._program, self._pairs, self._streams, self._tell = program, pairs, streams, tell
        self._states: Callable[[feed.Batch], jax.Array] | None = None
        self.told: dict[str, float] = {}
        if program.config.distill.own:
            assert pairs is not None
            rollouts.check_room(program.config, pairs)
            self._special = examples.special_tokens(program.family, program.weights.source, tokenizer, pairs.stops)
            self._prompts = list(tasks.prompts(pairs.train.examples, pairs.form))
            self._drawer: drawing.Drawer = drawing.ByEngine(program, self._special, tell)

    def next(self, step: int, params: PyTree) -> feed.Batch:
        """Returns the batch of a step, counted from 1: given texts, or answers of `params`."""
        if self._states is None:
            self._states = _states(self._program, self._tell)
        is_own, own = self.is_own(step), self._program.config.distill.own
        batch = self._answers(step, params) if is_own else self._streams.next()
        self.told = {"own": float(is_own)} if own else {}
        return {**batch, teacher_lib.KEY: self._states(batch)}

    def is_own(self, step: int) -> bool:
        """Returns whether a step learns from answers of the student."""
        config = self._program.config
        return drawn(config.seed, step) < config.distill.own

    def _answers(self, step: int, params: PyTree) -> feed.Batch:
        config, count, pairs = self._program.config, self._program.sizes.global_batch_size, self._pairs
        assert pairs is not None
        picked = range((step - 1) * count, step * count)
        prompts = [self._prompts[batches.shuffled(at, size=len(self._prompts), seed=config.seed)] for at in picked]
        asked = [
            drawing.DrawnAnswer(row, prompt.tolist(), at % 2**32, config.data.answer_len)
            for row, (at, prompt) in enumerate(zip(picked, prompts))
        ]
        self._drawer.renew(params)
        for answer in asked:
            self._drawer.submit(answer)
        while self._drawer.step():
            pass
        self._drawer.release()
        made = [rows.filled([self._example(answer)], pairs.form, self._program.lengths) for answer in asked]
        return self._streams.placed({name: np.stack([one[name] for one in made]) for name in made[0]})

    def _example(self, answer: drawing.DrawnAnswer) -> tasks.Example:
        tokens = np.array([*answer.prompt, *answer.tokens], np.int32)
        learned = rollouts.learned(answer, self._special, is_pair=False)
        labeled = np.concatenate([np.zeros(len(answer.prompt), bool), learned])
        return tasks.Example(tokens, tokens[:0], labeled, len(answer.prompt), "")


def drawn(seed: int, step: int) -> float:
    """Returns the number from 0 to 1 below `distill.own` of which a step learns from own answers."""
    return float(np.random.RandomState(np.random.PCG64([seed, step, _OWN])).random())


def _states(program: program_lib.Program, tell: Callable[[str], object]) -> Callable[[feed.Batch], jax.Array]:
    """Reads the teacher's weights, and returns f(batch) -> its last states, float[(accum,) batch, length, embed]."""
    teacher, config, mesh = program.weights.teacher, program.config, program.mesh
    assert teacher is not None
    dtype, family = config.policy.compute_dtype, teacher.family
    model = teacher.on_devices(mesh, dtype)

    def of_rows(params: PyTree, batch: Mapping[str, jax.Array]) -> jax.Array:
        return family.loss(model, params, batch, by_token=layers.SCORED).hidden  # type: ignore[attr-defined]

    how: dict[str, Any] = {"read": teacher.read, "function": of_rows, "tell": lambda line: tell(f"the teacher {line}")}
    by_row, params = beside.opened(program, family, teacher.abstract(dtype), **how)

    def of_batch(params: PyTree, batch: feed.Batch) -> jax.Array:
        if program.sizes.grad_accum == 1:
            return by_row(params, (batch,))
        return jax.lax.map(lambda one: by_row(params, (one,)), batch)

    wanted = program.abstract_batch[teacher_lib.KEY]
    states = jax.jit(lambda params, batch: of_batch(params, batch).astype(dtype), out_shardings=wanted.sharding)
    return lambda batch: states(params, batch)
