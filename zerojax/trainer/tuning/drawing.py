"""Draws answers from the model in training. This module holds the two ways: the engine, and the forward pass of training.

The engine keeps what it has read, so a token costs one row of each matmul. Its sums have another order than those of a training step, so
its log-probabilities differ a little from training's. The forward pass of training (`config.grpo.exact`) reads all rows anew for each
token: an answer of n tokens costs n forward passes of the batch, and its log-probabilities are those of the training step, bit for bit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.inference import generate
from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import requests
from zerojax.models import family as family_lib
from zerojax.models import layers
from zerojax.trainer import beside, rollout_sizes
from zerojax.trainer import program as program_lib
from zerojax.trainer.tuning import weight_copies
from zerojax.tree import PyTree
from zerojax.zero.gradients import forward_only
from zerojax.zero.host import selection
from zerojax.zero.offload import fetched_params
from zerojax.zero.weights import partition as partition_lib


@dataclasses.dataclass
class DrawnAnswer:
    """An answer so far.

    Attributes:
      row: of the batch, whose only answer it is.
      prompt: what is answered.
      stream: tells its draws apart from those of other answers.
      most: the most tokens that it may have.
      tokens: those that it has, with the one that ended it.
      log_probs: of each of them, by the program that drew it.
      is_done: whether it has ended.
    """

    row: int
    prompt: Sequence[int]
    stream: int
    most: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    is_done: bool = False


class Drawer(Protocol):
    """Draws answers at temperature 1. A draw depends on the seed, the stream and the token's number alone."""

    def renew(self, params: PyTree) -> None:
        """Draws from now on by these weights. Nothing may be asked still."""

    def submit(self, answer: DrawnAnswer) -> None:
        """Asks for an answer, of which `step` draws the tokens."""

    def step(self) -> bool:
        """Adds tokens to the answers that are asked for, and returns whether one is not done."""

    def choices(self) -> Mapping[int, np.ndarray]:
        """Returns the experts that routers chose for each token that was read, int32[tokens, layers, experts of a token], by row; {} where
        they are not remembered. Nothing may be asked still."""

    def release(self) -> None:
        """Frees what was made of the weights. Nothing may be asked still, and `renew` comes before the next answer."""


class _Model(NamedTuple):
    """What the engine reads of a model."""

    family: family_lib.Family
    config: Any
    special: family_lib.SpecialTokens
    partition: Any
    params: PyTree
    adapters: Any


class ByEngine:
    """Draws by the engine.

    Where the state's weights are sharded or not on the devices, they are copied once a step in the compute dtype (`rollout_sizes.held`):
    gathered on each device, or where that does not fit, sharded for tensor parallelism. The copies are freed before the update. If neither
    fits, the engine reads the weights as they are, and gathers each where it is used, for each token, if it can.

    Args:
      program: of the run.
      special: the tokens that begin and end texts.
      tell: prints a line.
      between: called between tokens.

    Raises:
      UserError: no copies fit, and it cannot read the weights as they are.
    """

    def __init__(
        self,
        program: program_lib.Program,
        special: family_lib.SpecialTokens,
        tell: Callable[[str], object] = lambda line: None,
        between: Callable[[], object] = lambda: None,
    ):
        self._program, self._special, self._between = program, special, between
        self._engine: engine_lib.Engine | None = None
        self._asked: list[tuple[DrawnAnswer, requests.Request]] = []
        self._partition, self._copies = _weights(program, self._model, tell)
        self._read: list[tuple[int, int, int]] = []  # the row, the slot and the tokens of each answer that is done

    @functools.cached_property
    def _model(self) -> Any:
        return rollout_sizes.model_of(self._program)

    def renew(self, params: PyTree) -> None:
        """See `Drawer`."""
        self._read = []
        if self._copies is not None:
            self._copies.renew(params)
            params = self._copies.params
        if self._engine is None:
            self._engine = self._made(params)
        else:
            self._engine.renew(params)

    def release(self) -> None:
        """See `Drawer`."""
        if self._copies is not None:
            self._copies.free()

    def submit(self, answer: DrawnAnswer) -> None:
        """See `Drawer`."""
        assert self._engine is not None
        how: dict[str, Any] = {"temperature": 1.0, "seed": self._program.config.seed, "logprobs": 0}
        request = self._engine.submit(answer.prompt, stream=answer.stream, max_tokens=answer.most, **how)
        self._asked.append((answer, request))

    def step(self) -> bool:
        """See `Drawer`."""
        assert self._engine is not None
        self._between()
        goes_on = self._engine.step()
        for answer, request in self._asked:
            if request.finish:
                answer.tokens, answer.is_done = list(request.tokens), True
                answer.log_probs = [found.own for found in request.logprobs]
                self._read.append((answer.row, request.slot, len(answer.prompt) + len(answer.tokens) - 1))
        self._asked = [asked for asked in self._asked if not asked[0].is_done]
        return goes_on or bool(self._asked)

    def choices(self) -> Mapping[int, np.ndarray]:
        """See `Drawer`."""
        if not self._program.config.grpo.replay:
            return {}
        assert self._engine is not None
        mixed = filter(self._model.remembers_choices, range(self._model.num_layers))
        held = [self._engine.caches[layer][-1] for layer in mixed]
        replicated = NamedSharding(self._partition.mesh, P())
        chosen = np.asarray(jax.jit(lambda *own: jnp.stack(own, axis=2), out_shardings=replicated)(*held))
        return {row: chosen[slot, :count] for row, slot, count in self._read}

    def _made(self, params: PyTree) -> engine_lib.Engine:
        program, config, partition = self._program, self._program.config, self._partition
        ways, sizes = mesh_lib.size(partition.mesh, mesh_lib.SUMMED), rollout_sizes.sizes_of(program)
        model = _Model(program.family, self._model, self._special, partition, params, program.weights.adapted)
        return engine_lib.Engine(
            model,
            params,
            is_gathered=True,
            dtype=config.policy.compute_dtype,
            **sizes,
            chunk=config.seq_len,
            together=math.lcm(config.grpo.group, ways),
            prefill_tokens=sizes["slots"] * config.seq_len,
        )


class ByTraining:
    """Draws by the forward pass of training, on rows of the same shapes as those of a step.

    Args:
      program: of the run.
      special: the tokens that begin and end texts.

    Raises:
      UserError: the positions of a text depend on its length.
    """

    def __init__(
        self,
        program: program_lib.Program,
        special: family_lib.SpecialTokens,
        tell: Callable[[str], object] = lambda line: None,
    ):
        stretch, seq_len = program.family.stretch(program.model), program.config.seq_len
        if stretch is not None and seq_len > stretch.after:
            raise UserError(
                f"config.grpo.exact: the positions of a text of more than {stretch.after} tokens depend on its length, which grows with "
                f"its answer; set it to False, or --config.seq_len={stretch.after}"
            )
        self._program, self._special = program, special
        self._draws, self._params = _draws(program), None
        self._asked: dict[int, DrawnAnswer] = {}  # by row: each stays where the step has it

    def renew(self, params: PyTree) -> None:
        """See `Drawer`."""
        self._params = params

    def submit(self, answer: DrawnAnswer) -> None:
        """See `Drawer`."""
        self._asked[answer.row] = answer

    def choices(self) -> Mapping[int, np.ndarray]:
        """See `Drawer`."""
        return {}

    def release(self) -> None:
        """See `Drawer`."""

    def step(self) -> bool:
        """See `Drawer`."""
        size = self._program.sizes.rows
        for number in sorted({row // size for row in self._asked}):
            self._add({row % size: answer for row, answer in self._asked.items() if row // size == number})
        self._asked = {row: answer for row, answer in self._asked.items() if not answer.is_done}
        return bool(self._asked)

    def _add(self, answers: Mapping[int, DrawnAnswer]) -> None:
        """Adds a token to each of some answers, by their rows of a pass."""
        arrays, is_pair = self._arrays(answers), self._program.family.is_encoder_decoder
        rows = generate.sharded_rows(arrays, self._program.mesh)
        drawn, losses = map(np.asarray, self._draws(self._params, rows))
        for row, answer in answers.items():
            place, number = _last(answer, is_pair=is_pair), len(answer.tokens)
            token = int(drawn[row, place])
            if self._special.forced_last is not None and number == answer.most - 1:
                token = self._special.forced_last
            if self._special.forced_first is not None and place == 0:
                token = self._special.forced_first
            answer.tokens.append(token)
            answer.log_probs.append(-float(losses[row, place]))
            answer.is_done = token in self._special.stops or len(answer.tokens) == answer.most

    def _arrays(self, answers: Mapping[int, DrawnAnswer]) -> dict[str, np.ndarray]:
        """Returns what a pass reads of some answers, with the bits of the draw after the last token of each."""
        lengths, is_pair = self._program.lengths, self._program.family.is_encoder_decoder
        text = "targets" if is_pair else "tokens"
        shapes = {text: lengths[text] - 1, "labels": lengths[text] - 1}
        shapes |= {name: lengths[name] for name in ("inputs", "mask") if is_pair}
        found = {name: np.zeros((self._program.sizes.rows, length), np.int32) for name, length in shapes.items()}
        if is_pair:
            found["mask"][:, 0] = 1  # of rows without an answer too
        for row, answer in answers.items():
            begin = [self._special.start] if is_pair else answer.prompt
            words = [*begin, *answer.tokens]
            found[text][row, : len(words)] = words
            if is_pair:
                found["inputs"][row, : len(answer.prompt)], found["mask"][row, : len(answer.prompt)] = answer.prompt, 1
            sequence = np.random.SeedSequence([self._program.config.seed, answer.stream, len(answer.tokens)])
            found["labels"][row, len(words) - 1] = sequence.generate_state(1).view(np.int32)[0]
        return found


def _weights(
    program: program_lib.Program, model: Any, tell: Callable[[str], object]
) -> tuple[partition_lib.Partition, weight_copies.WeightCopies | None]:
    """Returns how the weights are sharded that the engine reads, and what copies the state's; None where it reads these as they are.

    Args:
      program: of the run.
      model: the config that the engine has.
      tell: is called with a line that says which copies they are, and why.

    Raises:
      UserError: no copies fit, and the engine cannot read the weights as they are.
    """
    if program.rollout_mesh is not None:  # `rollouts` has copied them
        return program.rollouts, None
    free = _free()
    if free is not None:
        free -= rollout_sizes.of_state(program) + beside.nbytes(program)
    found = rollout_sizes.held(program, model, free)
    if not found.fits:
        raise UserError(found.line)
    if found.line:
        tell(found.line)
    if found.copies is None:
        return program.partition, None
    return found.copies, weight_copies.WeightCopies(program, found.copies)


def _free() -> int | None:
    """Returns the free bytes of process 0's first device before it has a state, None where its backend does not report them. All processes
    must call it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    own = stats["bytes_limit"] - stats.get("bytes_in_use", 0) if stats.get("bytes_limit") else -1
    # In two words: JAX would make a large integer one of 32 bits.
    high, low = (int(word) for word in multihost_utils.broadcast_one_to_all(np.array(divmod(own, 2**20), np.int32)))
    return None if high < 0 else high * 2**20 + low


def _last(answer: DrawnAnswer, *, is_pair: bool) -> int:
    """Returns the place of an answer's last token in the text that the model reads."""
    return len(answer.tokens) + (0 if is_pair else len(answer.prompt) - 1)


def _draws(program: program_lib.Program) -> Callable[[PyTree, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]:
    """Returns f(params, batch) -> a token after each token of the batch's text, and its loss, int32 and float32[rows, length]."""
    family, model, partition = program.family, program.model, program.partition
    how = family_lib.gathering(family, model, program.config.policy.compute_dtype)

    def of_rows(params: PyTree, batch: Mapping[str, jax.Array]) -> Any:
        return family.loss(model, params, batch, by_token=layers.DRAWS)

    if selection.are_params_on_host(partition):
        by_row: Callable[..., Any] = fetched_params.by_row(of_rows, partition, **how)
    else:
        by_row = jax.jit(forward_only.by_row(of_rows, partition, **how))
    replicated = jax.jit(lambda found: found, out_shardings=NamedSharding(partition.mesh, P()))
    return lambda params, batch: replicated(by_row(params, (batch,)))
