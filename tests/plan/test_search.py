import types

import compile_only
import jax
import pytest

import zerojax
from zerojax.plan import arithmetic, search
from zerojax.zero.pipeline import order as order_lib

FEW = (2, 4)  # layers
CANDIDATES = [search.Candidate(stage, "dots", micro, 4 // micro, 1) for stage in (0, 3) for micro in (1, 2, 4)]


def build(candidate: search.Candidate):
    """A fake step: its bytes grow with the micro-batch, and shrink with the stage."""
    held = 100 // (candidate.stage + 1)
    peak = held + 10 * candidate.micro_batch_size
    return held, lambda: types.SimpleNamespace(in_step=peak, bound=None, rollouts=None, seconds=None, tokens=0)


def test_a_candidate_is_not_compiled_if_another_shows_that_it_cannot_fit():
    outcomes = search.search(CANDIDATES, build, memory=40)
    assert all("alone take" in o.reason or "does not fit" in o.reason for o in outcomes if o.candidate.stage == 0)
    late = [search.Candidate(3, "dots", 4, 1, 1), search.Candidate(3, "dots", 2, 1, 1)]
    reasons = {o.candidate.micro_batch_size: o.reason for o in search.search(late[::-1], build, memory=40)}
    assert reasons == {2: "does not fit: 5 B too much", 4: "does not fit, after stage 3, micro-batch 2 (5 B too much)"}


@pytest.mark.parametrize(("constant", "slope"), [(0, 40), (30, 10), (300, 0), (7, 1)])
def test_only_candidates_that_do_not_fit_are_left_out(constant, slope):
    """Temporaries of any constant part, and stages that have half of those of others at least: what fits is compiled."""

    def build_any(candidate):
        temporaries = (constant + slope * candidate.micro_batch_size) * (2 if candidate.stage == 3 else 1)
        held = 60 // (candidate.stage + 1)
        return held, lambda: types.SimpleNamespace(
            in_step=held + temporaries, bound=None, rollouts=None, seconds=None, tokens=0
        )

    for memory in (70, 100, 200, 700):
        outcomes = search.search(CANDIDATES, build_any, memory=memory)
        fits = {c for c in CANDIDATES if build_any(c)[1]().in_step <= memory}
        assert {o.candidate for o in outcomes if o.is_compiled and "does not fit" not in o.reason} == fits


def test_a_candidate_that_the_compiler_refuses_for_its_memory_does_not_fit():
    def build_short(candidate):
        def compile_step():
            raise jax.errors.JaxRuntimeError(
                f"{'INTERNAL' if candidate.stage else 'RESOURCE_EXHAUSTED'}: Used 5.00G of 4.00G hbm."
            )

        return 1, compile_step

    one, *_ = search.search(CANDIDATES[:1], build_short, memory=1e12)
    assert (one.peak, one.reason) == (None, "does not fit: the compiler needs 5.00G of 4.00G of hbm")
    with pytest.raises(jax.errors.JaxRuntimeError):
        search.search(CANDIDATES[-1:], build_short, memory=1e12)


def test_the_number_of_compiles_is_limited():
    outcomes = search.search(CANDIDATES, build, memory=1e12, most_compiles=1)
    assert sum(o.is_compiled for o in outcomes) == 1
    assert sum("limit of 1 compiles" in o.reason for o in outcomes) == len(outcomes) - 1


def test_progress_has_a_line_for_each_step_that_is_built():
    said = []
    search.search(CANDIDATES, build, memory=1e12, say=said.append)
    assert len(said) == len(CANDIDATES) and all(line.endswith(": fits") for line in said)


def test_among_equally_fast_plans_the_leanest_wins_and_without_rates_the_first():
    def outcome(stage, peak, rate):
        return search.Outcome(search.Candidate(stage, "dots", 1, 1, 1), peak, rate, "", True)

    for rates, stages in (((2.0, 2.0, 1.0), [2, 0, 3]), ((None, None, None), [0, 2, 3])):
        ranked = search._ranked([outcome(*row) for row in zip((0, 2, 3), (9, 5, 1), rates)])
        assert [o.candidate.stage for o in ranked] == stages


def test_only_choices_that_keep_the_global_batch_are_candidates():
    grid = {"stage": (3,), "remat": ("full",), "micro_batch_size": (1, 2, 3), "replica": (1, 3)}
    found = search.candidates_of(grid, ways=8, global_batch_size=16)
    assert [(c.micro_batch_size, c.grad_accum, c.replica) for c in found] == [(1, 2, 1), (2, 1, 1)]


def test_offload_is_tried_only_where_nothing_fits_without_and_the_stage_allows_it():
    grid = {"stage": (0, 2), "remat": ("full",), "micro_batch_size": (1,), "replica": (1,), "offload": ("none", "host")}
    candidates = search.candidates_of(grid, ways=1, global_batch_size=1)
    assert [(c.stage, c.offload) for c in candidates] == [(0, "none"), (2, "none"), (2, "host")]

    def build_either(candidate):
        held = 100 if candidate.offload == "none" else 20
        return held, lambda: types.SimpleNamespace(in_step=held, bound=None, rollouts=None, seconds=None, tokens=0)

    for memory, expected in ((40, [(2, "host")]), (120, [(0, "none"), (2, "none")])):
        outcomes = search.search(candidates, build_either, memory=memory)
        assert [(o.candidate.stage, o.candidate.offload) for o in outcomes if o.is_compiled] == expected
    assert "without offload" in outcomes[-1].reason


def test_inputs_of_layers_are_offloaded_where_a_policy_and_one_program_keep_them_and_each_remat_has_a_cost():
    grid = {**search.DEFAULT_GRID, **search.LONG, "replica": (1,), "micro_batch_size": (1,)}
    found = search.candidates_of(grid, ways=1, global_batch_size=1)
    on_host = [c for c in found if c.inputs == "host"]
    assert on_host
    assert not [c for c in on_host if c.remat == "none" or c.params == "host"]
    cheapest = min(found, key=search._expected_cost)
    assert (cheapest.remat, cheapest.tile_tokens, cheapest.offloaded) == ("none", 0, 0)
    assert {c.tile_tokens for c in found} == {0, 8192}


def test_params_are_offloaded_last_and_only_where_they_are_sharded():
    grid = {"stage": (2, 3), "remat": ("full",), "micro_batch_size": (1,), "replica": (1,)}
    grid |= {name: search.DEFAULT_GRID[name] for name in ("offload", "params")}
    candidates = search.candidates_of(grid, ways=1, global_batch_size=1)
    kinds = [(c.stage, c.offload, c.params) for c in candidates]
    assert kinds == [(stage, o, "none") for stage in (2,) for o in ("none", "host")] + [
        (3, "none", "none"),
        (3, "host", "none"),
        (3, "host", "host"),
    ]

    def build_by_kind(candidate):
        held = 100 - 40 * candidate.offloaded
        return held, lambda: types.SimpleNamespace(in_step=held, bound=None, rollouts=None, seconds=None, tokens=0)

    best = search.search(candidates, build_by_kind, memory=30)[0]
    assert (best.candidate.params, best.reason) == ("host", "")
    assert "with less offload" in search.search(candidates, build_by_kind, memory=70)[-1].reason


def test_an_optimizer_that_cannot_be_offloaded_loses_with_its_reason():
    def build_one(candidate):
        raise zerojax.UserError("offload.optimizer: no moment")

    (outcome,) = search.search([search.Candidate(2, "full", 1, 1, 1, "host")], build_one, memory=1)
    assert outcome.reason == "offload.optimizer: no moment"


def test_the_replicas_of_the_default_grid_are_one_or_as_many_as_there_are_hosts():
    one, two = (search.default_grid(compile_only.gpus(topology=topology)) for topology in ("1x8", "2x8"))
    assert one["replica"] == [1] and two["replica"] == [1, 2]


def test_an_empty_list_of_candidates_is_an_error():
    with pytest.raises(zerojax.UserError, match="keeps the global batch"):
        search.search([], build, memory=1e12)


def test_devices_share_examples_where_nothing_fits_without_and_over_context_first():
    grid = {"stage": (3,), "remat": ("full",), "micro_batch_size": (1,), "replica": (1,)}
    grid |= {"offload": ("none", "host"), "context": (1, 2, 4), "model": (1, 2)}
    candidates = search.candidates_of(grid, ways=8, global_batch_size=8)
    assert all(c.grad_accum == c.per_example for c in candidates)

    def build_long(candidate):
        held = 10 // candidate.context
        return held, lambda: types.SimpleNamespace(in_step=held, bound=None, rollouts=None, seconds=None, tokens=0)

    for memory, expected in ((20, [(1, 1)]), (6, [(1, 1), (2, 1)])):
        outcomes = search.search(candidates, build_long, memory=memory)
        best = outcomes[0].candidate
        assert (best.context, best.model, best.offload) == (*expected[-1], "none")
        assert {o.candidate.per_example for o in outcomes if o.candidate.offload == "none"} == {1, best.per_example}
    few = search.candidates_of(grid, ways=8, global_batch_size=2)
    assert {c.per_example for c in few} == {4, 8}


def a_deep_world(candidate):
    """A fake step of 32 layers: time and peak grow with them in a line. More residuals are faster and larger."""
    speed = {"none": 1.0, "dots": 1.1, "full": 1.33}[candidate.remat]
    kept = {"none": 4, "dots": 2, "full": 1}[candidate.remat]

    def plan(layers):
        peak = 10 + layers * kept * candidate.micro_batch_size
        seconds = (1 + layers * speed) * (1 + 0.1 * candidate.grad_accum)
        return types.SimpleNamespace(in_step=peak, bound=None, rollouts=None, seconds=seconds, tokens=100)

    return plan


DEEP = [search.Candidate(3, remat, micro, 4 // micro, 1) for remat in ("none", "dots", "full") for micro in (1, 2, 4)]


def fastest_deep(memory):
    """Returns the fastest candidate of the deep world that fits, and its seconds."""
    plans = {candidate: a_deep_world(candidate)(32) for candidate in DEEP}
    found = min((one for one in DEEP if plans[one].in_step <= memory), key=lambda one: plans[one].seconds)
    return found, plans[found].seconds


@pytest.mark.parametrize("memory", [1000, 200, 140, 75, 45])
def test_of_deep_models_the_fastest_that_fits_is_found_and_few_are_compiled_in_full(memory):
    full = []

    def build_deep(candidate):
        plan = a_deep_world(candidate)
        few = {layers: plan(layers) for layers in FEW}

        def compile_in_full():
            full.append(candidate)
            return plan(32)

        return search.Built(1, compile_in_full, lambda: search.continued(few, 32), 20.0)

    outcomes = search.search(DEEP, build_deep, memory=memory)
    fastest, seconds = fastest_deep(memory)
    assert (outcomes[0].candidate, outcomes[0].reason) == (fastest, "")
    assert outcomes[0].is_compiled and full == [fastest]
    assert outcomes[0].seconds == seconds


def test_where_a_line_is_wrong_the_next_fastest_is_compiled():
    slower, faster = search.Candidate(3, "full", 1, 1, 1), search.Candidate(3, "dots", 1, 1, 1)

    def build_bent(candidate):
        plan = types.SimpleNamespace(
            in_step=200 if candidate == faster else 50,
            bound=None,
            rollouts=None,
            seconds=2.0 if candidate == slower else 1.0,
            tokens=1,
        )
        return search.Built(1, lambda: plan, lambda: search.Continued(60.0, plan.seconds, 1))

    outcomes = search.search([slower, faster], build_bent, memory=100)
    assert [(o.candidate, o.is_compiled) for o in outcomes] == [(slower, True), (faster, True)]
    assert outcomes[1].reason == "does not fit: 100 B too much"


def test_a_step_whose_matmuls_alone_take_longer_than_another_step_is_not_compiled():
    slow, fast = search.Candidate(3, "full", 1, 1, 1), search.Candidate(3, "dots", 1, 1, 1)

    def build_bound(candidate):
        assert candidate in (slow, fast)
        plan = types.SimpleNamespace(in_step=1, bound=None, rollouts=None, seconds=1.0, tokens=1)
        return search.Built(1, lambda: plan, None, 1.2 if candidate == slow else 0.9)

    outcomes = search.search([slow, fast], build_bound, memory=100)
    assert [o.is_compiled for o in outcomes] == [True, False]
    assert outcomes[1].reason == "not compiled: its matmuls alone take 1200 ms, and another step 1000"


def guessed(candidate, wrong=lambda candidate: 1.0):
    """An estimate of the deep world, wrong by a factor."""
    plan = a_deep_world(candidate)(32)
    return arithmetic.Guess(plan.seconds * wrong(candidate), plan.in_step * 1.1, {})


@pytest.mark.parametrize("memory", [1000, 200, 140, 75, 45])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_where_arithmetic_is_wrong_by_the_same_factor_the_fastest_is_found_with_few_compiles(memory, scale):
    lines = []

    def build_deep(candidate):
        plan = a_deep_world(candidate)
        few = {layers: plan(layers) for layers in FEW}

        def line():
            lines.append(candidate)
            return search.continued(few, 32)

        return search.Built(1, lambda: plan(32), line)

    def guess(candidate):
        return guessed(candidate, lambda c: scale * (1.03 if c.remat == "none" else 1.0))

    outcomes = search.by_arithmetic(DEEP, guess, build_deep, memory=memory)
    fastest, _ = fastest_deep(memory)
    assert (outcomes[0].candidate, outcomes[0].reason) == (fastest, "")
    assert len(lines) <= 5 and sum(o.is_compiled for o in outcomes) == 1
    assert memory < 1000 or any("by arithmetic" in o.reason for o in outcomes)


def test_steps_over_other_axes_are_judged_by_those_that_were_compiled_over_them():
    """Arithmetic has every ring 10% too fast. One is compiled, and the others are behind by as much."""
    plain = [search.Candidate(3, "dots", micro, 4 // micro, replica) for micro in (1, 2) for replica in (1, 2)]
    rings = [search.Candidate(3, remat, 2, 2, 1, model=2, ring=True) for remat in ("none", "dots", "full")]
    times = {one: 1.0 + 0.03 * place for place, one in enumerate([*plain, *rings])}
    lines = []

    def build(candidate):
        def line():
            lines.append(candidate)
            return search.Continued(1.0, times[candidate], 1)

        plan = types.SimpleNamespace(in_step=1, bound=None, rollouts=None, seconds=times[candidate], tokens=1)
        return search.Built(1, lambda: plan, line)

    def guess(candidate):
        return arithmetic.Guess(times[candidate] * (0.9 if candidate.ring else 1.0), 1.0, {})

    outcomes = search.by_arithmetic([*plain, *rings], guess, build, memory=10)
    assert outcomes[0].candidate == plain[0] and [c.ring for c in lines] == [False, True]


def test_of_pipelines_that_differ_in_stage_and_replica_alone_one_is_compiled_and_of_others_those_that_come_near():
    alike = [search.Candidate(stage, "dots", 1, 8, replica, pipe=2) for stage in (0, 1, 2) for replica in (1, 2)]
    near, far = (search.Candidate(1, "dots", 1, 8, 1, pipe=2, context=size) for size in (2, 4))
    times = {one: 1.0 + 0.001 * place for place, one in enumerate(alike)} | {near: 1.01, far: 1.03}
    peaks = dict.fromkeys(times, 2) | {alike[0]: 11}  # the first does not fit, so the next one stands for the others
    lines = []

    def build(candidate):
        lines.append(candidate)
        line = search.Continued(peaks[candidate], 0.9 * times[candidate], 1)
        return search.Built(peaks[candidate] - 1, lambda: None, lambda: line, trusts_line=True)

    guess = lambda candidate: arithmetic.Guess(times[candidate], peaks[candidate], {})  # noqa: E731
    outcomes = search.by_arithmetic([*alike, near, far], guess, build, memory=10)
    assert lines == [alike[0], alike[1], near] and outcomes[0].candidate == alike[1]


class Model:
    """Layers of kinds 0 to 2, each of which takes another time."""

    def __init__(self, kinds):
        self.num_layers, self.kind_of = len(kinds), kinds.__getitem__


KINDS = {
    "alike": [0] * 32,
    "an odd number": [0] * 61,
    "the first are others": [1] * 3 + [0] * 58,
    "in turn": [1, 0] * 12,
    "five and one": ([1] * 5 + [0]) * 4 + [1] * 2,
    "five and one, cut": ([1] * 5 + [0]) * 5 + [1] * 4,
    "three kinds": [2] + [1, 1, 0] * 7,
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_few_layers_continue_to_the_time_of_layers_of_all_kinds(kinds):
    few = search.few_layers(Model(kinds))
    times = {count: sum((3.0, 10.0, 70.0)[kind] for kind in kinds[:count]) for count in (*few, len(kinds))}
    low, high = few
    assert 2 <= low <= high - 2 and low + high < len(kinds)
    line = times[low] + (len(kinds) - low) / (high - low) * (times[high] - times[low])
    assert line == pytest.approx(times[len(kinds)])


def test_layers_that_few_do_not_tell_are_compiled_whole():
    assert not any(map(search.few_layers, (Model([0] * 9), Model([0] * 12 + [1]), Model([1, 0, 0, 2] * 3))))
    assert search.few_layers(Model(KINDS["alike"])) == FEW


def test_few_layers_have_the_last_word_where_the_full_program_computes_values_again():
    first, second = (search.Candidate(3, "dots", micro, 4 // micro, 1) for micro in (2, 1))
    times = {first: 1.0, second: 1.03}

    def build(candidate):
        full = types.SimpleNamespace(in_step=1, bound=None, rollouts=None, seconds=1.07 * times[candidate], tokens=1)
        return search.Built(1, lambda: full, lambda: search.Continued(1.0, times[candidate], 1))

    guess = lambda candidate: arithmetic.Guess(times[candidate], 1.0, {})  # noqa: E731
    outcomes = search.by_arithmetic([second, first], guess, build, memory=10)
    assert outcomes[0].candidate == first and outcomes[0].is_compiled
    assert (outcomes[0].seconds, outcomes[0].tokens_per_second) == (1.0, 1.0)


def test_a_step_that_takes_minutes_to_compile_has_the_line_s_word_unless_it_is_near_the_memory():
    candidate = search.Candidate(3, "full", 1, 8, 1, pipe=4)
    for memory, is_compiled in ((1000, False), (100.5, True)):
        plan = types.SimpleNamespace(in_step=100, bound=None, rollouts=None, seconds=1.0, tokens=1)
        built = search.Built(1, lambda plan=plan: plan, lambda: search.Continued(100.0, 1.0, 1), trusts_line=True)
        (outcome,) = search.by_arithmetic(
            [candidate], lambda _: arithmetic.Guess(1.0, 100.0, {}), lambda _, own=built: own, memory=memory
        )
        assert (outcome.reason, outcome.is_compiled) == ("", is_compiled)


def test_a_pipeline_needs_a_micro_batch_a_group_and_chunks_whole_rounds():
    grid = {
        "stage": (1,),
        "remat": ("full",),
        "micro_batch_size": (1,),
        "replica": (1,),
        "pipe": (1, 4),
        "chunks": (1, 2),
    }
    found = search.candidates_of(grid, ways=8, global_batch_size=16)
    assert [(c.pipe, c.chunks, c.grad_accum) for c in found] == [(1, 1, 2), (4, 1, 8), (4, 2, 8)]
    assert {(c.pipe, c.chunks) for c in search.candidates_of(grid, ways=8, global_batch_size=12)} == {(4, 1)}
    table = search.table([search.Outcome(candidate, 1, 1.0, "") for candidate in found])
    assert [column.header for column in table.columns][5:7] == ["pipe", "chunks"]


def test_few_layers_over_a_pipeline_are_continued_by_their_times():
    """A layer takes 1 forward and 2 backward, the embedding 0.5, and the head 3 and 6: as much as three layers."""
    order = order_lib.make("1f1b", 2, 4)

    def plan(cut, layers, groups):
        times = [[1.0 * cut.count(stage) for stage in (0, 1)], [2.0 * cut.count(stage) for stage in (0, 1)]]
        for kind, (embed, head) in zip(times, ((0.5, 2.0), (0.5, 4.0))):
            kind[0], kind[1] = kind[0] + embed, kind[1] + head
        calls = [cut.count(0), cut.count(1)]
        pipeline = types.SimpleNamespace(
            order=order,
            stage_of_call=cut,
            calls=calls,
            times=order_lib.PassTimes(*times),
            update=0.1 * layers,
            memory=[types.SimpleNamespace(peak=base + 10 * count) for base, count in zip(groups, calls)],
        )
        return types.SimpleNamespace(pipeline=pipeline, tokens=7)

    few = plan([0, 1, 1], 2, (100, 50)), plan([0, 0, 0, 1, 1], 4, (100, 50))
    found = search.continued_over_stages(*few, 16)
    cut = [0] * 9 + [1] * 8  # nine layers and the embedding, seven and the head
    expected = plan(cut, 16, (100, 50)).pipeline
    assert found.peak == max(held.peak for held in expected.memory)
    assert found.seconds == pytest.approx(order_lib.run(order, expected.times).total + expected.update)
    assert found.tokens == 7


def test_a_ring_is_a_choice_where_the_axis_divides_the_examples():
    grid = {
        "stage": (3,),
        "remat": ("dots",),
        "micro_batch_size": (1, 2),
        "replica": (1,),
        "model": (1, 2),
        "ring": (False, True),
    }
    found = search.candidates_of(grid, ways=2, global_batch_size=2)
    assert {(c.model, c.micro_batch_size, c.ring) for c in found} == {
        (1, 1, False),
        (2, 1, False),
        (2, 2, False),
        (2, 2, True),
    }
    assert len(found) == 4 and "ring" in search.words(found[-1])
