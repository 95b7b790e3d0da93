"""Checks that errors of the library name config keys. This module tests zerojax.trainer.setting_names."""

import re
import warnings

import fuzz_configs
import jax
import pytest

from zerojax import tree
from zerojax.errors import UserError
from zerojax.trainer import plans, setting_names
from zerojax.trainer import program as program_lib


def test_every_key_is_a_field_or_a_group():
    groups = {place.partition(".")[0] for place in fuzz_configs.PLACES}
    keys = [key.removeprefix("config.") for key in setting_names.KEYS.values() if not key.startswith("--")]
    assert set(keys) <= {*fuzz_configs.PLACES, *groups}


@pytest.mark.parametrize("text", ["other: 3", "config.mesh: 3", "mesh", "meshes: 3", "params/mesh: 3"])
def test_other_errors_stay_as_they_are(text):
    with pytest.raises(UserError) as caught, setting_names.of_config():
        raise UserError(text)
    assert str(caught.value) == text


REFUSED = {
    "devices": ({"mesh.data": 16}, r"^config\.mesh: .*, or emulate 16 devices: --config\.emulate_devices=16$"),
    "mesh": ({"mesh.replica": 3}, r"^config\.mesh: replica 3 x data 2 x context 1 x model 1"),
    "a kind that nothing has": ({"optimizer.rates": "sink=2"}, r"^config\.optimizer\.rates: no trained weight is of the kind 'sink'; they"),
    "no kind": ({"optimizer.rates": "biases=2"}, r"^config\.optimizer\.rates: 'biases=2' is no kind of weights and a factor from 0 to 100"),
    "model axis": ({"mesh.model": 2, "zero.overrides": (("", ()),)}, r"^config\.mesh\.model: is 2, and no weight is sharded over `model`"),
    "axis twice": ({"zero.overrides": (("embed", ("data", "data")),)}, r"^config\.zero\.overrides: .* names 'data' twice"),
    "unknown axis": ({"zero.overrides": (("embed", ("rows",)),)}, r"^config\.zero\.overrides: .* names \['rows'\]"),
    "no module": ({"model.recompute": "zzz", "model.remat": "dots"}, r"^config\.model\.recompute: 'zzz' matches no module"),
    "no regex": ({"model.offload": "("}, r"^config\.model\.offload: '\(' is not a regex"),
    "too large a regex": ({"model.offload": "x{99999999999}"}, r"^config\.model\.offload: .* is not a regex"),
    "the most basic first": ({"mesh.model": 2, "mesh.replica": 3}, r"^config\.mesh: "),
    "a short T5": ({"model.preset": "t5_test", "seq_len": 1}, r"^config\.seq_len: must be 2 or more for span corruption"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_of_the_library_names_the_config_key(name):
    changes, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        plans.plan_program(program_lib.build(fuzz_configs.config(changes), tokenizer_vocab=320), "cpu")


@pytest.mark.parametrize("preset", ["moe_test", "t5_test", "bart_test"])
@pytest.mark.parametrize("key", ["recompute", "offload"])
def test_the_regex_that_an_error_advises_matches_modules_of_that_model(preset, key):
    changes = {"model.preset": preset, f"model.{key}": r"layer_\d+/mlp/upp", "model.remat": "dots"}
    program = program_lib.build(fuzz_configs.config(changes), tokenizer_vocab=320)
    with pytest.raises(UserError, match=r"matches no module called inside a block; .* such as") as caught:
        plans.plan_program(program, "cpu")
    advised = re.compile(re.search(r"such as '(.*)'$", str(caught.value))[1])
    assert any(tree.block_of(path, advised) for path in program.partition.placements), advised


def test_a_warning_of_the_library_is_one_line_that_names_the_config_key(capsys):
    for _ in range(2):
        with warnings.catch_warnings(), setting_names.of_config():
            warnings.simplefilter("always")
            warnings.warn("accum_dtype: has no effect, because x", stacklevel=1)
    assert capsys.readouterr().err == "zerojax: config.accum_dtype: has no effect, because x\n"
    with pytest.warns(UserWarning, match="^of another"), setting_names.of_config():
        warnings.warn("of another library", stacklevel=1)


def test_packed_wires_that_send_nothing_are_told_of(capsys):
    setting_names.tell.cache_clear()
    alone = {"mesh.data": 1, "mesh.model": 2, "wire.weights": "int8"}
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        program_lib.build(fuzz_configs.config(alone), tokenizer_vocab=320, devices=jax.devices()[:2])
    assert (
        "zerojax: config.wire: has no effect, because the mesh has data=1 and nothing is sent"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "line, told",
    [
        ("a.jsonl:3: which `text_key` names", "a.jsonl:3: which config.data.text_key names"),
        (
            "attention: set `attention=xla`, or fewer `steps`",
            "config.model.attention: set --config.model.attention=xla, or fewer config.steps",
        ),
        (
            "pack: set `pack=False` or `context=1`",
            "config.data.pack: set --config.data.pack=False or config.mesh.context=1",
        ),
        ("task='chat': a `stage=3` of `them`", "config.data.task='chat': a config.zero.stage=3 of `them`"),
    ],
)
def test_arguments_in_backticks_are_named_too(line, told):
    with pytest.raises(UserError) as caught, setting_names.errors_of_config():
        raise UserError(line)
    assert str(caught.value) == told
