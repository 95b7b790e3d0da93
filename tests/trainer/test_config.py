"""Checks that no invalid setting is accepted. This module tests zerojax.trainer.config."""

import dataclasses
import importlib
import json
import pathlib
import re
import sys
import typing

import hypothesis
import hypothesis.strategies as st
import pytest
import runs

from zerojax.errors import UserError
from zerojax.optim import registry
from zerojax.trainer import config as config_lib
from zerojax.trainer import settings as settings_lib
from zerojax.zero.update import loss_scale

ROOT = pathlib.Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def load(name: str):
    """Imports configs/NAME.py as the command line does."""
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module(f"configs.{name}").get_config()
    finally:
        sys.path.remove(str(ROOT))


def changed(changes) -> dict:
    """Returns the base config as nested dicts, {"zero.stage": 2} style changes applied."""
    raw = load("base").to_dict()
    for place, value in changes.items():
        *groups, name = place.split(".") if isinstance(place, str) else [place]
        group = raw
        for part in groups:
            group = group[part]
        group[name] = value
    return raw


@pytest.mark.parametrize("name", NAMES)
def test_every_config_file_is_valid_and_names_its_command(name):
    config = config_lib.from_dict(load(name))
    ways = 8 if config.mesh.data == -1 else config.mesh.data * config.mesh.replica
    sizes = config_lib.batch_sizes(config, ways)
    assert sizes.global_batch_size == sizes.micro_batch_size * sizes.grad_accum * ways
    assert f"configs/{name}.py" in sys.modules[f"configs.{name}"].__doc__


def test_no_group_of_settings_has_the_name_of_another_class():
    groups = [hint for hint in typing.get_type_hints(settings_lib.Config).values() if dataclasses.is_dataclass(hint)]
    assert groups and all(group.__name__.endswith("Settings") for group in groups)


def test_one_setting_for_long_texts_stands_for_three_and_values_of_ones_own_replace_them():
    def of(**model):
        read = config_lib.from_dict(changed({f"model.{name}": value for name, value in model.items()}))
        return dataclasses.replace(read.model, long_texts=False)

    three = {"tile_tokens": 8192, "remat": "attention", "offload": r"layer_\d+"}
    assert of(long_texts=True) == of(**three) != of()
    for own in ({"tile_tokens": 4096}, {"remat": "full"}, {"offload": r"layer_[02]"}):
        assert of(long_texts=True, **own) == of(**{**three, **own})
    once = config_lib.from_dict(load("llama3_8b_262k_h200"))
    assert config_lib.from_dict(dataclasses.asdict(once)).model == once.model  # as a resumed run reads it


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch_size": 0, "micro_batch_size": 2**20, "grad_accum": 2**20},
        {"global_batch_size": 2**20, "micro_batch_size": 0, "grad_accum": 1, "seq_len": 2**22},
    ],
    ids=["rows", "tokens"],
)
def test_a_batch_that_nothing_could_hold_is_refused(changes):
    with pytest.raises(
        UserError, match=r"^config\.global_batch_size: \d+ sequences .* more than a batch may have, \d+; lower"
    ):
        config_lib.batch_sizes(config_lib.from_dict(changed(changes)), 8)


def test_a_field_is_described_in_words():
    assert [settings_lib.expected(place) for place in ("steps", "zero.stage", "zero.stage.x", "nothing", "optimizer.b1")] == [
        "a whole number", "a whole number", "", "", "a number",
    ]  # fmt: skip
    assert settings_lib.expected("mesh") == "a group of settings (pipe, replica, data, context, model, expert)"


@pytest.mark.parametrize("name", registry.OPTIMIZERS)
def test_a_weight_decay_that_nobody_set_is_one_that_the_optimizer_has(name):
    found = config_lib.from_dict(changed({"optimizer.name": name})).optimizer
    registry.make_optimizer(name, 1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=found.weight_decay)  # is not refused
    assert found.weight_decay == (0.1 if "weight_decay" in registry.READS[name] else 0.0)
    own = config_lib.from_dict(changed({"optimizer.name": name, "optimizer.weight_decay": 0.3}))
    assert own.optimizer.weight_decay == 0.3


def test_settings_survive_json():
    config = config_lib.from_dict(load("zero3"))
    assert config_lib.from_dict(json.loads(json.dumps(config_lib.to_dict(config)))) == config


BAD = {
    "unknown key, near": ({"zero.stages": 1}, r"^config\.zero\.stages: unknown config key; did you mean 'stage'\?$"),
    "unknown key, far": (
        {"zzz": 1},
        r"^config\.zzz: unknown config key; known: seed, deterministic, init_from, steps, ",
    ),
    "a string for a number": ({"steps": "ten"}, r"^config\.steps: must be a whole number, and is 'ten'$"),
    "a bool for a number": ({"steps": True}, r"^config\.steps: must be a whole number, and is True$"),
    "a float for an int": ({"seq_len": 12.5}, r"^config\.seq_len: must be a whole number, and is 12\.5$"),
    "a number for a group": ({"zero": 3}, r"^config\.zero: must be a group of settings \(stage, .*\), and is 3$"),
    "a string for a list": (
        {"zero.overrides": "x"},
        r"^config\.zero\.overrides: must be texts with commas, or a tuple or list of Python, and is 'x'$",
    ),
    "not a number": ({"optimizer.learning_rate": float("nan")}, r"^config\.optimizer\.learning_rate: must be "),
    "stage 4": ({"zero.stage": 4}, r"^config\.zero\.stage: must be one of 0, 1, 2, 3, and is 4; set --config\.zero"),
    "precision": (
        {"precision": "fp4"},
        r"^config\.precision: must be one of fp32, bf16, fp16, fp8, bf16_sr, and is 'fp4'",
    ),
    "fp8 recipe": (
        {"fp8.recipe": "rows"},
        r"^config\.fp8\.recipe: must be one of tensorwise, delayed, rowwise, and is 'rows'",
    ),
    "fp8 filter": ({"precision": "fp8", "fp8.filter": "("}, r"^config\.fp8\.filter: '\(' is not a regex"),
    "remat": (
        {"model.remat": "all"},
        r"^config\.model\.remat: must be one of none, dots, attention, full, and is 'all'",
    ),
    "zero steps": (
        {"steps": 0},
        r"^config\.steps: must be above 0, and is 0; omit it, or set --config\.steps=\d+, its default$",
    ),
    "negative": (
        {"optimizer.clip_norm": -1.0},
        r"^config\.optimizer\.clip_norm: must not be negative, and is -1\.0; omit it",
    ),
    "data axis 0": (
        {"mesh.data": 0},
        r"^config\.mesh\.data: must be above 0, or -1 for all devices left, and is 0; omit it, or set --config\.mesh\.data=-1",
    ),
    "override": ({"zero.overrides": ("kernel",)}, r"^config\.zero\.overrides: must be .* one of them is 'kernel'$"),
    "offload at stage 0": (
        {"offload.optimizer": "host", "zero.stage": 0},
        r"^config\.offload\.optimizer: is 'host', which works at stage 1, 2, 3, and the stage is 0; set the stage to 1",
    ),
    "offload kind": ({"offload.optimizer": "disk"}, r"^config\.offload\.optimizer: must be one of none, host, nvme"),
    "params at stage 2": (
        {"offload.params": "host", "zero.stage": 2},
        r"^config\.offload\.params: is 'host', which works at stage 3, and the stage is 2",
    ),
    "offloaded params alone": (
        {"offload.params": "host", "offload.params_fraction": 2.0},
        r"^config\.offload\.params_fraction: .* at most 1",
    ),
    "offload unread": ({"offload.fraction": 0.5}, r"^config\.offload\.fraction: is 0\.5 and cannot take effect"),
    "offload in flight": (
        {"offload.optimizer": "host", "offload.in_flight": 1},
        r"^config\.offload\.in_flight: must be a whole number of at least 2, or 0 to derive it, and is 1",
    ),
    "a number that no float holds": (
        {"optimizer.eps": 10**400},
        r"^config\.optimizer\.eps: is too large for a float, and is 10000",
    ),
    "a number that Python does not print": (
        {"steps": 10**5000},
        r"^config\.steps: must be below 2\*\*31, and is int of 16610 bits;",
    ),
    "a key that is no text": ({7: 1}, r"^config\.7: unknown config key; known: seed"),
    "no regex at all": ({"zero.overrides": ((b"x", ()),)}, r"b'x' is not a regex \(it is not text\)"),
    "override regex": ({"zero.overrides": (("(", ()),)}, r"^config\.zero\.overrides: .* '\(' is not a regex"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named_in_one_line(name):
    changes, message = BAD[name]
    with pytest.raises(UserError, match=message) as caught:
        config_lib.from_dict(changed(changes))
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named():
    raw = changed({})
    del raw["optimizer"]["b1"]
    with pytest.raises(UserError, match=r"^config\.optimizer\.b1: missing; start from zerojax\.configs\.base"):
        config_lib.from_dict(raw)


def test_whole_numbers_are_read_as_floats():
    config = config_lib.from_dict(changed({"optimizer.weight_decay": 0}))
    assert isinstance(config.optimizer.weight_decay, float)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_lib.from_dict(changed({})).steps = 3


SIZES = st.integers(0, 12)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(st.integers(0, 96), SIZES, SIZES, st.integers(1, 8))
def test_batch_sizes_obey_the_product_rule_wherever_it_can_be_solved(total, micro, accum, ways):
    config = config_lib.from_dict(changed({"global_batch_size": total, "micro_batch_size": micro, "grad_accum": accum}))
    solutions = [
        (t, m, a)
        for m in ([micro] if micro else range(1, 97))
        for a in ([accum] if accum else range(1, 97))
        for t in [m * a * ways]
        if total in (0, t)
    ]
    is_determined = [total, micro, accum].count(0) <= 1
    if is_determined and solutions:
        found = config_lib.batch_sizes(config, ways)
        assert [(found.global_batch_size, found.micro_batch_size, found.grad_accum)] == solutions
        drawn = config_lib.from_dict(
            changed({"data.task": "grpo", "data.prompt": "{q}", "grpo.group": 3, "global_batch_size": total})
        )
        drawn = dataclasses.replace(drawn, micro_batch_size=micro, grad_accum=accum)
        if found.global_batch_size % 3:
            with pytest.raises(UserError, match=r"^config\.grpo\.group: 3 answers a prompt do not divide") as caught:
                config_lib.batch_sizes(drawn, ways)
            offered = int(str(caught.value).rpartition("=")[2])
            is_free = not (micro and accum)
            assert offered % 3 == 0 and (
                not is_free or config_lib.batch_sizes(dataclasses.replace(drawn, global_batch_size=offered), ways)
            )
        return
    with pytest.raises(UserError) as caught:
        config_lib.batch_sizes(config, ways)
    if is_determined:
        offered = int(str(caught.value).rpartition("--config.global_batch_size=")[2])
        fixed = dataclasses.replace(config, global_batch_size=offered)
        config_lib.batch_sizes(fixed, ways)  # the suggested size is valid
        if not (micro and accum):  # also for groups of answers
            drawn = dataclasses.replace(
                config,
                data=dataclasses.replace(config.data, task="grpo"),
                grpo=dataclasses.replace(config.grpo, group=3),
            )
            with pytest.raises(UserError, match="does not fit") as caught:
                config_lib.batch_sizes(drawn, ways)
            offered = int(str(caught.value).rpartition("--config.global_batch_size=")[2])
            config_lib.batch_sizes(dataclasses.replace(drawn, global_batch_size=offered), ways)
        kept = re.findall(r"--config\.(micro_batch_size|grad_accum)=(\d+)", str(caught.value))
        assert bool(kept) == (micro > 0 and total % ways == 0)
        kept_sizes = config_lib.batch_sizes(
            dataclasses.replace(config, **{name: int(value) for name, value in kept}) if kept else fixed, ways
        )
        assert not kept or (kept_sizes.global_batch_size == total and kept_sizes.micro_batch_size <= micro)


@hypothesis.given(
    micro=st.integers(1, 6),
    accum=st.integers(1, 4),
    hosts=st.integers(2, 6),
    per_host=st.sampled_from([1, 2, 4]),
    replica=st.sampled_from([1, 0]),
    left=st.integers(1, 6),
)
def test_fewer_devices_keep_the_global_batch_and_take_no_more_sequences_at_once(
    micro, accum, hosts, per_host, replica, left
):
    full, now = hosts * per_host, min(left, hosts) * per_host
    copies = replica or hosts  # one copy, or one a host
    config = runs.config(
        global_batch_size=micro * accum * full, grad_accum=accum, mesh__replica=copies, mesh__data=full // copies
    )
    if config.global_batch_size % now:
        with pytest.raises(UserError, match=f"{config.global_batch_size} cannot be kept on {now} of {full} devices"):
            config_lib.refit(config, now, full)
        return
    found = config_lib.refit(config, now, full)
    sizes = config_lib.batch_sizes(found, found.mesh.data * found.mesh.replica)
    assert found.mesh.data * found.mesh.replica * found.mesh.model == now
    assert sizes.global_batch_size == config.global_batch_size and sizes.micro_batch_size <= micro
    assert replica or found.mesh.data == per_host  # a copy a host stays one
    assert config_lib.refit(config, full, full) == config


@pytest.mark.parametrize("axis", ["context", "model"])
def test_a_refit_keeps_axes_along_which_examples_are_the_same_and_derives_data(axis):
    config = runs.config(global_batch_size=8, **{f"mesh__{axis}": 2})
    found = config_lib.refit(config, 4, 8)
    assert (found.mesh.replica, found.mesh.data, getattr(found.mesh, axis)) == (1, 2, 2)
    assert (found.micro_batch_size, found.grad_accum) == (2, 2)
    with pytest.raises(UserError, match=rf"mesh\.{axis}=2"):
        config_lib.refit(config, 3, 8)


@pytest.mark.parametrize(
    "now, full, sizes, pipe, found",
    [
        (4, 8, (2, 1), 4, (4, 1, 1)),  # its groups share the devices of the hosts that are left
        (3, 4, (1, 1), 4, (3, 1, 1)),  # groups of one device: there are fewer
        (6, 8, (1, 2), 4, (3, 1, 2)),
        (1, 2, (1, 1), 2, (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2)])
def test_a_refit_keeps_the_groups_of_a_pipeline_or_as_many_as_there_is_room_for(
    now, full, sizes, pipe, found, schedule, chunks
):
    data, model = sizes
    config = runs.config(
        global_batch_size=24,
        grad_accum=12 // data,
        mesh__pipe=pipe,
        mesh__data=data,
        mesh__model=model,
        pipeline__schedule=schedule,
        pipeline__chunks=chunks,
    )
    fitted = config_lib.refit(config, now, full)
    assert (fitted.mesh.pipe, fitted.mesh.data, fitted.mesh.model) == found
    assert fitted.global_batch_size == 24 == fitted.micro_batch_size * fitted.grad_accum * fitted.mesh.data
    assert fitted.micro_batch_size <= 2 and (chunks == 1 or fitted.grad_accum % fitted.mesh.pipe == 0)
    assert fitted.pipeline == (config.pipeline if fitted.mesh.pipe > 1 else type(config.pipeline)())


@pytest.mark.parametrize("value", [1.0, -0.1, 2.0])
def test_averages_forget_at_a_rate_below_one(value):
    raw = importlib.import_module("configs.base").get_config()
    raw.optimizer.b2 = value
    with pytest.raises(UserError, match=r"config.optimizer.b2: must be at least 0 and below 1"):
        config_lib.from_dict(raw)


@dataclasses.dataclass(frozen=True)
class Inner:
    flag: bool
    rate: float


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    count: int
    axes: tuple
    inner: Inner


FITTING = {"name": "x", "count": 3, "axes": [1, 2], "inner": {"flag": True, "rate": 1}}


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "modules_to_save"])
@pytest.mark.parametrize("text, names", [("q_proj, v_proj", ("q_proj", "v_proj")), ("lm_head", ("lm_head",))])
def test_modules_are_named_between_commas(field, text, names):
    group = runs.config(lora__r=4).lora
    assert getattr(config_lib.make_lora(dataclasses.replace(group, **{field: text})), field) == names


def test_a_nested_mapping_becomes_a_nested_dataclass():
    found = config_lib.read(Outer, FITTING, "config")
    assert found == Outer("x", 3, (1, 2), Inner(True, 1.0)) and isinstance(found.inner.rate, float)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.just({})
)
FITS = {
    "name": lambda value: isinstance(value, str),
    "count": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "axes": lambda value: isinstance(value, list),
}


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from(sorted(FITS)), ANYTHING)
def test_a_value_is_read_exactly_where_it_has_the_fields_type(field, value):
    if FITS[field](value):
        assert getattr(config_lib.read(Outer, {**FITTING, field: value}, "config"), field) == (
            tuple(value) if field == "axes" else value
        )
    else:
        with pytest.raises(
            UserError,
            match=rf"^config\.{field}: must be (text|a whole number|texts with commas, or a tuple or list of Python), and is ",
        ):
            config_lib.read(Outer, {**FITTING, field: value}, "config")


MISFITS = {
    "near": ({"nane": 1}, r"^c\.nane: unknown config key; did you mean 'name'\?$"),
    "far": ({"zzz": 1}, r"^c\.zzz: unknown config key; known: name, count, axes, inner$"),
    "group": ({"inner": 3}, r"^c\.inner: must be a group of settings \(flag, rate\), and is 3$"),
    "inner": ({"inner": {"flag": True, "rate": float("nan")}}, r"^c\.inner\.rate: must be a number, and is nan$"),
    "missing": ({"inner": {"flag": True}}, r"^c\.inner\.rate: missing; start from zerojax\.configs\.base"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_is_named_by_its_place(name):
    changes, message = MISFITS[name]
    with pytest.raises(UserError, match=message):
        config_lib.read(Outer, {**FITTING, **changes}, "c")


def test_the_defaults_of_the_loss_scale_are_those_of_the_class():
    group = runs.config().loss_scale
    assert config_lib.make_loss_scale(group, is_scaled=True) == loss_scale.DynamicLossScale()
    assert config_lib.make_loss_scale(group, is_scaled=False) is None


def test_the_tokenizer_of_an_imported_model_is_that_of_its_folder(tmp_path):
    named = {"init_from": str(tmp_path), "data__name": "short_reviews", "data__task": "seq2seq"}
    assert runs.config().data.tokenizer == "bytes"
    with pytest.raises(UserError, match=r"has no tokenizer.json; add the model's own, or set it to .bytes."):
        runs.config(**named)
    assert runs.config(**named, data__tokenizer="bytes").data.tokenizer == "bytes"
    for other in ("tekken.json", "spiece.model"):
        (tmp_path / other).touch()
        with pytest.raises(UserError, match=rf"has {other} and no tokenizer.json"):
            runs.config(**named, data__tokenizer="bytes")
    (tmp_path / "tokenizer.json").touch()
    assert runs.config(**named).data.tokenizer == str(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"the model of config.init_from has a tokenizer of its own"):
        runs.config(**named, data__tokenizer="bytes")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"epochs": 2.0}, "config.epochs: is 2.0, and windows of text have no epochs"),
        ({"evaluate__batches": 0}, "config.evaluate.batches: must be above 0, since windows of text"),
        ({"data__task": "chat"}, "config.data.name: is .random., and the task chat needs examples"),
        ({"data__eval_file": "a.jsonl"}, "config.data.eval_file: is .a.jsonl., and config.data.train_file is empty"),
        ({"data__labels": (1,)}, "config.data.labels: must be texts"),
        ({"data__labels": ("a", "a")}, "config.data.labels: must be texts, another for each number"),
        ({"data__task": "chatt"}, "config.data.task: must be one of text, seq2seq"),
    ],
)
def test_settings_of_a_task_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        runs.config(**changes)
