"""Checks what DeepSpeed configs become. This module tests zerojax.migration.translate."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from zerojax.errors import UserError
from zerojax.migration import draft, keys, translate

ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "fp16": {"enabled": True},
    "optimizer": ADAM,
    "scheduler": {"type": "WarmupLR", "params": {}},
}


def settings(content, **how):
    return translate.translate(content, **how).settings


def verdict(content, name, **how):
    return next(line for line in translate.translate(content, **how).lines if line.key == name)


def put(content, path, value):
    """Returns a copy of nested dicts with a value at a dotted path."""
    copy = json.loads(json.dumps(content))
    *groups, last = path.split(".")
    node = copy
    for group in groups:
        node = node.setdefault(group, {})
    node[last] = value
    return copy


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    "given, expected, devices",
    [
        ((32, 2, 4), (32, 2, 0), 4),
        ((32, 2, None), (32, 2, 0), None),
        ((32, None, 4), (32, 0, 4), None),
        ((32, None, None), (32, 0, 1), None),  # DeepSpeed takes one pass
        ((None, 2, 4), (0, 2, 4), None),
        ((None, 2, None), (0, 2, 1), None),
        ((None, "auto", 4), (0, 1, 4), None),
        (("auto", "auto", "auto"), (0, 1, 1), None),
    ],
)
def test_two_batch_sizes_decide_the_third(given, expected, devices):
    found = translate.translate({name: size for name, size in zip(SIZES, given) if size is not None})
    assert (
        tuple(found.settings.get(name) for name in ("global_batch_size", "micro_batch_size", "grad_accum")) == expected
    )
    assert found.devices == devices


def test_batch_sizes_that_contradict_each_other_are_named():
    line = verdict(dict(zip(SIZES, (30, 4, 2))), SIZES[1])
    assert line.verdict == keys.UNSUPPORTED and "30 is not a multiple of" in line.text


def test_legacy_forms_are_read_as_todays():
    assert settings({"zero_optimization": True})["zero.stage"] == 1
    assert settings({"zero_optimization": False})["zero.stage"] == 0
    assert settings({"bfloat16": {"enabled": True}})["precision"] == "bf16"
    threshold = verdict(
        put(BASE, "zero_optimization", {"stage": 2, "param_persistence_threshold": 1e4}),
        "zero_optimization.param_persistence_threshold",
    )
    assert threshold.verdict == keys.NO_EFFECT and threshold.text.startswith("DeepSpeed reads it at stage 3 alone")
    old = {"zero_optimization": {"stage": 3, "cpu_offload": True, "param_persistence_threshold": 1e4}}
    assert "zero_optimization.offload_optimizer.device" in verdict(old, "zero_optimization.cpu_offload").text
    assert settings(old)["zero.min_size"] == 10_000
    assert (
        verdict({"zero_optimization": {"cpu_offload": False}}, "zero_optimization.cpu_offload").verdict
        == keys.NO_EFFECT
    )


@pytest.mark.parametrize("part, group", [("optimizer", "offload_optimizer"), ("params", "offload_param")])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offload_is_taken(part, group, device):
    chosen = {"device": device, "pin_memory": True}
    content = {"zero_optimization": {"stage": 3, "offload_optimizer": dict(chosen), group: chosen}}
    found, name = settings(content), f"zero_optimization.{group}.device"
    kind = translate.DEVICES[device]
    assert verdict(content, name).verdict == keys.TAKEN and found[f"offload.{part}"] == kind
    content["zero_optimization"]["stage"] = 0
    assert f"offload.{part}" not in settings(content) and verdict(content, name).verdict == keys.NO_EFFECT
    with pytest.raises(UserError, match=rf"{name}: must be one of none, cpu, nvme, and is 'disk'"):
        translate.translate(put(content, name, "disk"))


@pytest.mark.parametrize(
    ("optimizer", "expected"), [(None, (None, None)), ("cpu", ("host", "host")), ("nvme", ("nvme", "host"))]
)
@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_params_are_offloaded_with_their_optimizer_state_and_bring_none_along(optimizer, expected, params):
    content = {"zero_optimization": {"stage": 3, "offload_param": {"device": params}}}
    if optimizer:
        content["zero_optimization"]["offload_optimizer"] = {"device": optimizer, "nvme_path": "/disk"}
    found = settings(content)
    expected = expected[0], expected[1] and translate.DEVICES[params]
    assert (found.get("offload.optimizer"), found.get("offload.params")) == expected
    assert found.get("offload.nvme_path") == ("/disk" if optimizer == "nvme" else None)
    told = verdict(content, "zero_optimization.offload_param.device").verdict
    assert told == (keys.TAKEN if optimizer else keys.UNSUPPORTED)


@pytest.mark.parametrize(
    "extra, params, lost",
    [
        ({}, "host", ["zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"]),
        ({"pipeline": {"stages": 2}}, None, ["offload_param.device", "zero_quantized_weights"]),
    ],
)
def test_what_no_run_has_beside_another_is_told_and_left_out(extra, params, lost):
    cpu = {"device": "cpu"}
    zero = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 4}
    file = {**BASE, **extra, "zero_optimization": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu, **zero}}
    found = settings(file)
    assert found.get("offload.params") == params and not any(place.startswith("wire.") for place in found)
    assert {verdict(file, f"zero_optimization.{name}").verdict for name in lost} == {keys.UNSUPPORTED}


def test_a_hosts_copy_is_told_to_need_several_hosts_where_the_number_of_devices_is_not_known():
    content = {**BASE, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}
    told = verdict(content, "zero_optimization.zero_hpz_partition_size").text
    assert "one host of 4 refuses both" in told and settings(content)["wire.host_devices"] == 4
    assert "one host" not in str(translate.translate(content, devices=8).lines)
    assert not [place for place in translate.translate(content, devices=4).settings if place.startswith("wire.")]


@pytest.mark.parametrize("folder, told", [("/disk", keys.TAKEN), ("/other", keys.UNSUPPORTED)])
def test_one_folder_holds_what_is_on_a_disk(folder, told):
    on_disk = {"device": "nvme", "nvme_path": "/disk"}
    content = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": on_disk,
            "offload_param": {**on_disk, "nvme_path": folder},
        }
    }
    assert settings(content)["offload.nvme_path"] == "/disk"
    assert verdict(content, "zero_optimization.offload_param.nvme_path").verdict == told


def test_absent_keys_have_the_defaults_of_the_version():
    assert settings({})["optimizer.clip_norm"] == 1.0
    assert settings({}, version=(0, 18, 2))["optimizer.clip_norm"] == 0.0
    assert settings({}, version=(0, 19, 3))["optimizer.clip_norm"] == 1.0
    assert settings({})["precision"] == "fp32" and settings({})["zero.stage"] == 0
    assert {line.key for line in translate.translate({}).lines} >= {
        "gradient_clipping",
        "optimizer.type",
        "zero_optimization.stage",
    }


@pytest.mark.parametrize(
    "blocks, expected",
    [
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "fp32"),
        ({"fp16": {"enabled": "auto"}}, "fp32"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_sr"),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, "fp16"),
        ({"torch_autocast": {"enabled": True}}, "fp16"),
        ({"torch_autocast": {"enabled": True, "dtype": "float32"}}, "fp32"),
        ({"amp": {"enabled": True}}, "fp16"),
        ({}, "fp32"),
    ],
)
def test_the_blocks_of_precision_choose_a_row_of_ours(blocks, expected):
    assert settings(blocks)["precision"] == expected


def test_the_loss_scale_is_deepspeeds():
    block = {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 8,
        "loss_scale_window": 5,
        "hysteresis": 3,
        "min_loss_scale": 2,
    }
    found = settings({"fp16": block})
    scale = {
        place.removeprefix("loss_scale."): value for place, value in found.items() if place.startswith("loss_scale.")
    }
    assert scale == {"static": 0.0, "init_scale": 256.0, "window": 5, "hysteresis": 3, "min_scale": 2.0}
    constant = settings({"fp16": {**block, "loss_scale": 128}})
    assert constant["loss_scale.static"] == 128.0 and "loss_scale.window" not in constant
    with pytest.raises(UserError, match=r"initial_scale_power: must be from 0 to 127, and is 1000000000"):
        settings({"fp16": {**block, "initial_scale_power": 1e9}})
    off = translate.translate({"fp16": {**block, "enabled": False}})
    assert not [place for place in off.settings if place.startswith("loss_scale")]


@pytest.mark.parametrize(
    "kind, params, name, decay",
    [
        ("Adam", {"weight_decay": 0.1}, "adamw", 0.1),
        ("Adam", {"weight_decay": 0.0, "adam_w_mode": False}, "adam", 0.0),
        ("AdamW", {"adam_w_mode": False, "weight_decay": 0.1}, "adamw", 0.1),
        ("AdamW", {"torch_adam": True}, "adamw", 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, "adam", 0.0),
        ("Lion", {"weight_decay": 0.1}, "lion", 0.1),
        ("Lamb", {}, "lamb", 0.0),
        ("SGD", {"momentum": 0.9}, "sgd", 0.0),
        ("OneBitAdam", {}, "adamw", 0.0),
        ("Muon", {}, "adamw", 0.0),
    ],
)
def test_an_optimizer_keeps_its_meaning_and_deepspeeds_defaults(kind, params, name, decay):
    found = settings({"optimizer": {"type": kind, "params": params}})
    assert (found["optimizer.name"], found["optimizer.weight_decay"], found["optimizer.learning_rate"]) == (
        name,
        decay,
        1e-3,
    )
    if name != "sgd":
        assert (found["optimizer.b1"], found["optimizer.b2"]) == (0.9, 0.999)
    if decay:
        assert found["optimizer.weight_decay_on"] == "all"
    line = verdict({"optimizer": {"type": kind, "params": params}}, "optimizer.type")
    assert ("config.optimizer.name=muon" in line.text) == (kind == "Muon")
    assert line.verdict == (keys.UNSUPPORTED if kind in ("OneBitAdam", "Muon") else keys.TAKEN)


def test_the_adamw_that_is_taken_for_muon_has_its_rate_of_adam():
    file = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-4}}}
    assert settings(file)["optimizer.learning_rate"] == 3e-4
    assert verdict(file, "optimizer.params.lr").verdict == keys.UNSUPPORTED
    file["optimizer"]["type"] = "AdamW"
    assert settings(file)["optimizer.learning_rate"] == 0.02
    assert verdict(file, "optimizer.params.adam_lr").verdict == keys.UNSUPPORTED


def test_the_limits_of_lambs_trust_ratio_are_named_where_they_are_deepspeeds_default():
    assert verdict({"optimizer": {"type": "Lamb"}}, "optimizer.params.max_coeff").verdict == keys.UNSUPPORTED


def test_a_penalty_that_no_optimizer_here_has_is_not_dropped_without_a_word():
    line = verdict(
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
        "optimizer.params.weight_decay",
    )
    assert line.verdict == keys.UNSUPPORTED and "L2" in line.text


def test_a_schedules_rates_are_fractions_of_its_peak():
    params = {
        "warmup_min_lr": 1e-5,
        "warmup_max_lr": 1e-3,
        "warmup_num_steps": 50,
        "total_num_steps": 400,
        "warmup_type": "linear",
    }
    found = settings({"optimizer": ADAM, "scheduler": {"type": "WarmupDecayLR", "params": params}})
    expected = {"schedule": "WarmupDecayLR", "learning_rate": 1e-3, "warmup_steps": 50, "warmup": "linear"}
    assert {name: found[f"optimizer.{name}"] for name in expected} == expected
    assert found["optimizer.initial_fraction"] == pytest.approx(0.01) and found["steps"] == 400
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_min_ratio": 0.1}}
    found = settings({"optimizer": ADAM, "scheduler": cosine})
    assert (found["optimizer.initial_fraction"], found["optimizer.final_fraction"]) == (0.1, 1e-4)


def test_a_peak_that_the_file_lacks_is_told_as_deepspeeds_default():
    content = {"optimizer": ADAM, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 400}}}
    assert translate.translate(content).sources["optimizer.learning_rate"] == ("scheduler.type",)
    assert "DeepSpeed's default of scheduler.params.warmup_max_lr" in verdict(content, "optimizer.params.lr").text


AUTO = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
}


def test_what_a_file_leaves_to_the_script_is_assumed_or_given():
    places = "optimizer.learning_rate optimizer.b1 optimizer.warmup_steps micro_batch_size precision zero.min_size"
    assert set(places.split()) <= set(translate.translate(AUTO).assumed)
    filled = settings(AUTO, auto={"optimizer.params.lr": 2e-5, "scheduler.params.warmup_num_steps": 0.1})
    assert (filled["optimizer.learning_rate"], filled["optimizer.warmup_steps"]) == (2e-5, 0.1)


def test_an_optimizer_that_the_script_makes_is_assumed_with_its_schedule():
    found = translate.translate({"gradient_clipping": 0.5})
    told = {line.key: line for line in found.lines}
    for name, place in (("optimizer.type", "optimizer.name"), ("scheduler.type", "optimizer.schedule")):
        assert told[name].verdict == keys.ASSUMED and f"config.{place} = " in told[name].text
    assert "config.optimizer.learning_rate = 5e-05" in told["optimizer.type"].text
    assert "optimizer.name" not in found.decided and found.decided["optimizer.clip_norm"] == 0.5


@pytest.mark.parametrize("number", [float("nan"), "nan", "NaN"])
@pytest.mark.parametrize(
    "name", ["gradient_clipping", "optimizer.params.lr", "optimizer.params.betas", "steps_per_print"]
)
def test_what_is_no_number_is_refused(name, number):
    with pytest.raises(UserError, match=name):
        translate.translate(put(BASE, name, [0.9, number] if name.endswith("betas") else number))


def test_an_infinite_number_means_what_it_means_in_deepspeed():
    infinite = {"gradient_clipping": float("inf"), "steps_per_print": float("inf")}
    assert settings(infinite)["optimizer.clip_norm"] == 0.0 and "log_every" not in settings(infinite)
    with pytest.raises(UserError, match=r"optimizer\.params\.lr: must be a number, and is inf"):
        translate.translate(put(BASE, "optimizer.params.lr", float("inf")))


SWITCHED = [name for name, row in keys.KEYS.items() if row.verdict == keys.UNSUPPORTED and "*" not in name]


@pytest.mark.parametrize("name", SWITCHED)
def test_an_option_that_is_on_and_has_no_counterpart_is_never_reported_as_off(name):
    on = False if True in keys.KEYS[name].off else True  # noqa: SIM211
    content = BASE
    for other, value in BESIDE.get(name, {}).items():
        content = put(content, other, value)
    for value in (on, str(on).lower()):
        line = verdict(put(content, name, value), name)
        assert line.verdict == keys.UNSUPPORTED and line.text == keys.KEYS[name].why
    if keys.KEYS[name].off:
        assert verdict(put(BASE, name, keys.KEYS[name].off[-1]), name).verdict == keys.NO_EFFECT


@pytest.mark.parametrize("group", [group for group in keys.SWITCHES if keys.find(f"{group}.new") is not None])
def test_a_group_is_off_until_its_own_key_switches_it_on(group):
    content = put({}, f"{group}.new", 7)
    assert verdict(content, f"{group}.new").verdict == keys.NO_EFFECT
    for outer in [outer for outer in keys.SWITCHES if group.startswith(outer)]:
        content = put(content, keys.SWITCHES[outer], True)
    assert verdict(content, f"{group}.new").verdict == keys.find(f"{group}.new").verdict


# A value that makes each taken key decide a setting, where the base's neighbours do not say it.
TELLING = {
    "zero_optimization.mics_shard_size": 4,
    "data_types.grad_accum_dtype": "bf16",
    "communication_data_type": "bf16",
    "optimizer.params.betas": [0.8, 0.9],
    "optimizer.type": "Lion",
    "scheduler.type": "WarmupDecayLR",
    "scheduler.params.warmup_type": "linear",
    "torch_autocast.dtype": "float16",
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "zero_optimization.offload_optimizer.nvme_path": "/disk",
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_param.nvme_path": "/disk",
}
BESIDE = {
    "bf16.enabled": {"fp16.enabled": False},
    "bf16.bf16_master_weights_and_grads": {"fp16.enabled": False, "bf16.enabled": True},
    "bf16.bf16_optimizer_states": {"fp16.enabled": False, "bf16.enabled": True},
    "torch_autocast.enabled": {"fp16.enabled": False},
    "torch_autocast.dtype": {"fp16.enabled": False, "torch_autocast.enabled": True},
    "optimizer.params.momentum": {"optimizer.type": "SGD"},
    "optimizer.params.adam_w_mode": {"optimizer.type": "Adam"},
    "optimizer.params.adam_lr": {"optimizer.type": "Muon"},
    "optimizer.params.adamw_mode": {"optimizer.type": "Adam"},
    "scheduler.params.total_num_steps": {"scheduler.type": "WarmupDecayLR"},
    "scheduler.params.warmup_min_ratio": {"scheduler.type": "WarmupCosineLR"},
    "scheduler.params.cos_min_ratio": {"scheduler.type": "WarmupCosineLR"},
    "zero_optimization.mics_shard_size": {"train_batch_size": 16},
    "zero_optimization.offload_optimizer.ratio": {"zero_optimization.offload_optimizer.device": "cpu"},
    "zero_optimization.offload_optimizer.nvme_path": {"zero_optimization.offload_optimizer.device": "nvme"},
    "zero_optimization.offload_param.device": {"zero_optimization.offload_optimizer.device": "cpu"},
    "torch_autocast.lower_precision_safe_modules": {"torch_autocast.enabled": True},
    "zero_optimization.offload_param.nvme_path": {
        "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization.offload_param.device": "nvme",
    },
    "wandb.project": {"wandb.enabled": True},
}


@pytest.mark.parametrize("name", [name for name, row in keys.KEYS.items() if row.verdict == keys.TAKEN])
def test_a_taken_key_decides_the_settings_that_its_row_names(name):
    content = BASE
    for other, value in BESIDE.get(name, {}).items():
        content = put(content, other, value)
    content = put(
        content,
        name,
        TELLING.get(
            name,
            True
            if "enabled" in name or "mode" in name or "fp32" in name or "bf16" in name or "consecutive" in name
            else 3,
        ),
    )
    found = translate.translate(content)
    assert verdict(content, name).verdict == keys.TAKEN
    assert any(name in found.sources[place] for place in keys.KEYS[name].into if place in found.sources)


@pytest.mark.parametrize(
    "name", [name for name, row in keys.KEYS.items() if row.verdict != keys.TAKEN and "*" not in name]
)
def test_a_key_that_is_not_taken_changes_no_setting(name):
    content = BASE
    for other, value in BESIDE.get(name, {}).items():
        content = put(content, other, value)
    with_key = put(content, name, "cpu" if name.endswith("device") else 7)
    assert settings(with_key) == settings(content)
    assert verdict(with_key, name).verdict == keys.KEYS[name].verdict


@pytest.mark.parametrize("ways", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("total", [None, 3, 32])
def test_the_mesh_of_mics_has_the_devices_of_the_config_where_the_file_does_not_tell_them(ways, total):
    content = {
        "zero_optimization": {"stage": 3, "mics_shard_size": ways},
        **({"train_batch_size": total} if total else {}),
    }
    found = settings(content)
    assert (found["mesh.data"], found["mesh.replica"] * ways) == (ways, found["emulate_devices"])
    assert "config.mesh.replica" in verdict(content, "zero_optimization.mics_shard_size").text


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**40),
    st.floats(allow_nan=False),
    st.just("auto"),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
)
NAMES = st.sampled_from(
    [name for name in [*keys.KEYS, *keys.ALIASES] if "*" not in name] + ["new", "fp16", "optimizer", "a.b.c"]
)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.dictionaries(NAMES, VALUES, max_size=8))
def test_any_content_is_accounted_for_or_refused_in_one_line(flat):
    content = {}
    for path, value in flat.items():
        node = content
        *groups, last = path.split(".")
        for group in groups:
            inner = node.setdefault(group, {})
            node = inner if isinstance(inner, dict) else node.__setitem__(group, {}) or node[group]
        node[last] = value
    try:
        found = translate.translate(content)
    except UserError as error:
        assert "\n" not in str(error)
        return
    names = [line.key for line in found.lines]
    zero = content.get("zero_optimization")
    expected = [
        name for name, _ in draft.leaves(content) if not (name == "zero_optimization" and isinstance(zero, bool))
    ]
    assert all(names.count(name) >= 1 for name in expected)
    assert all(line.text and line.verdict in keys.VERDICTS for line in found.lines)


def test_wandb_becomes_an_outlet_of_the_metrics_wherever_one_translates():
    found = translate.translate({"wandb": {"enabled": True, "project": "mine"}, "comet": {"enabled": True}})
    assert found.settings["metrics.to"] == ("tensorboard", "wandb") and found.settings["metrics.project"] == "mine"
    assert [line.key for line in found.unsupported] == ["comet.enabled"]
    told = next(line for line in found.lines if line.key == "wandb.enabled")
    assert told.verdict == keys.TAKEN and "pip install 'zerojax[wandb]'" in told.text
    assert "metrics.to" not in settings({"wandb": {"enabled": False, "project": "mine"}})


@pytest.mark.parametrize("given, devices", [((8, 2, 1), 8), ((6, None, 1), 6), ((8, None, None), None)])
@pytest.mark.parametrize(
    "axis, key",
    [
        ("model", {"tensor_parallel": {"autotp_size": 2}}),
        ("context", {"sequence_parallel_size": 2}),
        ("pipe", {"pipeline_parallel_size": 2}),
        ("pipe", {"pipeline": {"stages": 2}}),
    ],
)
def test_devices_along_some_axes_have_their_examples_together(given, devices, axis, key):
    """None: the 8 of the base config."""
    content = {name: size for name, size in zip(SIZES, given) if size is not None}
    found = settings({**BASE, "train_micro_batch_size_per_gpu": None, **content, **key})
    assert (found[f"mesh.{axis}"], found.get("emulate_devices")) == (2, devices)
