"""Asks the model in training, and makes batches of its answers. This module holds what the task `grpo` does between two steps.

Answers are drawn by the state's weights, gathered once where they fit (`drawing`), one to a prompt or several with what the
user's environment says between them (`conversations`). A group of them is rewarded, and `config.grpo.variant` makes advantages of that.
Prompts and draws depend on the seed and the step alone, so a run that resumes asks the same. All processes ask the same; process 0 rewards
the answers, and its numbers are those of all.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax import mesh as mesh_lib
from zerojax.data import batches, feed
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import environments, rewards, rows, splits, tasks, templates
from zerojax.errors import UserError
from zerojax.inference import generate
from zerojax.launch import processes
from zerojax.lora import families as families_lora
from zerojax.models import family as family_lib
from zerojax.ops import ratios
from zerojax.trainer import config as config_lib
from zerojax.trainer import examples, recorder, rewarded
from zerojax.trainer import program as program_lib
from zerojax.trainer import settings as settings_lib
from zerojax.trainer.tuning import answers, conversations, drawing, values, weight_copies
from zerojax.tree import PyTree
from zerojax.zero.offload import fetched_params

STALENESS = "rollout_staleness"  # updates since the weights that drew a step's answers
_VERSION = "version"  # among saved arrays


def check(config: settings_lib.Config, pairs: splits.Splits) -> None:
    """Checks that answers to the prompts can be drawn, before a program is built.

    Raises:
      UserError: groups do not divide the batch, a prompt with its answer is longer than a row, or there is no such reward.
    """
    config_lib.batch_sizes(config, mesh_lib.ways(config_lib.make_mesh(config)))
    config_lib.rollout_mesh(config)
    if not rewards.is_folder(config.grpo.reward):
        rewards.find(config.grpo.reward)
    if config.grpo.environment:
        environments.find(config.grpo.environment)
        if pairs.form.is_encoder_decoder or jax.process_count() > 1:
            why = (
                "an encoder reads one prompt"
                if pairs.form.is_encoder_decoder
                else "threads of several processes differ"
            )
            raise UserError(f"config.grpo.environment: is {config.grpo.environment}, and {why}; omit it")
    check_room(config, pairs)


def check_room(config: settings_lib.Config, pairs: splits.Splits) -> None:
    """Raises a UserError if a row has no room for a prompt with its answer."""
    longest = max(map(len, tasks.prompts(pairs.train.examples, pairs.form)))
    if not pairs.form.is_encoder_decoder and longest > config.seq_len + 1 - config.data.answer_len:
        raise UserError(
            f"config.seq_len: is {config.seq_len}, and the longest prompt has {longest} tokens, after which an answer has "
            f"config.data.answer_len={config.data.answer_len}; set --config.seq_len={longest + config.data.answer_len - 1}"
        )


class Rollouts:
    """Makes the batch of each step from answers of the model."""

    has_labels = False  # whether what it learns has a loss on held-out examples
    line = "compiling the program of the answers"

    def __init__(
        self,
        program: program_lib.Program,
        tokenizer: tokenizer_lib.Tokenizer,
        pairs: splits.Splits,
        streams: feed.Feed,
        tell: Callable[[str], object] = lambda line: None,
    ):
        name = program.config.grpo.reward
        self._values = values.open_model(program, tokenizer, tell) if rewards.is_folder(name) else None
        self._program, self._tokenizer, self._pairs, self._streams = program, tokenizer, pairs, streams
        self._special = examples.special_tokens(program.family, program.weights.source, tokenizer, pairs.stops)
        self._prompts = list(tasks.prompts(pairs.train.examples, pairs.form))
        self._is_pair = program.family.is_encoder_decoder
        self._drawer: drawing.Drawer = (
            drawing.ByTraining(program, self._special, tell)
            if program.config.grpo.exact
            else drawing.ByEngine(program, self._special, tell, self._look)
        )
        self._copies = None if program.rollout_mesh is None else weight_copies.WeightCopies(program, program.rollouts)
        adapted, bare = program.weights.adapted, program.family
        if adapted is not None:
            bare = families_lora.with_adapters(program.weights.family, adapted.chosen, 0)
        self._log_probs = {
            rewarded.OLD: _log_probs(program, program.family),
            rewarded.REFERENCE: _log_probs(program, bare),
        }
        self._rules = self._made_rules()
        self._made: _Made | None = None
        self._trained: jax.Array | None = None  # a weight of the last step, which other devices may not have made yet
        self._ended: float | None = None  # when they had
        self._asked: float | None = None  # when the last answers were done
        self.told: dict[str, float] = {}  # of the last step: the seconds of its phases, and what was drawn

    @property
    def fingerprints(self) -> dict[str, str]:
        """Returns what tells the folder of the reward apart from another, if it is one."""
        return values.fingerprint(self._program.config.grpo.reward)

    def next(self, step: int, params: PyTree) -> feed.Batch:
        """Returns the batch of a step, counted from 1: answers of `params`, of the weights some inner steps before, or, if other devices
        draw them, of weights that are one update older."""
        inner, made = self._program.config.grpo.inner_steps, self._of(step, params)
        if made.batch is None:
            made.batch = self._streams.placed(made.arrays)
        if self._copies is not None and step % inner == 0:
            self._copies.renew(params, step - 1)
        self.told = {**(made.told if step % inner == 1 % inner else {}), STALENESS: float(step - 1 - made.version)}
        return made.batch

    def ahead(self, step: int, params: PyTree) -> dict[str, np.ndarray]:
        """Returns what is saved of the batch of a step that has not begun: {} if a run that resumes asks the same weights for it.

        Args:
          step: the next.
          params: the weights before it.
        """
        if self._copies is None:
            return {}
        made = self._of(step, params)
        return {**made.arrays, _VERSION: np.array(made.version)}

    def restore(self, step: int, saved: Mapping[str, np.ndarray]) -> None:
        """Takes what `ahead` returned for a step."""
        if self._copies is not None and saved:
            arrays = {name: array for name, array in saved.items() if name != _VERSION}
            self._made = _Made(self._number(step), int(saved[_VERSION]), arrays, {})

    def _number(self, step: int) -> int:
        return (step - 1) // self._program.config.grpo.inner_steps

    def _of(self, step: int, params: PyTree) -> "_Made":
        """Returns the answers of a step, which are drawn if they are not there."""
        number, copies = self._number(step), self._copies
        if self._made is not None and self._made.number == number:
            return self._made
        if copies is None:
            jax.block_until_ready(params)  # the phases of this step begin when the one before has ended
            self._made = self._ask(number, params, step - 1)
            return self._made
        if copies.version < 0:
            copies.renew(params, step - 1)
        self._trained, self._ended = jax.tree.leaves(params)[0], None
        # Without it, arrays of the engine would be made on the first device, and wait there for the step.
        with jax.default_device(self._program.rollouts.mesh.devices.flat[0]):
            self._made = self._ask(number, copies.params, copies.version)
        return self._made

    def _look(self) -> None:
        """Notes when the last step has ended, as far as it is known."""
        if self._trained is not None and self._ended is None and self._trained.is_ready():  # type: ignore[attr-defined]
            self._ended = time.perf_counter()

    def _ask(self, number: int, params: PyTree, version: int) -> "_Made":
        config, sizes = self._program.config, self._program.sizes
        group, count = config.grpo.group, sizes.global_batch_size
        first = number * (count // group)
        picked = [
            batches.shuffled(first + at, size=len(self._prompts), seed=config.seed) for at in range(count // group)
        ]
        numbers = [index for index in picked for _ in range(group)]
        clock = _Clock(self._look)
        self._drawer.renew(params)
        prompts = [self._prompts[index] for index in numbers]
        texts = [self._tokenizer.decode(ids) for ids in prompts]
        talks = conversations.run(self._drawer, prompts, texts, number * count, self._rules)
        chosen = self._drawer.choices()
        self._drawer.release()
        clock.lap("rollout_seconds")
        by_row = rows.Rows([self._example(talk) for talk in talks], self._pairs.form, packs=False)
        each = [by_row.arrays(row) for row in range(count)]
        batch = {name: np.stack([one[name] for one in each]) for name in each[0]}
        scores = self._scores(talks, texts, numbers, batch)
        clock.lap("reward_seconds")
        batch |= {
            rewarded.DRAWN: _bits(_drawn(talks, self._program.lengths[rewarded.DRAWN], begins_at_answer=self._is_pair)),
            rewarded.REWARD: _bits(scores[:, None]),
            rewarded.ADVANTAGE: _bits(advantages(scores, group, config.grpo.variant)[:, None]),
        }
        if rewarded.CHOICES in self._program.lengths:
            batch[rewarded.CHOICES] = np.zeros((count, self._program.lengths[rewarded.CHOICES]), np.int32)
            for row, own in chosen.items():
                batch[rewarded.CHOICES][row, : own.size] = own.ravel()
        made = self._with_log_probs(batch, params)
        clock.lap("log_prob_seconds")
        return _Made(number, version, made, self._told(talks, clock))

    def _scores(
        self,
        talks: Sequence[conversations.Conversation],
        texts: Sequence[str],
        numbers: Sequence[int],
        batch: Mapping[str, np.ndarray],
    ) -> np.ndarray:
        """Returns the reward of each conversation, the same on all processes: float32[answers]."""
        if self._values is not None:
            return self._values(batch) + np.array([talk.reward for talk in talks], np.float32)
        scores, name = np.zeros(len(talks), np.float32), self._program.config.grpo.reward
        if processes.is_primary():
            reward = rewards.find(name)
            for row, (talk, text, index) in enumerate(zip(talks, texts, numbers)):
                label = self._pairs.train.examples[index].answer.strip()
                scores[row] = rewards.score(reward, name, text, talk.messages[-1]["content"], label) + talk.reward
        return np.asarray(multihost_utils.broadcast_one_to_all(scores))

    def _told(self, talks: Sequence[conversations.Conversation], clock: "_Clock") -> dict[str, float]:
        """Returns the metrics of a batch that the host knows."""
        drawn = sum(len(talk.learned) - talk.learned.count(False) for talk in talks)
        found = {**clock.seconds, "rollout_tokens_per_second": drawn / clock.seconds["rollout_seconds"]}
        if self._copies is not None:
            before, self._asked = self._asked, clock.last
            found[recorder.TRAIN_WAITS] = 0.0 if self._ended is None else max(0.0, clock.last - self._ended)
            found["rollout_wait_seconds"] = 0.0 if before is None else clock.first - before
        if self._rules.environment is not None:
            found["turns"] = sum(talk.answers for talk in talks) / len(talks)
            found["late"] = sum(talk.is_late for talk in talks) / len(talks)
        return found

    def _made_rules(self) -> conversations.Rules:
        """Returns how conversations go on."""
        config, form, tokenizer = self._program.config, self._pairs.form, self._tokenizer
        chosen = config.grpo

        def follow(messages: Sequence[templates.Message], last: int) -> list[int]:
            return tokenizer.encode("".join(message["content"] for message in messages)).tolist()

        if chosen.environment and self._pairs.template:
            folder = examples.folder_of(config, tokenizer)
            chat, _ = templates.chat_of(folder, config.data.chat_template, self._pairs.settings.now)
            follow = functools.partial(tasks.following, chat, tokenizer, form.end)
        return conversations.Rules(
            environments.find(chosen.environment) if chosen.environment else None,
            chosen.environment,
            chosen.turns if chosen.environment else 1,
            chosen.time_limit,
            config.data.answer_len,
            config.seq_len + 1,
            lambda tokens: answers.text_of(tokenizer, self._special.stops, np.asarray(tokens)),
            follow,
            self._learned,
        )

    def _learned(self, answer: drawing.DrawnAnswer) -> np.ndarray:
        return learned(answer, self._special, is_pair=self._is_pair)

    def _example(self, talk: conversations.Conversation) -> tasks.Example:
        """Returns a conversation as a labeled example."""
        tokens, labeled = np.asarray(talk.tokens, np.int32), np.asarray(talk.learned)
        if not self._is_pair:
            return tasks.Example(tokens, tokens[:0], labeled, talk.begin, "")
        prompt, answer = np.split(tokens, [talk.begin])
        targets = np.append(np.int32(self._special.start), answer)
        return tasks.Example(prompt, targets, np.append(False, labeled[talk.begin :]), 0, "")

    def _with_log_probs(self, batch: Mapping[str, np.ndarray], params: PyTree) -> dict[str, np.ndarray]:
        """Returns the batch with the log-probabilities that its loss reads, those of the weights that drew it."""
        names, mesh = [name for name in self._log_probs if name in self._program.lengths], self._program.rollouts.mesh
        size = self._program.sizes.micro_batch_size * mesh_lib.ways(mesh)
        read = [name for name in batch if name not in rewarded.OF_ANSWER]
        found = dict(batch)
        if names and self._copies is None:
            params = self._program.forward.params(params)
        for name in names:
            parts = []
            for at in range(0, self._program.sizes.global_batch_size, size):
                own = {key: batch[key][at : at + size] for key in read}
                parts.append(np.asarray(self._log_probs[name](params, generate.sharded_rows(own, mesh)))[:size])
            found[name] = _bits(np.concatenate(parts)[: len(batch[rewarded.REWARD])])
        return found


def advantages(scores: np.ndarray, group: int, variant: str) -> np.ndarray:
    """Returns float32[answers] as a row of `ratios.VARIANTS` makes them of rewards; groups are neighbours."""
    groups = scores.reshape(-1, group).astype(np.float64)  # a square of a large reward has no float32
    return ratios.VARIANTS[variant]().advantages(groups).astype(np.float32).ravel()


def learned(answer: drawing.DrawnAnswer, special: family_lib.SpecialTokens, *, is_pair: bool) -> np.ndarray:
    """Returns whether each token of an answer is learned, which those are not that are always the same."""
    found = np.ones(len(answer.tokens), bool)
    if special.forced_first is not None and (is_pair or len(answer.prompt) == 1):
        found[0] = False
    if special.forced_last is not None and len(answer.tokens) == answer.most:
        found[-1] = False
    return found


def _drawn(talks: Sequence[conversations.Conversation], length: int, *, begins_at_answer: bool) -> np.ndarray:
    """Returns the log-probabilities with which tokens were drawn, at the places of their labels: float32[answers, length].

    The first label is the token after the first, or the first of an answer that has an array of its own.
    """
    found = np.zeros((len(talks), length), np.float32)
    for row, talk in zip(found, talks):
        own = talk.log_probs[talk.begin if begins_at_answer else 1 :]
        row[: len(own)] = own
    return found


@dataclasses.dataclass
class _Made:
    """Answers with what is learned of them.

    Attributes:
      number: of their batch, from 0.
      version: the step after which the weights that drew them were as they were.
      arrays: int32[global_batch_size, length] each.
      told: metrics.
      batch: the arrays on the devices that train, once they are there.
    """

    number: int
    version: int
    arrays: dict[str, np.ndarray]
    told: dict[str, float]
    batch: feed.Batch | None = None


class _Clock:
    """Measures phases, one after the other; `look` is called at the end of each."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self.seconds: dict[str, float] = {}
        self.first = self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Notes the seconds since the last lap."""
        self._look()
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now


def _bits(values: np.ndarray) -> np.ndarray:
    """Returns float32 numbers as the integers that a batch holds; a step would round floats to its dtype."""
    return np.ascontiguousarray(values, np.float32).view(np.int32)


def _log_probs(program: program_lib.Program, family: family_lib.Family) -> Callable[..., jax.Array]:
    """Returns f(params, batch) -> the log-probabilities of labels, float32[rows, tokens]."""

    def of_rows(params: PyTree, batch: feed.Batch) -> jax.Array:
        return -family.loss(program.model, params, batch, by_token=True)

    how = family_lib.gathering(family, program.model, program.config.policy.compute_dtype)
    return fetched_params.on_all(of_rows, program.rollouts, **how)
