"""Asks the model in training, and makes batches of its answers. This module holds what the task `grpo` does between two steps.

Answers are drawn by the state's weights, gathered once where they fit (`drawing`), one to a prompt or several with what the
user's environment says between them (`conversations`). A group of them is rewarded, and `config.grpo.variant` makes advantages of that.
Prompts and draws depend on the seed and the step alone, so a run that resumes asks the same. All processes ask the same; process 0 rewards
the answers, and its numbers are those of all.
"""

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
from zerojax.trainer import examples, rewarded
from zerojax.trainer import program as program_lib
from zerojax.trainer import settings as settings_lib
from zerojax.trainer.tuning import answers, conversations, drawing, values
from zerojax.tree import PyTree
from zerojax.zero.offload import fetched_params


def check(config: settings_lib.Config, pairs: splits.Splits) -> None:
    """Checks that answers to the prompts can be drawn, before a program is built.

    Raises:
      UserError: groups do not divide the batch, a prompt with its answer is longer than a row, or there is no such reward.
    """
    config_lib.batch_sizes(config, mesh_lib.ways(mesh_lib.make_mesh(**vars(config.mesh))))
    if not values.is_folder(config.grpo.reward):
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
        self._values = values.open_model(program, tokenizer, tell) if values.is_folder(name) else None
        self._program, self._tokenizer, self._pairs, self._streams = program, tokenizer, pairs, streams
        self._special = examples.special_tokens(program.family, program.weights.source, tokenizer, pairs.stops)
        self._prompts = list(tasks.prompts(pairs.train.examples, pairs.form))
        self._is_pair = program.family.is_encoder_decoder
        drawer = drawing.ByTraining if program.config.grpo.exact else drawing.ByEngine
        self._drawer: drawing.Drawer = drawer(program, self._special, tell)
        adapted, bare = program.weights.adapted, program.family
        if adapted is not None:
            bare = families_lora.with_adapters(program.weights.family, adapted.chosen, 0)
        self._log_probs = {
            rewarded.OLD: _log_probs(program, program.family),
            rewarded.REFERENCE: _log_probs(program, bare),
        }
        self._rules = self._made_rules()
        self._made: tuple[int, feed.Batch] | None = None
        self.told: dict[str, float] = {}  # of the last step: the seconds of its phases, and what was drawn

    @property
    def fingerprints(self) -> dict[str, str]:
        """Returns what tells the folder of the reward apart from another, if it is one."""
        return values.fingerprint(self._program.config.grpo.reward)

    def next(self, step: int, params: PyTree) -> feed.Batch:
        """Returns the batch of a step, counted from 1: answers of `params`, or of the weights some inner steps before."""
        number, self.told = (step - 1) // self._program.config.grpo.inner_steps, {}
        if self._made is None or self._made[0] != number:
            self._made = number, self._ask(number, params)
        return self._made[1]

    def _ask(self, number: int, params: PyTree) -> feed.Batch:
        config, sizes = self._program.config, self._program.sizes
        group, count = config.grpo.group, sizes.global_batch_size
        first = number * (count // group)
        picked = [
            batches.shuffled(first + at, size=len(self._prompts), seed=config.seed) for at in range(count // group)
        ]
        numbers = [index for index in picked for _ in range(group)]
        jax.block_until_ready(params)  # the phases of this step begin when the one before has ended
        clock = _Clock()
        self._drawer.renew(params)
        prompts = [self._prompts[index] for index in numbers]
        texts = [self._tokenizer.decode(ids) for ids in prompts]
        talks = conversations.run(self._drawer, prompts, texts, number * count, self._rules)
        chosen = self._drawer.choices()
        self._drawer.release()
        clock.lap("rollout_seconds")
        by_row = rows.Rows([self._example(talk) for talk in talks], self._pairs.form, packs=False)
        arrays = [by_row.arrays(row) for row in range(count)]
        batch = {name: np.stack([one[name] for one in arrays]) for name in arrays[0]}
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
        self.told = self._told(talks, clock)
        return made

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

    def _with_log_probs(self, batch: Mapping[str, np.ndarray], params: PyTree) -> feed.Batch:
        """Returns the batch on the devices, with the log-probabilities that its loss reads."""
        names = [name for name in self._log_probs if name in self._program.lengths]
        size = self._program.sizes.rows
        read = [name for name in batch if name not in rewarded.OF_ANSWER]
        found = dict(batch)
        for name in names:
            parts = []
            for at in range(0, self._program.sizes.global_batch_size, size):
                own = generate.sharded_rows({key: batch[key][at : at + size] for key in read}, self._program.mesh)
                parts.append(np.asarray(self._log_probs[name](params, own)))
            found[name] = _bits(np.concatenate(parts))
        return self._streams.placed(found)


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


class _Clock:
    """Measures phases, one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def lap(self, name: str) -> None:
        """Notes the seconds since the last lap."""
        now = time.perf_counter()
        self.seconds[name], self._began = now - self._began, now


def _bits(values: np.ndarray) -> np.ndarray:
    """Returns float32 numbers as the integers that a batch holds; a step would round floats to its dtype."""
    return np.ascontiguousarray(values, np.float32).view(np.int32)


def _log_probs(program: program_lib.Program, family: family_lib.Family) -> Callable[..., jax.Array]:
    """Returns f(params, batch) -> the log-probabilities of labels, float32[rows, tokens]."""

    def of_rows(params: PyTree, batch: feed.Batch) -> jax.Array:
        return -family.loss(program.model, params, batch, by_token=True)

    how = family_lib.gathering(family, program.model, program.config.policy.compute_dtype)
    return fetched_params.on_all(of_rows, program.partition, **how)
