import dataclasses

import compile_only
import pytest
import runs

import zerojax
from zerojax.plan import search

GRID = {"stage": (0, 3), "remat": ("none",), "micro_batch_size": (1, 2, 4), "replica": (1,)}


@pytest.fixture(scope="module")
def config():
    return runs.config(global_batch_size=16, model__vocab_size=320)


@pytest.fixture(scope="module")
def roomy(config):
    return search.search(config, "cpu", "1x8", grid=GRID, memory=1e12)


def test_every_candidate_keeps_the_global_batch(roomy):
    chosen = {(o.candidate.micro_batch_size, o.candidate.grad_accum) for o in roomy}
    assert chosen == {(1, 2), (2, 1)}  # micro-batches of 4 on 8 devices make 32


def test_with_room_for_all_one_wins_and_the_others_fit(roomy):
    assert [o.reason for o in roomy].count("") == 1 and not roomy[0].reason
    assert all(o.reason.startswith("fits") for o in roomy[1:]) and all(o.is_compiled for o in roomy)


def test_what_does_not_fit_loses_with_the_bytes_it_lacks(config, roomy):
    peaks = sorted(o.peak for o in roomy)
    tight = search.search(config, "cpu", "1x8", grid=GRID, memory=peaks[1])
    lost = {o.candidate for o in roomy if o.peak > peaks[1]}
    assert {o.candidate for o in tight if "does not fit" in o.reason or "alone take" in o.reason} == lost and lost
    assert tight[0].peak <= peaks[1]


def test_state_that_is_too_large_alone_is_not_compiled(config):
    outcomes = search.search(config, "cpu", "1x8", grid=GRID, memory=1000)
    assert not any(o.is_compiled for o in outcomes)
    assert all("alone take" in o.reason or "does not fit" in o.reason for o in outcomes)


def test_no_more_is_compiled_than_was_allowed(config):
    outcomes = search.search(config, "cpu", "1x8", grid=GRID, memory=1e12, most_compiles=1)
    assert sum(o.is_compiled for o in outcomes) == 1
    assert sum("limit of 1" in o.reason for o in outcomes) == len(outcomes) - 1


def test_of_plans_as_fast_as_each_other_the_leanest_wins_and_without_rates_the_first():
    def outcome(stage, peak, rate):
        return search.Outcome(search.Candidate(stage, "dots", 1, 1, 1), peak, rate, "", True)

    for rates, stages in (((2.0, 2.0, 1.0), [2, 0, 3]), ((None, None, None), [0, 2, 3])):
        ranked = search._ranked([outcome(*row) for row in zip((0, 2, 3), (9, 5, 1), rates)])
        assert [o.candidate.stage for o in ranked] == stages


def test_settings_that_go_with_another_remat_are_given_up(config):
    model = dataclasses.replace(config.model, recompute="layer_0/mlp/up", offload="layer_1/mlp/up")
    kept = {remat: (m := search.with_remat(model, remat)).recompute + m.offload for remat in ("none", "dots", "full")}
    assert kept == {"none": "", "dots": "layer_0/mlp/uplayer_1/mlp/up", "full": "layer_1/mlp/up"}


def test_over_several_hosts_state_is_split_over_all_devices_or_those_of_each_host(config):
    one, two = (search.default_grid(compile_only.gpus(topology=topology)) for topology in ("1x8", "2x8"))
    assert one["replica"] == [1] and two["replica"] == [1, 2]
    grid = {**two, "stage": (3,), "remat": ("full",), "micro_batch_size": (1,)}
    found = search.search(config, "h200", "2x8", grid=grid, most_compiles=0)
    assert [(o.candidate.replica, o.candidate.grad_accum) for o in found] == [(2, 1), (1, 1)]


def test_a_target_of_unknown_memory_is_refused(config):
    with pytest.raises(zerojax.UserError, match="memory is not known"):
        search.search(config, "cpu", "1x8")


def test_a_grid_that_cannot_keep_the_batch_is_refused(config):
    with pytest.raises(zerojax.UserError, match="keeps the global batch"):
        search.search(config, "cpu", "1x8", grid={**GRID, "micro_batch_size": (3,)}, memory=1e12)


def test_the_table_has_a_row_for_each(roomy):
    assert search.table(roomy).row_count == len(roomy) == len(search.as_json(roomy))
