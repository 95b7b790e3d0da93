import dataclasses
import shlex

import compile_only
import pytest
import runs

import zerojax
from zerojax import roles
from zerojax.plan import scale, search
from zerojax.trainer import plans, settings

GRID = {"stage": (3,), "remat": ("none",), "micro_batch_size": (1, 2, 4), "replica": (1,)}


@pytest.fixture(scope="module")
def config():
    return runs.config(global_batch_size=16, model__vocab_size=320)


@pytest.fixture(scope="module")
def roomy(config):
    return plans.search_config(config, "cpu", "1x8", grid=GRID, memory=1e12)


def test_every_candidate_keeps_the_global_batch(roomy):
    chosen = {(o.candidate.micro_batch_size, o.candidate.grad_accum) for o in roomy}
    assert chosen == {(1, 2), (2, 1)}  # micro-batches of 4 on 8 devices make 32


def test_with_room_for_all_one_wins_and_the_others_fit(roomy):
    assert [o.reason for o in roomy].count("") == 1 and not roomy[0].reason
    assert all(o.reason.startswith("fits") for o in roomy[1:]) and all(o.is_compiled for o in roomy)


@runs.LONG
def test_a_candidate_that_does_not_fit_names_the_bytes_it_lacks(config, roomy):
    peaks = sorted(o.peak for o in roomy)
    tight = plans.search_config(config, "cpu", "1x8", grid=GRID, memory=peaks[0])
    lost = {o.candidate for o in roomy if o.peak > peaks[0]}
    assert {o.candidate for o in tight if "does not fit" in o.reason or "alone take" in o.reason} == lost and lost
    assert tight[0].peak <= peaks[0]


def test_state_that_is_too_large_alone_is_not_compiled(config):
    outcomes = plans.search_config(config, "cpu", "1x8", grid=GRID, memory=1000)
    assert not any(o.is_compiled for o in outcomes)
    assert all("alone take" in o.reason or "does not fit" in o.reason for o in outcomes)


def test_settings_that_need_another_remat_are_dropped(config):
    named = settings.changed(config, {"model.recompute": "layer_0/mlp/up", "model.offload": "layer_1/mlp/up"})
    models = {remat: plans.with_remat(named, remat).model for remat in ("none", "dots", "full")}
    kept = {remat: model.recompute + model.offload for remat, model in models.items()}
    assert kept == {"none": "", "dots": "layer_0/mlp/uplayer_1/mlp/up", "full": "layer_1/mlp/up"}


@pytest.mark.parametrize(
    "candidate",
    [
        search.Candidate(3, "full", 2, 4, 2, offload="host", params="host"),
        search.Candidate(1, "none", 1, 8, 1, pipe=2, chunks=2),
        search.Candidate(3, "dots", 4, 1, 1, context=2, model=2, tile_tokens=8192, inputs="host", ring=True),
    ],
)
def test_flags_of_a_candidate_make_its_settings_of_the_config_that_was_searched(config, candidate):
    named = dataclasses.replace(config, model=dataclasses.replace(config.model, recompute="layer_0/mlp/up"))
    words = shlex.split(plans._flags(config, candidate, named))
    changes = dict(word.removeprefix("--config.").split("=", 1) for word in words)
    known = {place: settings.lookup(named, place) for place in changes}
    typed = {"model.vocab_size": 320, "model.recompute": "layer_0/mlp/up"}
    for place, value in changes.items():
        typed[place] = value == "True" if isinstance(known[place], bool) else type(known[place])(value)
    made = runs.config(**{place.replace(".", "__"): value for place, value in typed.items()})
    applied = plans._applied(config, candidate)
    assert dataclasses.replace(made, global_batch_size=0) == applied


def test_matrices_are_used_by_columns_where_the_devices_divide_them_and_their_tokens_are_about_as_many_as_rows():
    config = runs.config(model__preset="llama3_8b", model__by_columns="embed|head", seq_len=8192)
    sizes = {"stage": (2, 3), "remat": ("dots",), "micro_batch_size": (2, 4), "replica": (1, 8, 64), "model": (1, 2)}

    def chosen(ways, **how):
        found = plans._choices(config, ways, 4 * ways, sizes, **how)
        return {(c.stage, c.micro_batch_size, ways // c.replica) for c in found if c.by_columns and c.model == 1}

    assert chosen(8, keeps_columns=False) == {(3, 2, 8), (3, 2, 1), (3, 4, 1)}  # of 131,072 and 262,144 tokens
    assert chosen(512, keeps_columns=False) == {(3, 2, 8)}
    # The head's columns divide by 64, and not by 512.
    assert {found[2] for found in chosen(512, keeps_columns=True)} == {8, 64}
    assert not any(c.by_columns for c in plans._choices(config, 8, 32, {**sizes, "model": (2,)}, keeps_columns=True))
    candidate = next(c for c in plans._choices(config, 512, 2048, sizes, keeps_columns=False) if not c.by_columns)
    assert "--config.model.by_columns=" in shlex.split(plans._flags(config, candidate))


def test_the_best_outcome_has_its_flags_and_no_other(roomy):
    assert [bool(outcome.flags) for outcome in roomy] == [not outcome.reason for outcome in roomy]


def test_over_several_hosts_state_is_sharded_over_all_devices_or_those_of_each_host(config):
    grid = {
        **search.default_grid(compile_only.gpus(topology="2x8")),
        "stage": (3,),
        "remat": ("full",),
        "offload": ("none",),
    }
    found = plans.search_config(config, "h200", "2x8", grid={**grid, "micro_batch_size": (1,)}, most_compiles=0)
    assert [(o.candidate.replica, o.candidate.grad_accum) for o in found] == [(2, 1), (1, 1)]


def test_one_device_tries_no_stage_whose_step_is_that_of_another(config, monkeypatch):
    def tried(candidates, *_, **__):
        return [search.Outcome(candidate, None, None, "not compiled") for candidate in candidates]

    monkeypatch.setattr(search, "search", tried)
    assert {own.candidate.stage for own in plans.search_config(config, "cpu", "1x1", memory=1e12)} == {2, 3}
    assert {own.candidate.stage for own in plans.search_config(config, "cpu", "1x2", memory=1e12)} == {0, 1, 2, 3}


def test_arithmetic_tries_no_context_where_recurrent_layers_hand_states_on():
    devices = compile_only.gpus(topology="1x8")
    tried = {name: plans._grid_of_axes(runs.config(model__preset=name), devices) for name in ("test", "mamba2_test")}
    assert [*tried["test"]["context"]] == [1, 2, 4, 8] and [*tried["mamba2_test"]["context"]] == [1]
    assert tried["mamba2_test"]["model"] == tried["test"]["model"]


def test_a_target_of_unknown_memory_is_refused(config):
    with pytest.raises(zerojax.UserError, match="memory is unknown"):
        plans.search_config(config, "cpu", "1x8")


def test_a_grid_that_cannot_keep_the_batch_is_refused(config):
    with pytest.raises(zerojax.UserError, match="keeps the global batch"):
        plans.search_config(config, "cpu", "1x8", grid={**GRID, "micro_batch_size": (3,)}, memory=1e12)


def test_the_table_has_a_row_for_each(roomy):
    assert search.table(roomy).row_count == len(roomy) == len(search.as_json(roomy))


def test_a_long_text_is_also_tried_in_tiles_and_with_the_inputs_of_layers_on_the_host(config):
    def tried(**model):
        own = dataclasses.replace(config, seq_len=65536, model=dataclasses.replace(config.model, **model))
        return plans._of_long(own)

    assert plans._of_long(config) == {}
    assert tried(preset="tiny") == search.LONG
    assert tried(preset="tiny", tile_tokens=4096)["tile_tokens"] == (4096,)
    assert tried(preset="t5_test") == tried(preset="tiny", offload="layer_0/mlp") == {}
    candidate = search.Candidate(3, "full", 1, 1, 1, tile_tokens=8192, inputs="host")
    applied = plans._applied(config, candidate).model
    assert (applied.remat, applied.offload, applied.tile_tokens) == ("full", r"layer_\d+", 8192)


def test_a_deep_model_over_slow_links_is_judged_by_arithmetic_before_anything_is_compiled(monkeypatch):
    seen = {}

    def by_arithmetic(candidates, guess, build, **how):
        seen.update(candidates=candidates, guesses={candidate: guess(candidate) for candidate in candidates})
        return [search.Outcome(candidates[0], 1, 1.0, "")]

    monkeypatch.setattr(search, "by_arithmetic", by_arithmetic)
    compile_only.gpus()
    deep = runs.config(
        global_batch_size=64, model__vocab_size=320, model__num_layers=12, precision="bf16", reduce_dtype="fp32"
    )
    times = {}
    for gbps in (400.0, 1.0):
        plans.search_config(deep, "h200", "4x8", cluster=scale.Network(adapter_gbps=gbps))
        own = {(c.pipe, c.replica, c.model, c.context) for c in seen["candidates"]}
        assert {(1, 1, 1, 1), (4, 1, 1, 1), (1, 4, 1, 1), (2, 2, 8, 1), (1, 1, 1, 8)} <= own
        assert not [c for c in seen["candidates"] if c.pipe > c.grad_accum]
        times[gbps] = {c: found.seconds for c, found in seen["guesses"].items() if c.stage == 3 and c.remat == "full"}
    slowed = {c: times[1.0][c] / times[400.0][c] for c in times[1.0] if c.context == c.model == c.chunks == 1}
    assert all(ratio >= 1 for ratio in slowed.values())
    plain = [ratio for c, ratio in slowed.items() if c.pipe == c.replica == 1]
    assert min(plain) > min(ratio for c, ratio in slowed.items() if c.pipe > 1 or c.replica > 1)


@pytest.mark.parametrize("offload", [{}, {"offload__optimizer": "host"}])
def test_arithmetic_judges_offload_too_and_more_of_it_only_where_nothing_fits_with_less(monkeypatch, offload):
    tiers = []

    def by_arithmetic(candidates, guess, build, **how):
        tiers.append(({(c.offload, c.params) for c in candidates}, min(guess(c).peak for c in candidates)))
        return []

    monkeypatch.setattr(search, "by_arithmetic", by_arithmetic)
    monkeypatch.setattr(search, "search", lambda *args, **how: [])
    compile_only.gpus()
    deep = runs.config(
        global_batch_size=8,
        model__vocab_size=320,
        model__num_layers=12,
        precision="bf16",
        reduce_dtype="fp32",
        zero__stage=2,
        **offload,
    )
    plans.search_config(deep, "h200", "1x1")
    kinds = [("none", "none"), ("host", "none"), ("host", "host")][len(offload) :]
    assert [found for found, _ in tiers] == [{kind} for kind in kinds]
    assert [peak for _, peak in tiers] == sorted((peak for _, peak in tiers), reverse=True)


@pytest.mark.long
def test_each_axis_alone_has_its_fastest_settings():
    compile_only.gpus()
    deep = runs.config(
        global_batch_size=64, model__vocab_size=320, model__num_layers=12, precision="bf16", reduce_dtype="fp32"
    )
    ways = plans.axes_config(deep, "h200", "2x8", scale.Network(adapter_gbps=100.0))
    texts = [way.text for way in ways]
    assert len({*texts}) == len(texts)
    for axis, sizes in {"pipe": (2,), "context": (2, 4, 8), "model": (2, 4, 8)}.items():
        assert [n for n in (2, 4, 8, 16) if any(f", {axis} {n}" in text for text in texts)] == [*sizes]
    with pytest.raises(zerojax.UserError, match="--axes: needs a decoder"):
        plans.axes_config(deep, "cpu", "1x8")


def test_arithmetic_does_not_judge_tokens_that_travel_to_their_experts():
    compile_only.gpus()
    with pytest.raises(zerojax.UserError, match=r"--axes: needs .* mesh\.expert=1"):
        plans.axes_config(runs.config(model__num_layers=12, mesh__expert=2), "h200", "1x8")


def test_axes_of_which_none_fits_are_an_error(monkeypatch):
    compile_only.gpus()
    monkeypatch.setattr(plans, "_work", lambda *_: object())
    monkeypatch.setattr(plans.arithmetic, "guess", lambda *_: plans.arithmetic.Guess(1.0, float("inf"), {}))
    with pytest.raises(
        zerojax.UserError, match="--axes: no axis alone fits the model and 64 examples into the memory of 8 devices"
    ):
        plans.axes_config(runs.config(global_batch_size=64), "h200", "1x8")


@pytest.mark.long
def test_a_plan_knows_what_packed_wires_should_send():
    compile_only.gpus()
    packed = {"wire__weights": "int8", "wire__gradients": "int4", "wire__second_copy": True}
    for wires in ({}, packed):
        plan = plans.plan_config(
            runs.config(zero__stage=3, model__num_layers=2, precision="bf16", reduce_dtype="fp32", **wires),
            "h200",
            "2x4",
        )
        sent = {row.dtype for row in plan.ledger.rows if row.role in roles.SENT_OF_WEIGHTS}
        assert ("s8" in sent) == bool(wires) and plan.departures == ()
