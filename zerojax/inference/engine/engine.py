"""Answers requests with one model, many at once. This module holds the engine: who has a slot, who reads a prompt, and who gets a token.

    engine = zerojax.Engine(zerojax.load_huggingface("opt/my-model", stage=0))
    engine.generate([[1, 15, 27], [1, 8]], max_tokens=40)

A slot is a row of the cache. A step reads parts of prompts that wait, up to a number of tokens, and then adds one token to every row that
has read its prompt; that is one program for all rows. An engine of one slot adds up to `programs.GROUP` tokens in a step. A row gets the
tokens that it would get alone. The host reads the tokens of a step while the devices run the next one, so a row that ends before it has
its most tokens runs on to the end of the next step; those tokens are dropped.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import errors, precision, signatures, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.inference.engine import adapters as adapters_lib
from zerojax.inference.engine import detokenizer, pace, programs, rehearsal, requests, snapshots, streamed, weights
from zerojax.inference.engine import row_sampling as draws_lib
from zerojax.models import decoding
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.ops import attention
from zerojax.tree import PyTree
from zerojax.zero.host import selection
from zerojax.zero.sharded_batch import arguments

SHORTEST = 16  # tokens of a bucket
LEAST_REUSED = 16  # tokens of a prompt that are worth a copy of a slot


@dataclasses.dataclass
class _Slot:
    """A row of the cache.

    Attributes:
      request: its request.
      words: the tokens that it reads: the prompt, or the text so far if that is read anew (`family.Stretch`).
      text: the tokens whose keys and values it holds.
      read: how many of `words` it has read.
      source: the slot that holds these.
      is_live: whether it has read all.
      begun: new tokens among `words`.
      sent: new tokens that the programs that were sent give it.
      most: new tokens that it may have before it is read anew, or that its request may have.
      is_stretched: whether its text's positions depend on the length of `words`.
      used, adapter: when it was taken, and the number of its adapter.
    """

    request: requests.Request | None = None
    words: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    text: list[int] = dataclasses.field(default_factory=list)
    read: int = 0
    source: int = 0
    is_live: bool = False
    begun: int = 0
    sent: int = 0
    most: int = 0
    is_stretched: bool = False
    used: int = 0
    adapter: int = adapters_lib.NONE

    @property
    def unread(self) -> int:
        """Returns how many of `words` it has not read."""
        return len(self.words) - self.read

    @property
    def has_all(self) -> bool:
        """Returns whether the programs that were sent give it all tokens that it may have."""
        return self.request is not None and self.sent >= self.most

    @property
    def is_bound(self) -> bool:
        """Returns whether its request has a grammar."""
        return self.request is not None and self.request.grammar is not None

    @property
    def waits(self) -> bool:
        """Returns whether it gets no token before its last one is read, on which its grammar depends."""
        return self.is_bound and self.request is not None and self.sent > len(self.request.tokens)


class Engine:
    """Answers requests.

    Args:
      model: from `load_huggingface`, or anything with its `family`, `config`, `special`, `partition` and `params`.
      params: the weights, such as those of a training state; None: the model's. Weights that are stored where decoding wants them are not
        copied. Those in host memory, by the model's partition, stay there, and are streamed block by block for each step (`streamed`).
      format: of the kernels of linear modules: "none", "int8", "fp8" or "nf4". Matmuls of few rows read this form.
      dtype: of the other weights; None: as they are.
      slots: requests that are answered at once.
      max_len: the most tokens of a text, prompt and answer; for an encoder-decoder of the answer.
      max_inputs: the most tokens of an encoder-decoder's prompt.
      chunk: the most tokens of a prompt that one program reads; an encoder reads all of its own.
      together: prompts of one length that one program may read.
      prefill_tokens: the tokens of prompts that a step reads while others are answered or wait, whose tokens wait for that; None: `chunk`.
      reuses: whether a prompt whose beginning a slot holds is read from there. In a recurrent model (`decoding.Held`) it is where the
        first part of a prompt ended or the last, for which as many states are kept again as there are slots.
      is_gathered: weights stay sharded as they are and are gathered where they are used, for each token. It saves memory, not time.
      adapters: the low-rank adapters that requests name, by their names; see `Pretrained.read_adapter`.
      text_of: f(token ids) -> their text, for stop strings and the requests' `text`.
      grammar_of: f(`RequestSettings.grammar`, size of the vocabulary, tokens that end a text) -> the grammar; raises UserError for a wrong
        one.

    Raises:
      UserError: an argument is out of range, or does not go with where the weights are.
    """

    @signatures.checked
    def __init__(
        self,
        model: ModelConfig,
        params: PyTree = None,
        *,
        format: str = "none",
        dtype: DTypeLike | None = None,
        slots: int = 8,
        max_len: int = 2048,
        max_inputs: int = 512,
        chunk: int = 1024,
        together: int = 1,
        prefill_tokens: int | None = None,
        reuses: bool = True,
        is_gathered: bool = False,
        adapters: Mapping[str, adapters_lib.LowRank] | None = None,
        text_of: Callable[[list[int]], str] | None = None,
        grammar_of: Callable[[str, int, tuple[int, ...]], requests.Grammar] | None = None,
    ):
        sizes = {"slots": slots, "max_len": max_len, "max_inputs": max_inputs, "chunk": chunk, "together": together}
        sizes["prefill_tokens"] = chunk if prefill_tokens is None else prefill_tokens
        _check(model, sizes, format, dtype, bool(adapters), is_gathered=is_gathered)
        family, mesh = model.family, mesh_lib.completed(model.partition.mesh)
        has_adapters, is_streamed = _has_adapters(model), selection.are_params_on_host(model.partition)
        limit = family.positions(model.config)
        self._inputs = min(max_inputs, limit or max_inputs) if family.is_encoder_decoder else 0
        max_len = min(max_len, limit or max_len)
        dtype = precision.floating("dtype", dtype)
        if params is None:
            params = model.params
        else:
            own, other = (
                {path: f"{list(leaf.shape)}" for path, leaf in tree.flatten(tree.abstract(tree.with_arrays_alone(one)))}
                for one in (model.params, params)
            )
            _check_same_form(own, other, "model")
        config = with_kernel(model.config, family, mesh, params, dtype)
        axes: tuple[str, ...] = ()
        if is_streamed:
            self._params = params
        elif is_gathered:
            ways = mesh_lib.size(mesh, mesh_lib.SUMMED)
            slots, axes = -(-slots // ways) * ways, mesh_lib.SUMMED if ways > 1 else ()
            self._params = params
        else:
            self._params = weights.placed(family, config, params, mesh, dtype, format)
        if adapters:
            known = weights.linear_modules(family, config, params)
            self._params = adapters_lib.added(self._params, adapters, known, mesh)

        shape = programs.Shape(slots, max_len, self._inputs)
        self._family, self._config, self._special, self._mesh = family, config, model.special, mesh
        self._stretch = family.stretch(config)
        self._shape, self._text_of, self._together = shape, text_of, together
        self._reuses = reuses
        self._chunk = self._inputs or min(chunk, max_len)  # an encoder reads its prompt at once
        self._budget = prefill_tokens or self._chunk
        kernels = None if has_adapters or is_gathered else weights.kernels_of(mesh)
        if slots == 1 and not adapters and not is_streamed:
            self._params = weights.for_one_row(family, config, self._params, mesh, kernels)
        self._programs = (
            streamed.StreamedPrograms(family, config, mesh, shape, model.special, model.partition)
            if is_streamed
            else programs.Programs(
                family,
                config,
                mesh,
                shape,
                model.special,
                kernels,
                axes,
                has_adapters=bool(adapters),
                has_transposed=weights.has_transposed(self._params),
                steps=programs.steps_of(self._params, slots, mesh),
                **({"placements": model.partition.placements, "dtype": dtype} if is_gathered else {}),
            )
        )
        self._adapters = {"": adapters_lib.NONE} | {name: n for n, name in enumerate(adapters or (), 1)}
        with arguments.in_own_mesh(mesh):
            self._caches, self._rows = self._programs.empty(self._params)
            keeps = reuses and decoding.is_recurrent(held := family.caches(config))
            self._kept = snapshots.Snapshots(held, self._caches) if keeps else None
        self._slots = [_Slot() for _ in range(slots)]
        self._draws = draws_lib.Draws.of_rows(slots)
        self._grammar_of = grammar_of
        self._allowed = np.full((slots, -(-config.vocab_size // 32)), 2**32 - 1, np.uint32)
        self._sent: draws_lib.Draws | None = None  # the settings on the devices; None: they changed
        self._waiting: collections.deque[requests.Request] = collections.deque()
        # Rows of what is told, their requests, and the most new tokens that these have with it
        self._pending: collections.deque[tuple[programs.Told, list[tuple[int, requests.Request, int]]]] = (
            collections.deque()
        )
        self._arrived: collections.deque[tuple[requests.Request, int, Any, tuple[int, int]]] = collections.deque()
        self._clock, self._stepping = 0, threading.RLock()
        self._pace = pace.Pace()

    @property
    def max_len(self) -> int:
        """Returns the most tokens of a text."""
        return self._shape.length

    @property
    def caches(self) -> PyTree:
        """Returns what slots hold of their texts (`Family.caches`). The next step donates it."""
        return self._caches

    @property
    def slots(self) -> int:
        """Returns the requests that are answered at once."""
        return self._shape.slots

    @property
    def is_idle(self) -> bool:
        """Returns whether nothing is asked, and nothing is left in a slot."""
        is_read = not self._pending and not self._arrived
        return not self._waiting and is_read and all(slot.request is None for slot in self._slots)

    @property
    def counts(self) -> dict[str, int]:
        """Returns the requests that wait, and those that have a slot."""
        return {"waiting": len(self._waiting), "running": sum(slot.request is not None for slot in self._slots)}

    @property
    def spare_seconds(self) -> float:
        """Returns how long the next step may wait before the devices lack work; 0 where a new request could not begin in it."""
        has_room = not self._waiting and any(slot.request is None for slot in self._slots)
        if len(self._pending) != 1 or not has_room or self._reading():
            return 0.0
        return self._pace.spare(self._pending[0][0].token.shape)

    def renew(self, params: PyTree) -> None:
        """Answers what is asked from now on with other weights, of the same shapes, dtypes and shardings. Nothing may be asked still.

        For an engine with `is_gathered`, which reads weights as they are. What slots hold of earlier texts is forgotten.

        Raises:
          UserError: something is asked still, or the weights are others than the engine's in form.
        """
        if not self.is_idle:
            raise UserError("renew: the engine has texts that are not answered; call `run` first")
        own, other = (
            {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in tree.flatten(held)}
            for held in (self._params, tree.abstract(params))
        )
        _check_same_form(own, other, "engine")
        self._params = params
        for slot in self._slots:
            slot.text = []
        if self._kept is not None:
            self._kept.forget()

    def generate(self, prompts: Iterable[Sequence[int]], **settings: Any) -> list[requests.Request]:
        """Answers prompts of token ids, and returns the requests in the prompts' order; for `settings` see `requests.RequestSettings`.

        Requests of one seed draw from streams of their own: 0, 1, ...
        """
        if not isinstance(prompts, Iterable):
            raise UserError(f"prompts: must be a list of prompts, each of token ids, and is {errors.shown(prompts)}")
        asked = [self.request(prompt, **{"stream": n, **settings}) for n, prompt in enumerate(prompts)]
        for request in asked:  # all of them, or none if one is refused
            self.add(request)
        self.run()
        return asked

    def run(self) -> None:
        """Runs until all requests are answered."""
        while self.step():
            pass

    def warm_up(self, tell: Callable[[int, int], Any] = lambda number, count: None) -> None:
        """Compiles the programs for prompts of all lengths that are read one at a time, and for both kinds of decoding.

        To be called before the first request. They are those of some texts. `tell` is called as each is compiled, or, with weights in host
        memory, before each text, with its number, from 1, and how many there are.
        """
        reuses, self._reuses = self._reuses, False
        most = self._inputs or self.max_len - 2
        sizes = [SHORTEST << n for n in range(self._chunk.bit_length()) if SHORTEST << n < self._chunk] + [self._chunk]
        lengths = [*sizes, *([] if self._inputs else (self._chunk + size for size in sizes))]
        texts: list[tuple[int, dict[str, float]]] = [
            *((length, {}) for length in dict.fromkeys(min(length, most) for length in lengths)),
            (1, {"temperature": 1.0, "repetition_penalty": 2.0}),
        ]

        def answer(tell: Callable[[int, int], Any]) -> None:
            for number, (length, settings) in enumerate(texts, 1):
                tell(number, len(texts))
                self.generate([[0] * length], max_tokens=2, ignores_end=True, **settings)

        if isinstance(self._programs, streamed.StreamedPrograms):
            answer(tell)
        else:
            with rehearsal.Rehearsal(self._programs, tell):
                answer(lambda *_: None)
            answer(lambda *_: None)
        if self._kept is not None:
            self._kept.keep(self._caches, 0, np.zeros(0, np.int32), adapters_lib.NONE)
            self._caches = self._kept.restore(self._caches, 0, 0, 0)
            self._kept.forget()
        self._reuses = reuses

    def submit(
        self, prompt: Sequence[int], *, on_change: Callable[[requests.Request], Any] | None = None, **settings: Any
    ) -> requests.Request:
        """Asks for the continuation of token ids, and returns the request; `step` answers it.

        Raises:
          UserError: a setting is out of range, the ids are not the model's, or the text does not fit.
        """
        request = self.request(prompt, on_change=on_change, **settings)
        self.add(request)
        return request

    @signatures.checked
    def add(self, request: requests.Request) -> None:
        """Asks what `request` has made."""
        self._waiting.append(request)

    def request(
        self, prompt: Sequence[int], *, on_change: Callable[[requests.Request], Any] | None = None, **settings: Any
    ) -> requests.Request:
        """Returns a request that `add` asks. It changes nothing, so any thread may call it. Raises as `submit` does."""
        chosen = requests.RequestSettings(**settings)
        if not (on_change is None or callable(on_change)):
            raise UserError(f"on_change: must be a function or None, and is {errors.shown(on_change)}")
        try:
            ids = np.asarray(prompt)
        except (ValueError, TypeError):  # rows of several lengths, or a random key
            ids = np.empty(0)
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise UserError(
                f"prompt: must be a list of token ids, at least one, and is {signatures.shown(prompt)}; a tokenizer makes them of a text"
            )
        vocab = self._config.vocab_size
        for name, values in (("prompt", ids), ("stop_ids", np.asarray(chosen.stop_ids, np.int64))):
            if wrong := values[(values < 0) | (values >= vocab)].tolist():
                raise UserError(f"{name}: holds {wrong[0]}, and the model knows ids from 0 to {vocab - 1}")
        if chosen.adapter not in self._adapters:
            raise UserError(
                f"adapter: {errors.shown(chosen.adapter, 80)} is not there; {errors.choose(chosen.adapter, filter(None, self._adapters))}"
            )
        if chosen.stop_strings and self._text_of is None:
            raise UserError("stop_strings: need a tokenizer, and the engine has none; give stop_ids, or pass text_of")
        before, most = (1, self._inputs) if self._inputs else (ids.size, self.max_len - 1)
        if ids.size > most:
            raise UserError(f"prompt: has {ids.size} tokens, and at most {most} fit; shorten it, or raise max_len")
        room = self.max_len - before
        if (chosen.max_tokens or 1) > room:
            raise UserError(
                f"max_tokens: is {chosen.max_tokens}, and after a text of {before} tokens {room} fit; lower it, or raise max_len"
            )
        text = None if self._text_of is None else detokenizer.Growing(self._text_of)
        grammar = self._grammar(chosen) if chosen.grammar else None
        most = chosen.max_tokens or room
        return requests.Request(ids.astype(np.int32), chosen, most, on_change, so_far=text, grammar=grammar)

    def _grammar(self, chosen: requests.RequestSettings) -> requests.Grammar:
        if self._grammar_of is None:
            raise UserError("grammar: the engine reads none; pass grammar_of, or omit it")
        if self._special.forced_first is not None or self._special.forced_last is not None:
            raise UserError("grammar: the model's texts begin or end with tokens of its own; omit it")
        stops = chosen.stop_ids if chosen.ignores_end else (*self._special.stops, *chosen.stop_ids)
        return self._grammar_of(chosen.grammar, self._config.vocab_size, stops)

    @signatures.checked
    def cancel(self, request: requests.Request) -> None:
        """Ends a request where it is. Its slot is free for others."""
        with self._stepping:
            if request.finish:
                return
            request.finish = requests.CANCELLED
            if request in self._waiting:
                self._waiting.remove(request)
            self._free(request)
            _tell(request)

    def step(self) -> bool:
        """Reads parts of prompts, adds a token to every row, or several to an only one, and returns whether there is more to do.

        Threads that step take turns.
        """
        with self._stepping, arguments.in_own_mesh(self._mesh), jax.numpy_rank_promotion("allow"):
            return self._step()

    def _step(self) -> bool:
        self._clock += 1
        self._pace.begin()
        self._admit()
        self._read_anew()
        self._prefill()
        self._decode()
        self._pace.sent()
        # The newest tokens are read a step later, if that step has more to send.
        has_more = any(slot.request is not None and not slot.has_all and not slot.waits for slot in self._slots)
        while self._arrived or len(self._pending) > (1 if has_more else 0):
            self._read()
        return not self.is_idle

    def _admit(self) -> None:
        """Gives free slots to requests that wait: the one that holds most of the prompt, else the one unused for longest."""
        while self._waiting:
            free = [number for number, slot in enumerate(self._slots) if slot.request is None]
            if not free:
                return
            request = self._waiting.popleft()
            source, shared, kept = self._held(request)
            own = source if shared and source in free else min(free, key=lambda number: self._slots[number].used)
            chosen, text = request.settings, self._slots[source].text[:shared] if shared else []
            adapter = self._adapters[chosen.adapter]
            if shared and self._kept is not None:
                self._caches, source = self._kept.restore(self._caches, kept, source, own), own
            slot = self._slots[own] = _Slot(
                request, request.prompt, text, shared, source, used=self._clock, adapter=adapter
            )
            self._measure(slot)
            request.reused, request.begun, request.slot = shared, time.monotonic(), own
            values = (
                False,
                request.most,
                slot.begun,
                slot.most,
                chosen.temperature,
                chosen.top_k,
                chosen.top_p,
                chosen.min_p,
                chosen.repetition_penalty,
                chosen.seed,
                chosen.stream,
                adapter,
            )
            for array, value in zip(self._draws, values):
                array[own] = value
            self._allow(own)
            self._sent = None
            self._see(own, [self._special.start] if self._inputs else request.prompt)

    def _allow(self, number: int) -> None:
        """Notes the tokens that a slot may get next, if it has a grammar."""
        request = self._slots[number].request
        if request is not None and request.grammar is not None:
            self._allowed[number], self._sent = request.grammar.mask(), None

    def _see(self, number: int, words: Sequence[int] | np.ndarray) -> None:
        """Notes the tokens of a text for the penalty of its repetitions, if it has one."""
        request = self._slots[number].request
        if request is not None and request.settings.repetition_penalty != 1:
            seen = np.zeros(self._config.vocab_size, bool)
            seen[words] = True
            self._rows = self._rows._replace(seen=_with_row(self._rows.seen, seen, number))

    def _measure(self, slot: _Slot) -> None:
        """Notes whether a slot's text is stretched, and how many new tokens it may have before it is read anew."""
        assert slot.request is not None
        slot.most, stretch = slot.request.most, self._stretch
        slot.is_stretched = stretch is not None and len(slot.words) > stretch.after
        if stretch is not None and stretch.is_read_anew and not slot.is_stretched:
            slot.most = min(slot.most, stretch.after + 1 - len(slot.words))

    def _read_anew(self) -> None:
        """Lets slots read their texts anew that have grown so long that all of their positions are others."""
        for number, slot in enumerate(self._slots):
            request = slot.request
            if request is None or not slot.is_live or len(request.tokens) < slot.most or slot.most == request.most:
                continue
            if any(
                other.source == number and other.read and other.request and not other.is_live for other in self._slots
            ):
                continue  # a prompt is still to be read from what the slot holds
            words = np.concatenate([request.prompt, np.asarray(request.tokens, np.int32)])
            begun = len(request.tokens)
            slot = self._slots[number] = dataclasses.replace(
                slot, words=words, text=[], read=0, is_live=False, begun=begun, sent=begun
            )
            self._measure(slot)
            for array, value in zip(
                (self._draws.is_live, self._draws.begun, self._draws.until), (False, begun, slot.most)
            ):
                array[number] = value
            self._sent = None
            self._see(number, words)

    def _held(self, request: requests.Request) -> tuple[int, int, int]:
        """Returns the slot that holds most of a prompt's beginning, how many tokens, and the copy of a recurrent state after them; the
        prompt's last token is always read."""
        if not self._reuses or self._inputs or (self._stretch and len(request.prompt) > self._stretch.after):
            return 0, 0, 0
        prompt, adapter = request.prompt[:-1], self._adapters[request.settings.adapter]
        if self._kept is not None:
            are_held = [slot.adapter == adapter and not slot.is_stretched for slot in self._slots]
            texts = [slot.text if is_held else [] for slot, is_held in zip(self._slots, are_held)]
            kept, source, shared = self._kept.find(prompt, adapter, texts)
            return source, shared, kept
        best, shared = 0, 0
        for number, slot in enumerate(self._slots):
            length = min(len(slot.text), len(prompt))
            if length <= shared or slot.adapter != adapter or slot.is_stretched:
                continue
            differs = np.flatnonzero(np.asarray(slot.text[:length]) != prompt[:length])
            length = int(differs[0]) if differs.size else length
            if length > shared:
                best, shared = number, length
        return (best, shared, 0) if shared >= LEAST_REUSED else (0, 0, 0)

    def _prefill(self) -> None:
        """Reads parts of prompts, up to the budget of a step; at least one if any waits.

        Half of the budget is the oldest prompt's. The other half is of those that are done sooner, so that a short prompt does not wait
        for the end of a long one.
        """
        if not (reading := self._reading()):
            return
        is_alone = not self._waiting and sum(slot.request is not None for slot in self._slots) == 1
        left, oldest = max(self._budget, self._chunk) if is_alone else self._budget, reading[0]
        left -= self._read_soonest(max(SHORTEST, left - left // 2), before=oldest)
        if not self._slots[oldest].is_live:  # it may have been read together with another
            left -= self._read_part(oldest, self._bucket(oldest, left))
        self._read_soonest(left)

    def _reading(self) -> list[int]:
        """Returns the slots with prompts to read, the oldest first; not those that hold what an older one still reads from there."""
        found = {n: slot for n, slot in enumerate(self._slots) if slot.request is not None and not slot.is_live}
        needed = [(slot.source, slot.used) for n, slot in found.items() if slot.read and slot.source != n]
        free = (n for n, slot in found.items() if not any(n == source and used < slot.used for source, used in needed))
        return sorted(free, key=lambda number: found[number].used)

    def _read_soonest(self, most: int, before: int | None = None) -> int:
        """Reads prompts in `most` tokens, those that are done soonest first, until that is slot `before`. Returns how many were read."""
        left = most
        while reading := self._reading():
            lead = min(reading, key=lambda number: self._slots[number].unread)
            # A prompt is cut for room once in a step.
            size = self._bucket(lead, left if before is not None and left == most else self._chunk)
            if lead == before or size > left:
                break
            left -= self._read_part(lead, size)
        return most - left

    def _bucket(self, number: int, left: int) -> int:
        """Returns the tokens of the program that reads the next part of a slot's prompt, where the step has `left`."""
        slot = self._slots[number]
        most = self.max_len if slot.is_stretched else self._chunk
        if not (slot.is_stretched or self._inputs) and left < most:  # the others are read at once
            most = min(most, max(SHORTEST, 1 << left.bit_length() >> 1))
        return min(most, max(SHORTEST, 1 << (min(slot.unread, most) - 1).bit_length()))

    def _read_part(self, number: int, size: int) -> int:
        """Reads the next part of a slot's prompt, of at most `size` tokens, and beginnings that are as long with it. Returns the tokens."""
        if self._slots[number].read:
            return self._further(number, size)
        others = (n for n in self._reading() if n != number and not self._slots[n].read)
        alike = [number, *(n for n in others if self._bucket(n, size) == size)]
        return self._first(alike[: self._together] if len(alike) >= self._together else alike[:1], size)

    def _first(self, numbers: list[int], size: int) -> int:
        """Reads the first part of some prompts, and returns the tokens of the program."""
        prompts = np.zeros((len(numbers), size), np.int32)
        lengths = np.zeros(len(numbers), np.int32)
        for row, number in enumerate(numbers):
            part = self._slots[number].words[:size]
            prompts[row, : len(part)], lengths[row] = part, len(part)
        inputs = {}
        texts, ends = prompts, lengths
        if self._inputs:
            inputs = {"inputs": prompts, "mask": np.arange(size) < lengths[:, None]}
            texts, ends = np.full((len(numbers), 1), self._special.start, np.int32), np.ones(len(numbers), np.int32)
        given = self._put((inputs, texts, ends, np.asarray(numbers, np.int32)))
        self._caches, self._rows, told = self._programs.first(
            self._params, self._caches, self._rows, self._settings(), *given
        )
        done = [
            (row, number)
            for row, (number, length) in enumerate(zip(numbers, lengths))
            if self._has_read(number, int(length))
        ]
        self._note(told, done)
        return prompts.size

    def _further(self, number: int, size: int) -> int:
        """Reads the next part of a prompt, of at most `size` tokens, and returns the tokens of the program."""
        slot = self._slots[number]
        part = slot.words[slot.read : slot.read + size]
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(part)] = part
        words = (np.asarray([value], np.int32) for value in (slot.read, len(part), slot.source, number))
        given = self._put((tokens, *words))
        self._caches, self._rows, told = self._programs.further(
            self._params, self._caches, self._rows, self._settings(), *given
        )
        slot.source = number
        self._note(told, [(0, number)] if self._has_read(number, len(part)) else [])
        return size

    def _has_read(self, number: int, count: int) -> bool:
        """Notes that a slot holds `count` more tokens of its prompt, and returns whether that is all of it."""
        slot = self._slots[number]
        slot.text = slot.text + slot.words[slot.read : slot.read + count].tolist()
        is_first = not slot.read
        slot.read, slot.source = slot.read + count, number
        slot.is_live = slot.read >= len(slot.words)
        is_kept = is_first or slot.is_live  # parts between are many, and would take the room of other prompts
        if self._kept is not None and self._reuses and is_kept and slot.read >= LEAST_REUSED and not slot.is_stretched:
            self._kept.keep(self._caches, number, slot.words[: slot.read], slot.adapter)
        if slot.is_live:
            slot.sent, self._draws.is_live[number] = slot.begun + 1, True
            self._sent = None
        return slot.is_live

    def _decode(self) -> None:
        """Adds tokens to every row that is live, if one has room for more."""
        gets = [slot.is_live and not slot.waits for slot in self._slots]
        live = [(number, slot) for number, slot in enumerate(self._slots) if gets[number] and not slot.has_all]
        if not live:
            return
        if gets != self._draws.is_live.tolist():
            self._draws.is_live[:], self._sent = gets, None
        is_one = any(slot.is_bound for _, slot in live)  # whose next token depends on this one
        decode, steps = (
            (self._programs.step, 1)
            if is_one and self._programs.steps > 1
            else (self._programs.decode, self._programs.steps)
        )
        is_plain = all(slot.request is not None and slot.request.settings.is_plain for _, slot in live)
        self._caches, self._rows, told = decode(
            self._params, self._caches, self._rows, self._settings(), is_plain=is_plain
        )
        for _, slot in live:
            slot.sent += steps
        self._note(told, [(number, number) for number, _ in live])

    def _note(self, told: programs.Told, rows: list[tuple[int, int]]) -> None:
        """Remembers to read the tokens of rows (row of the result, slot).

        A part of a prompt gives none and is waited for all the same, so that not all parts are sent before another prompt comes.
        """
        jax.tree.map(lambda leaf: leaf.copy_to_host_async(), told)
        found = [(row, self._slots[number].request, self._slots[number].most) for row, number in rows]
        self._pending.append((told, found))  # type: ignore[arg-type]

    def _read(self) -> None:
        """Reads the oldest tokens that were not read, and hands them to their requests.

        What a request tells of its change may raise, or call this again: each token is handed over once, in its turn.
        """
        if not self._arrived:
            told, rows = self._pending[0]
            was_done = told.token.is_ready()  # type: ignore[attr-defined]
            told = jax.tree.map(np.asarray, told)
            self._pace.read(told.token.shape, was_done=was_done)
            several = told if told.token.ndim == 2 else jax.tree.map(lambda leaf: leaf[None], told)
            steps = range(len(several.token))
            self._arrived.extend((*asked, several, (step, row)) for step in steps for row, *asked in rows)
            self._pending.popleft()
        while self._arrived:
            request, most, told, at = self._arrived.popleft()
            if request.finish or len(request.tokens) >= most:
                continue
            logprob, count = None, request.settings.logprobs
            if count is not None and told.own is not None:
                pairs = zip(told.likeliest[at][:count].tolist(), told.of_likeliest[at][:count].tolist())
                logprob = requests.LogProb(float(told.own[at]), dict(pairs))
            request.add(int(told.token[at]), logprob, self._special.stops)
            if request.finish:
                self._free(request)
            elif request.grammar is not None:
                self._allow(next(number for number, slot in enumerate(self._slots) if slot.request is request))
            _tell(request)

    def _free(self, request: requests.Request) -> None:
        """Frees a request's slot. The tokens that it holds may begin another prompt."""
        for number, slot in enumerate(self._slots):
            if slot.request is request:
                if slot.is_live:
                    slot.text = slot.text + request.tokens[slot.begun : -1]
                slot.request, slot.is_live, slot.used = None, False, self._clock
                self._allowed[number] = 2**32 - 1
                self._draws.is_live[number] = False
                self._sent = None

    def _settings(self) -> draws_lib.Draws:
        """Returns the rows' settings on the devices."""
        if self._sent is None:
            allowed = self._allowed if any(slot.is_bound for slot in self._slots) else None
            self._sent = self._put(jax.tree.map(np.copy, self._draws._replace(allowed=allowed)))
        return self._sent

    def _put(self, arrays: PyTree) -> PyTree:
        """Returns host arrays on all devices; they are equal on all processes."""
        same = NamedSharding(self._mesh, P())
        if jax.process_count() == 1:
            return jax.device_put(arrays, same)
        return jax.tree.map(
            lambda array: jax.make_array_from_callback(array.shape, same, lambda index: array[index]), arrays
        )


def _check(
    model: ModelConfig,
    sizes: Mapping[str, int],
    format: str,
    dtype: DTypeLike | None,
    has_low_rank: bool,
    *,
    is_gathered: bool,
) -> None:
    """Raises a UserError for arguments of `Engine` that are out of range, or do not go with the model and where its weights are.

    Args:
      sizes: {argument: its value}, each 1 or more.
      has_low_rank: whether requests may name adapters.
      model, format, dtype, is_gathered: of `Engine`.
    """
    if not hasattr(model, "family") or not hasattr(model, "partition"):
        raise UserError(f"model: must be what zerojax.load_huggingface returns, and is {errors.shown(model)}")
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"{name}: must be 1 or more, and is {value}")
    errors.one_of("format", format, weights.FORMATS)
    mesh = mesh_lib.completed(model.partition.mesh)
    if not family_lib.writes_text(model.family, model.config):
        raise UserError("engine: the model is a classifier, which writes no text; use its `apply`, or zerojax generate")
    has_adapters = _has_adapters(model)
    if selection.are_params_on_host(model.partition):
        others = {"format": format != "none", "dtype": dtype is not None, "is_gathered": is_gathered}
        streamed.check(model.partition, mesh, others | {"adapters": has_low_rank, "lora": has_adapters})
    if format != "none" and (has_adapters or is_gathered):
        raise UserError(
            f"format: {format} quantizes plain weights that stay where they are; "
            + ("merge the adapters first (zerojax merge)" if has_adapters else "omit is_gathered")
        )
    if has_low_rank and (has_adapters or is_gathered):
        raise UserError(
            "adapters: are for plain weights that stay where they are; "
            + ("the model was loaded with one, load it without" if has_adapters else "omit is_gathered")
        )


def _has_adapters(model: ModelConfig) -> bool:
    """Returns whether a model was loaded with an adapter."""
    return getattr(model, "adapters", None) is not None


def with_kernel(
    config: ModelConfig, family: family_lib.Family, mesh: Mesh, params: PyTree, dtype: DTypeLike | None
) -> ModelConfig:
    """Returns the model's config with the attention kernel for these devices, and for the widest floating weights or `dtype`.

    The compiler shards cuDNN's kernel only where it shards query heads and key heads alike.
    """
    floats = [leaf.dtype for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    kernel = attention.choose_kernel(
        "auto",
        family.attention,
        mesh_lib.platform(mesh),
        jnp.dtype(dtype or max(floats, key=lambda found: found.itemsize)),
        head_dim=family_lib.head_dim(config),
        capability=mesh_lib.capability(mesh),
    )
    ways, is_grouped = mesh_lib.size(mesh, mesh_lib.COMPILER), hasattr(config, "num_kv_heads")
    if kernel == "cudnn" and is_grouped and config.num_heads % ways == 0 and config.num_kv_heads % ways:
        kernel = "xla"
    return dataclasses.replace(config, attention=kernel)


def _check_same_form(own: Mapping[str, str], other: Mapping[str, str], where: str) -> None:
    """Raises a UserError if weights, whose forms by path are `other`, are not those of the engine or of the model."""
    for path in [*own, *other]:
        if own.get(path) != other.get(path):
            raise UserError(
                f"params: {path} is {other.get(path, 'not there')}, and in the {where} {own.get(path, 'not there')}; "
                "pass weights of the same form, or make another engine"
            )


def _tell(request: requests.Request) -> None:
    if request.on_change is not None:
        request.on_change(request)


@jax.jit
def _with_row(seen_BV: jax.Array, row_V: jax.Array, slot: int) -> jax.Array:
    return seen_BV.at[slot].set(row_V)
