"""Checks that a request gets the tokens that it gets alone, whatever is asked beside it. This module tests zerojax.inference.engine."""

import collections
import concurrent.futures
import contextlib
import functools

import compile_only
import golden_engines
import golden_models
import jax
import numpy as np
import pytest
from small_engine import LENGTH, engine, model, text_of

import zerojax
from zerojax import traces, tree
from zerojax.errors import UserError
from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import programs

BY_DEFAULT = {("llama", 2), ("t5", 1), ("mamba2", 1)}  # gemma3 with weights in host memory: test_streamed.py


@pytest.mark.filterwarnings("ignore:mesh:UserWarning")  # four devices do not divide all heads and positions
@pytest.mark.parametrize(
    "name, ways",
    [
        pytest.param(name, ways, marks=() if (name, ways) in BY_DEFAULT else pytest.mark.long)
        for name in golden_models.GENERATORS
        for ways in (1, 2, 4)
    ],
)
def test_greedy_tokens_are_those_of_transformers_in_slots_that_change_hands(name, ways):
    golden_engines.assert_tokens_of_transformers(name, golden_models.load(name, 0, ways))


@functools.cache
def adapted_engine(slots=4):
    """Returns an engine that reads two prompts together if it has room, and knows two adapters."""
    random = np.random.default_rng(3)
    adapters = {
        name: {"layer_0/mlp/up": (random.normal(0, 0.3, (64, rank)), random.normal(0, 0.3, (rank, 128)))}
        for name, rank in (("one", 3), ("two", 5))
    }
    how = {"slots": slots, "max_len": LENGTH, "chunk": 16, "together": 2, "prefill_tokens": 40, "adapters": adapters}
    return engine_lib.Engine(model(), text_of=text_of, **how)


def drawn_request(random, number, beginnings):
    """Returns a prompt and settings of any kind."""
    begin = beginnings[random.integers(len(beginnings))]
    prompt = begin[: random.integers(0, 41)] + random.integers(8, 61, random.integers(1, 22)).tolist()
    most = LENGTH - len(prompt)
    settings = {"max_tokens": None if number % 11 == 0 else int(random.integers(1, min(most, 24) + 1))}
    settings["adapter"] = ("", "", "one", "two")[random.integers(4)]
    if random.random() < 0.4:
        settings |= {"temperature": float(random.choice([0.3, 1.0, 2.0])), "seed": int(random.integers(2**32))}
        settings |= {"top_k": int(random.integers(0, 30)), "top_p": 0.9, "min_p": float(random.choice([0, 0.05]))}
    if random.random() < 0.3:
        settings |= {"repetition_penalty": 1.3, "logprobs": int(random.integers(0, 5))}
    if random.random() < 0.4:
        settings |= {"stop_strings": (" 1", "3 2", f"{random.integers(8, 61)} ")[: random.integers(1, 4)]}
    if random.random() < 0.3:
        settings |= {"stop_ids": tuple(random.integers(0, 61, 2).tolist()), "ignores_end": bool(random.integers(2))}
    return prompt, settings


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_requests_get_what_they_get_alone_and_leave_nothing_behind(count):
    """Prompts share beginnings, name adapters, end at stops or are cancelled, arrive midway, and are longer than a program reads."""
    random, own, told = np.random.default_rng(count), adapted_engine(), collections.Counter()
    beginnings = [random.integers(8, 61, 40).tolist() for _ in range(3)]
    asked = [drawn_request(random, number, beginnings) for number in range(count)]
    own._reuses, alone = False, []
    for prompt, settings in asked:
        alone.append(own.submit(prompt, **settings))
        own.run()

    def tell(request):
        told[request] += 1
        assert told[request] == len(request.tokens) or request.finish == "cancelled"

    own._reuses, together, cancelled = True, [], []
    for number, (prompt, settings) in enumerate(asked):
        together.append(own.submit(prompt, on_change=tell, **settings))
        if number % 5 == 4:  # while it waits, while its prompt is read, or while tokens are added
            cancelled.append(own.submit(*asked[random.integers(number)][:1], max_tokens=3, on_change=tell))
        for _ in range(random.integers(0, 7)):
            own.step()
        if cancelled and random.integers(2):
            own.cancel(cancelled[random.integers(len(cancelled))])
    own.run()
    for one, other in zip(alone, together):
        assert_alike(one, other)
        assert told[other] == len(other.tokens) and one.finish in ("stop", "length")
    assert {request.finish for request in alone} == {"stop", "length"}
    assert {request.finish for request in cancelled} >= {"cancelled"} and all(r.finish for r in cancelled)
    assert sum(bool(request.reused) for request in together) > count / 20 and not any(r.reused for r in alone)
    assert own.is_idle and own.counts == {"waiting": 0, "running": 0} and not own._draws.is_live.any()
    assert all(slot.request is None and not slot.is_live for slot in own._slots) and not own._pending
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        again = list(threads.map(lambda one: own.generate([one[0]], **one[1])[0], asked[:6]))
    assert [request.tokens for request in again] == [request.tokens for request in alone[:6]]


@pytest.mark.parametrize("slots", [1, 4])
def test_a_prompt_that_goes_on_from_an_answer_reads_all_of_it_but_the_last_token_from_its_slot(slots):
    """The last token of an answer was drawn and never read, whatever ended the answer; other slots have their own texts."""
    own, random = adapted_engine(slots), np.random.default_rng(0)
    begin, more = random.integers(8, 61, 20).tolist(), random.integers(8, 61, 3).tolist()
    for settings in ({"max_tokens": 12, "ignores_end": True}, {"max_tokens": 1}, {"stop_ids": tuple(range(0, 61, 5))}):
        own._reuses = False
        [first] = own.generate([begin], **settings)
        prompt = [*begin, *first.tokens, *more]
        [alone] = own.generate([prompt], max_tokens=8, logprobs=3, ignores_end=True)
        own._reuses = True
        for slot in own._slots:
            slot.text = []
        own.generate([begin], **settings)
        [again] = own.generate([prompt], max_tokens=8, logprobs=3, ignores_end=True)
        assert_alike(again, alone)
        assert again.reused == len(begin) + len(first.tokens) - 1, settings


@pytest.mark.parametrize(
    "name, slots", [("mamba2", 1), ("qwen35moe", 3), pytest.param("lfm2", 2, marks=pytest.mark.long)]
)
def test_prompts_of_a_recurrent_model_go_on_where_the_first_or_the_last_part_of_a_prompt_ended(name, slots):
    """While that one is answered, if there is a slot, and once all slots have had other texts, whose keys and values are then lost."""
    random, most = np.random.default_rng(0), {"max_tokens": 8, "logprobs": 3, "ignores_end": True}
    own = engine_lib.Engine(golden_models.load(name, 0), slots=slots, max_len=LENGTH, chunk=16)
    begin, *parts = (random.integers(8, 61, count).tolist() for count in (36, 3, 6, 12))
    own._reuses = False
    [first] = own.generate([begin], **most)
    prompts = [[*begin, *first.tokens, *parts[0]], [*begin[:33], *parts[1]], [*begin[:10], *parts[2]], begin]
    alone, own._reuses = own.generate(prompts, **most), True
    for prompt, wanted, shared in zip(prompts, alone, [36, 16, 0, 16] if slots > 1 else [36, 0, 0, 0], strict=True):
        own._kept.forget()
        running = own.submit(begin, **most)
        while len(running.tokens) < 3:
            own.step()
        [found] = own.generate([prompt], **most)
        assert (found.reused, running.tokens) == (shared, first.tokens)
        assert_alike(found, wanted)
    own.generate([random.integers(8, 61, 12).tolist() for _ in range(slots)], **most)
    [again] = own.generate([begin], **most)
    assert again.tokens == first.tokens


def test_what_a_slot_holds_is_read_by_others_while_its_answer_grows_and_after_it_was_cancelled():
    own, random = adapted_engine(), np.random.default_rng(1)
    begin, other = (random.integers(8, 61, 20).tolist() for _ in range(2))
    own._reuses = False
    [whole] = own.generate([begin], max_tokens=20, ignores_end=True)
    own._reuses = True
    for slot in own._slots:
        slot.text = []
    running = own.submit(begin, max_tokens=20, ignores_end=True)
    while len(running.tokens) < 6:
        own.step()
    beside = own.submit([*begin, *other], max_tokens=4, ignores_end=True)
    own.step()
    assert beside.reused == len(begin), "its answer so far is not to be had"
    own.cancel(running)
    prompt = [*begin, *running.tokens, *other]
    [after] = own.generate([prompt], max_tokens=8, logprobs=3, ignores_end=True)
    assert (
        after.reused == len(begin) + len(running.tokens) - 1 and running.tokens == whole.tokens[: len(running.tokens)]
    )
    own._reuses = False
    alone = own.generate([prompt, [*begin, *other]], max_tokens=8, logprobs=3, ignores_end=True)
    assert_alike(after, alone[0])
    assert beside.tokens == alone[1].tokens[:4]
    own._reuses = True


def assert_alike(one, other):
    """Checks that two requests have the same answer."""
    assert (one.tokens, one.finish, one.text) == (other.tokens, other.finish, other.text)
    known = [[[log.own, *log.likeliest.values()] for log in request.logprobs] for request in (one, other)]
    np.testing.assert_allclose(*known, atol=1e-4)


def test_parts_of_a_long_prompt_are_small_beside_others_and_hold_up_neither_running_answers_nor_short_prompts(
    monkeypatch,
):
    own = engine_lib.Engine(model(), slots=4, max_len=LENGTH, chunk=32, prefill_tokens=32, reuses=False)
    own.warm_up()
    made, known, sizes = (own._programs.first, own._programs.further), [], []
    compiled = [program._cache_size() for program in made]
    for name, at in (("first", 5), ("further", 4)):
        program = getattr(own._programs, name)
        monkeypatch.setattr(
            own._programs,
            name,
            lambda *given, at=at, program=program: [sizes.append(given[at].shape[1]), program(*given)][1],
        )
    random, settings = np.random.default_rng(0), {"ignores_end": True}
    long, running, *shorts = (random.integers(8, 61, count).tolist() for count in (60, 5, 9, 8, 7, 6))
    known.append(own.submit(long, max_tokens=3, **settings))
    own.run()
    assert sizes == [32, 32]  # nobody waits
    known.append(own.submit(running, max_tokens=40, **settings))
    while len(known[1].tokens) < 2:
        own.step()
    sizes.clear()
    known += [own.submit(long, max_tokens=3, **settings), own.submit(shorts[0], max_tokens=2, **settings)]
    for short in shorts[1:]:
        before = len(known[1].tokens)
        own.step()
        assert len(known[1].tokens) == before + 1 and len(own._pending) == 1
        assert known[-1].tokens
        known.append(own.submit(short, max_tokens=1, **settings))
    assert set(sizes) == {16} and not known[2].tokens
    for _ in range(2):  # it is not overtaken without end
        own.step()
    assert known[2].tokens and sizes.count(16) == len(sizes) == 8
    own.run()
    for request, prompt in zip(known, (long, running, long, *shorts)):
        [alone] = own.generate([prompt], max_tokens=len(request.tokens), **settings)
        assert alone.tokens == request.tokens
    assert [program._cache_size() for program in made] == compiled


def test_a_short_prompt_does_not_overwrite_what_an_older_one_still_reads():
    own = engine_lib.Engine(golden_models.load("llama", 0, 1), slots=3, max_len=LENGTH, chunk=16)
    random = np.random.default_rng(0)
    begin, more, long, short = (random.integers(8, 61, count).tolist() for count in (20, 43, 41, 5))
    [alone] = own.generate([begin + more], max_tokens=1, logprobs=3)
    for slot in own._slots:
        slot.text = []
    first = own.submit(begin, max_tokens=3, ignores_end=True)
    while not first.tokens:
        own.step()
    own.submit(long, max_tokens=1)
    own.step()
    after = own.submit(begin + more, max_tokens=1, logprobs=3)
    while not first.finish:
        own.step()
    last = own.submit(short, max_tokens=1)
    own.step()
    assert after.reused == len(begin) and last.begun and own._slots[slot_of(own, after)].source != slot_of(own, after)
    own.run()
    assert_alike(after, alone)


def slot_of(own, request):
    return next(number for number, slot in enumerate(own._slots) if slot.request is request)


def test_a_prompt_that_is_read_alone_is_not_sent_before_it_is_read(monkeypatch):
    """Another one that comes waits for what was sent."""
    own = engine_lib.Engine(model(), slots=2, max_len=LENGTH, chunk=16)
    own.submit([9] * 63, max_tokens=1)
    sent = []
    monkeypatch.setattr(own, "_read", lambda read=own._read: [sent.append(len(own._pending)), read()])
    for _ in range(3):
        own.step()
    assert sent == [2, 2] and len(own._pending) == 1
    own.run()


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.long)])
def test_a_row_that_gets_several_tokens_by_one_program_gets_those_that_it_gets_one_by_one(count, monkeypatch):
    random, own, several = np.random.default_rng(count), adapted_engine(1), programs.GROUP
    begin = random.integers(8, 61, 40).tolist()
    asked = [drawn_request(random, number, [begin]) for number in range(count)]
    sent, decode = [], own._programs.decode
    monkeypatch.setattr(own._programs, "decode", lambda *given, **how: [sent.append(1), decode(*given, **how)][1])
    assert own._programs.steps == several and adapted_engine()._programs.steps == 1
    for prompt, settings in asked:
        [alone], told = adapted_engine().generate([prompt], **settings), []
        sent.clear()
        request = own.submit(prompt, on_change=lambda request, told=told: told.append(len(request.tokens)), **settings)
        own.run()
        assert_alike(request, alone)
        assert told == list(range(1, len(request.tokens) + 1))
        most = -(-(request.most - 1) // several)  # the prompt's program gives the first
        needed = -(-(len(request.tokens) - 1) // several)
        assert needed <= len(sent) <= min(most, needed + 1)
        if random.random() < 0.3:  # between two groups, or while the prompt is read
            ended = own.submit(prompt)
            for _ in range(random.integers(0, 5)):
                own.step()
            own.cancel(ended)
            assert ended.tokens == alone.tokens[: len(ended.tokens)] or settings  # of other settings
            own.run()
    assert own.is_idle and not own._draws.is_live.any() and not own._pending


@pytest.mark.parametrize("slots", [1, 2])
def test_no_token_is_lost_or_comes_early_where_on_change_raises_or_steps(slots):
    own = engine_lib.Engine(model(), slots=slots, max_len=LENGTH, chunk=16)
    prompts, settings = [[9, 10, 11, 12] * 5, [20, 21, 22] * 6], {"max_tokens": 20, "ignores_end": True}
    wanted = [own.generate([prompt], **settings)[0].tokens for prompt in prompts]

    def fail(request):
        if len(request.tokens) in (1, 3, 9, 20):
            raise KeyError("told")

    def go_on(request):
        if len(request.tokens) in (1, 3, 9, 20):
            own.step()

    for on_change in (fail, go_on):
        asked, more = [own.submit(prompt, on_change=on_change, **settings) for prompt in prompts], True
        for _ in range(60):
            with contextlib.suppress(KeyError):
                more = own.step()
            if not more:
                break
        assert own.is_idle
        assert [request.tokens for request in asked] == wanted
        [after] = own.generate([prompts[1] + wanted[1][:19]], max_tokens=1)
        assert after.tokens == wanted[1][19:] and after.reused


def test_kernels_that_stay_sharded_are_cast_and_gathered_for_each_token():
    own = engine_lib.Engine(golden_models.load("llama", 3), is_gathered=True, dtype="bfloat16", slots=2, max_len=48)
    program = own._programs.step.trace(*own._programs._given(own._params, tokens=0), is_plain=True)
    gathered = collections.Counter(
        eqn.invars[0].aval.shape
        for eqn in traces.equations(program.jaxpr.jaxpr)
        if eqn.primitive.name == "sharding_constraint"
        and eqn.params["sharding"].is_fully_replicated
        and eqn.invars[0].aval.dtype == "bfloat16"
    )
    kernels = collections.Counter(leaf.shape for path, leaf in tree.flatten(own._params) if path.endswith("kernel"))
    assert kernels <= gathered


def test_settings_and_prompts_are_sent_to_the_devices_at_once():
    """What a program gets from the host all the same JAX would send for each call, and settings change rarely."""
    own = adapted_engine()
    own.generate([[9] * 20], max_tokens=4)
    with jax.transfer_guard_host_to_device("disallow"):
        own.generate([[9] * 30, [8] * 20], max_tokens=4)


def test_how_many_tokens_a_program_adds():
    def steps(nbytes, slots, devices):
        mesh = zerojax.make_mesh(devices=devices[:1])
        return programs.steps_of([jax.ShapeDtypeStruct((nbytes,), np.int8)], slots, mesh)

    gpus, sizes = compile_only.devices(), (0, 1, 8, 9, 16, 32, 33, 64, 140)
    assert [steps(size * 10**9, 1, gpus) for size in sizes] == [8, 8, 8, 7, 4, 2, 1, 1, 1]
    assert [steps(size * 10**8, 1, jax.devices()) for size in (0, 1, 5)] == [8, 5, 1]
    assert steps(1, 2, gpus) == 1


@pytest.mark.parametrize(
    "name, ways, slots",
    [("llama", 2, 1), *[pytest.param(name, 1, 2, marks=pytest.mark.long) for name in ("llama", "t5")]],
)
def test_after_a_warm_up_no_request_compiles(name, ways, slots):
    loaded = golden_models.load(name, 0, ways)
    own = engine_lib.Engine(loaded, slots=slots, max_len=40, max_inputs=24, chunk=20)
    own.warm_up()
    assert own.is_idle
    made = [own._programs.first, own._programs.further, own._programs.decode, engine_lib._with_row]
    before = [program._cache_size() for program in made]
    for length in (1, 15, 16, 17, 20, 21, 24) + (() if name == "t5" else (30, 37, 38)):
        for settings in ({}, {"temperature": 1.0, "logprobs": 2, "repetition_penalty": 1.1}):
            own.submit([9] * length, max_tokens=2, **settings)
    own.run()
    assert [program._cache_size() for program in made] == before


def test_what_does_not_fit_is_refused_in_one_line():
    own = engine()
    two = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with jax.set_mesh(two), pytest.raises(UserError, match=r"^jax.set_mesh: the mesh is x 2 of devices"):
        engine_lib.Engine(model())
    for line, prompt, settings in (
        ("prompt: has 64 tokens, and at most 63 fit", [9] * 64, {}),
        ("max_tokens: is 62, and after a text of 3 tokens 61 fit", [9] * 3, {"max_tokens": 62}),
        ("prompt: holds 61, and the model knows ids from 0 to 60", [61], {}),
        ("prompt: must be a list of token ids, at least one, and is \\[\\]", [], {}),
        (
            "prompt: must be a list of token ids, at least one, and is 'abc'; a tokenizer makes them of a text",
            "abc",
            {},
        ),
        ("stop_ids: holds -1", [9], {"stop_ids": (-1,)}),
        ("top_p: must be above 0", [9], {"top_p": 0.0}),
        ("temperature: must be 0", [9], {"temperature": float("nan")}),
        ("logprobs: must be from 0 to 20", [9], {"logprobs": 21}),
    ):
        with pytest.raises(UserError, match=line):
            own.submit(prompt, **settings)
    assert own.is_idle
    with pytest.raises(UserError, match="format: must be one of none, int8, fp8, nf4, and is 'int3'"):
        engine_lib.Engine(model(), format="int3")
    for line, settings in (
        ("max_tokens: must be a whole number or None, and is 2.5", {"max_tokens": 2.5}),
        ("temperature: must be a number, and is None", {"temperature": None}),
        ("stop_ids: must be a list of which each is a whole number, and is 'a'", {"stop_ids": "a"}),
        ("stop_strings: must be a list of which each is text, and is 'end'", {"stop_strings": "end"}),
        ("adapter: must be text, and is \\[\\]", {"adapter": []}),
    ):
        with pytest.raises(UserError, match=line):
            own.submit([9], **settings)
    for line, call in (
        ("request: must be a Request, and is None", lambda: own.add(None)),
        ("request: must be a Request, and is 3", lambda: own.cancel(3)),
        ("prompt: must be a list of token ids, at least one, and is", lambda: own.submit([[9], [9, 9]])),
        ("on_change: must be a function or None, and is 3", lambda: own.submit([9], on_change=3)),
        ("prompts: must be a list of prompts", lambda: own.generate(None)),
        ("prompt: must be a list of token ids, at least one", lambda: own.generate([[9], []])),
        ("params: embed/embedding is not there, and in the engine float32", lambda: own.renew({"a": 1})),
    ):
        with pytest.raises(UserError, match=line):
            call()
    assert own.is_idle  # nothing of a list with a wrong prompt is asked
    own.submit([9], max_tokens=1)
    with pytest.raises(UserError, match="renew: the engine has texts that are not answered"):
        own.renew({})
    own.run()
    for line, wrong in (
        ("slots: must be a whole number, and is None", {"slots": None}),
        ("max_len: must be a whole number, and is 9.5", {"max_len": 9.5}),
        ("text_of: must be a function or None, and is 3", {"text_of": 3}),
        ("dtype: must be a floating dtype of at least 16 bits, such as jnp.bfloat16, and is 'x'", {"dtype": "x"}),
        ("params: embed/embedding is not there, and in the model ", {"params": {}}),
        ("params: embed/embedding is not there, and in the model ", {"params": True}),
        ("model: must be what zerojax.load_huggingface returns, and is 'llama'", {"model": "llama"}),
    ):
        with pytest.raises(UserError, match=line):
            engine_lib.Engine(**{"model": model(), **wrong})
