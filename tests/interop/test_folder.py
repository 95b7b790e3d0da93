"""Checks that folders that do not fit are refused by name, and what a process reads. This module tests zerojax.interop.folder."""

import dataclasses
import json
import shutil
import threading
import time

import golden_models
import jax
import numpy as np
import pytest
import safetensors.numpy

from zerojax.checkpoint import files as step_files
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import layout, tensor_files
from zerojax.models import family


@pytest.fixture
def copied(tmp_path):
    """Returns f(name, config changes, tensors to add or, as None, to remove) -> a changed copy of a model's folder."""

    def copy(name, change=None, **tensors):
        folder = tmp_path / name
        shutil.copytree(golden_models.FOLDER / name, folder, dirs_exist_ok=True)
        raw = json.loads((folder / "config.json").read_text())
        raw |= change(raw) if callable(change) else change or {}
        (folder / "config.json").write_text(json.dumps(raw))
        if tensors:
            file = folder / tensor_files.ONE_FILE
            found = safetensors.numpy.load_file(file) | tensors
            safetensors.numpy.save_file({name: array for name, array in found.items() if array is not None}, file)
        return folder

    return copy


def refused(folder):
    with pytest.raises(UserError) as caught:
        folder_lib.open_folder(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_run_and_an_adapter_in_a_models_place_say_which_folder_to_name(tmp_path, copied):
    adapter, model, run = tmp_path / "adapter", copied("llama"), tmp_path / "run"
    for folder, name in ((adapter, folder_lib.ADAPTER), (run, folder_lib.CONFIG), (run / "export", folder_lib.ADAPTER)):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    assert "holds an adapter and no model; name the folder of its model, and this one as the adapter" in refused(
        adapter
    )
    with pytest.raises(UserError, match=rf"run: is the folder of a run; name its export, {run / 'export'}$"):
        folder_lib.check_folder(run, folder_lib.ADAPTER)
    with pytest.raises(UserError, match="name one that save_pretrained of PEFT wrote"):
        folder_lib.check_folder(tmp_path / "nowhere", folder_lib.ADAPTER)
    (run / "run.json").write_text("{}")
    assert f"that exported an adapter; name the folder of its model, and {run / 'export'} as the adapter" in refused(
        run
    )
    (run / "export" / folder_lib.ADAPTER).unlink()
    assert "is the folder of a run that exported no model" in refused(run)
    (run / step_files.SIZES).write_text("{}")
    assert "is a checkpoint of a run; name the run's export" in refused(run)
    (run / step_files.SIZES).unlink()
    (run / "export" / folder_lib.CONFIG).write_text("{}")
    assert f"is the folder of a run; name its export, {run / 'export'}" in refused(run)
    (model / "export").mkdir()
    (model / "export" / folder_lib.CONFIG).write_text("{}")
    folder_lib.open_folder(model)  # a model with an export of its own beside it


def test_a_missing_or_unreadable_config_is_refused(tmp_path, copied):
    assert "is not a folder" in refused(tmp_path / "nowhere")
    assert "config.json: cannot be read" in refused(tmp_path)
    folder = copied("llama")
    for text, message in (("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "is not a table of settings")):
        (folder / "config.json").write_text(text)
        assert message in refused(folder)


@pytest.mark.parametrize(
    "target", ["gone", "{name}", "/dev/null"]
)  # a blob that a cache of the hub lost, a loop, a device
def test_a_file_that_is_none_is_not_taken_for_one_that_is_missing(target, copied):
    folder = copied("llama")
    for name in ("generation_config.json", "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        other = (folder / name).rename(folder / "other") if (folder / name).exists() else None
        (folder / name).symlink_to(target.format(name=name))
        assert f"{folder / name}: cannot be read (" in refused(folder)
        (folder / name).unlink()
        if other is not None:
            other.rename(folder / name)
    (folder / "onnx").mkdir()
    folder_lib.open_folder(folder)
    (folder / "tokenizer.json").mkdir()
    assert f"{folder / 'tokenizer.json'}: cannot be read (" in refused(folder)


def test_a_setting_of_generation_is_found_in_either_config(copied):
    folder = copied("llama", {"top_k": 3, "top_p": 0.5})
    (folder / "generation_config.json").write_text('{"top_k": 7, "top_p": null}')
    found = folder_lib.open_folder(folder)
    assert [found.setting(name) for name in ("top_k", "top_p", "min_p")] == [7, 0.5, None]


AS_MT5 = {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE = {"rope_type": "su", "factor": 2.0, "rope_theta": 1e4}
CONFIGS = {
    "model_type 'llamb' is not an architecture that zerojax computes; known: llama": ("llama", {"model_type": "llamb"}),
    "model_type 'gpt9' is not an architecture that zerojax computes; known: llama": (
        "llama",
        {"model_type": "gpt9", "hidden_size": 65},
    ),
    "model_type ['llama'] is not an architecture": ("llama", {"model_type": ["llama"]}),
    "architecture 5 is not one": ("llama", {"architectures": 5}),
    "num_hidden_layers: must be at most 100000, and is 1000000000": ("llama", {"num_hidden_layers": 10**9}),
    "architecture 'LlamaForTokenClassification' is not one": (
        "llama",
        {"architectures": ["LlamaForTokenClassification"]},
    ),
    "has quantization_config": ("llama", {"quantization_config": {"bits": 4}}),
    "rope_parameters: rope_type: must be one of default, linear, llama3, yarn, dynamic, longrope, and is 'su'": (
        "llama",
        {"rope_parameters": ROPE},
    ),
    "rope_scaling: type: must be one of default, linear, llama3, yarn, dynamic, longrope, and is 'ntk'": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "ntk", "factor": 2.0}},
    ),
    "rope_scaling: type: must be named rope_type, since transformers reads no other": (
        "olmo3",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "rope_scaling: must be absent where there are rope_parameters, and is {'type': 'linear'": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "rope_parameters: full_attention: must be a number or a name": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
    ),
    "original_max_position_embeddings: must be 64, as in": (
        "llama",
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 32},
    ),
    "hidden_act: must be one of gelu": ("llama", {"hidden_act": "elu"}),
    "num_attention_heads: must be a whole number above 0, and is 'four'": ("llama", {"num_attention_heads": "four"}),
    "num_attention_heads: must be a multiple of num_key_value_heads=3": ("llama", {"num_key_value_heads": 3}),
    "layer_types: must be 2 of full_attention": ("qwen2", {"layer_types": ["linear_attention", "full_attention"]}),
    "layer_types: must be 2 of full_attention, and is [['full_attention'], 'full_attention']": (
        "qwen2",
        {"layer_types": [["full_attention"], "full_attention"]},
    ),
    "layer_types: must be 2 of sliding_attention, and is ['full_attention', 'sliding_attention']": (
        "llama",
        {
            "model_type": "mistral",
            "architectures": None,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "is_encoder_decoder: must be true, since a decoder alone would not read the encoder, and is False": (
        "t5",
        {"is_encoder_decoder": False},
    ),
    "relative_attention_num_buckets: must be 4 or more": ("t5", {"relative_attention_num_buckets": 3}),
    "relative_attention_max_distance: must be above 16, half of the buckets, and is 16": (
        "t5",
        {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 16},
    ),
    "dense_act_fn: must be 'gelu_new' where feed_forward_proj is 'gated-gelu', and is 'silu'": (
        "t5",
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "silu"},
    ),
    "feed_forward_proj: must be one of": ("t5", {"feed_forward_proj": "gated-elu"}),
    "d_model: must be a multiple of decoder_attention_heads=5": ("bart", {"decoder_attention_heads": 5}),
    "tie_word_embeddings: must be true or false, and is 'no'": ("bart", {"tie_word_embeddings": "no"}),
    "tensor model.layers.0.self_attn.k_proj.bias is not one of the model that config.json describes (6 of 26 are not)": (
        "qwen2",
        {"model_type": "llama", "architectures": None},
    ),
    "tensor model.layers.0.self_attn.q_proj.bias is missing (8 of 29 are)": ("llama", {"attention_bias": True}),
    "tensor model.layers.2.input_layernorm.weight is missing (9 of 30 are)": ("llama", {"num_hidden_layers": 3}),
    "tensor model.layers.0.mlp.down_proj.weight has shape (64, 160), and config.json describes (64, 161)": (
        "llama",
        {"intermediate_size": 161},
    ),
}


@pytest.mark.parametrize("message", CONFIGS)
def test_a_config_of_another_model_is_refused_by_name(copied, message):
    name, change = CONFIGS[message]
    assert message in refused(copied(name, change))


def test_tensors_that_do_not_fit_are_refused_by_name(copied):
    norm = "model.norm.weight"
    assert f"tensor {norm} is missing (1 of 21 are)" in refused(copied("llama", **{norm: None}))
    assert "or set tie_word_embeddings to true" in refused(copied("llama", **{"lm_head.weight": None}))
    arrays = safetensors.numpy.load_file(golden_models.FOLDER / "llama" / tensor_files.ONE_FILE)
    compiled = {**dict.fromkeys(arrays), **{f"_orig_mod.{name}": array for name, array in arrays.items()}}
    assert "(21 of 21 are); names there begin with '_orig_mod.': save the tensors without it" in refused(
        copied("llama", **compiled)
    )
    assert "tensor extra is not one of the model" in refused(
        copied("llama", **{norm: np.ones(64, np.float32), "extra": np.ones(3, np.float32)})
    )
    wrong = {"extra": None, norm: np.ones(64, np.int8)}
    assert f"tensor {norm} is stored as I8, and only F64, F32, F16, BF16 are read" in refused(copied("llama", **wrong))


def test_copies_of_tied_weights_are_left_out_if_they_are_equal(copied):
    original = safetensors.numpy.load_file(golden_models.FOLDER / "bart" / "model.safetensors")["model.shared.weight"]
    names = ("model.encoder.embed_tokens.weight", "lm_head.weight")
    folder = folder_lib.open_folder(copied("bart", **dict.fromkeys(names, original)))
    assert folder.model.tie_embeddings and not set(names) & set(folder.entries)
    other = original + 1
    folder = folder_lib.open_folder(copied("bart", **{"lm_head.weight": other}))
    assert not folder.model.tie_embeddings  # as transformers 5: both are kept
    assert "tensor model.encoder.embed_tokens.weight is not one of the model" in refused(
        copied("bart", **{"model.encoder.embed_tokens.weight": other})
    )


def test_copies_that_are_no_weights_are_refused_by_name(copied):
    names = ("model.shared.weight", "lm_head.weight")
    assert "has shape ()" in refused(copied("bart", **dict.fromkeys(names, np.array(1.0, np.float32))))
    original = safetensors.numpy.load_file(golden_models.FOLDER / "bart" / "model.safetensors")["model.shared.weight"]
    assert "is stored as I8" in refused(copied("bart", **dict.fromkeys(names, original.astype(np.int8))))


def test_a_model_saved_without_its_head_is_read(copied):
    folder = copied("bart", {"architectures": ["BartModel"]})
    tensors = safetensors.numpy.load_file(folder / tensor_files.ONE_FILE)
    del tensors["final_logits_bias"]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    safetensors.numpy.save_file(bare, folder / tensor_files.ONE_FILE)
    found = folder_lib.open_folder(folder)
    assert found.entries.keys() == tensors.keys() and found.dtype == np.float32
    bias = next(tensor for tensor in layout.tensors(found.family, found.model) if "logits_bias" in tensor.path)
    np.testing.assert_array_equal(
        folder_lib.read_shard(found, bias, (slice(8, 16),), np.float32), np.zeros(8, np.float32)
    )


def test_names_without_their_prefix_and_buffers_of_rotations_are_read(copied):
    folder = copied("llama")
    tensors = safetensors.numpy.load_file(folder / tensor_files.ONE_FILE)
    buffers = dict.fromkeys(("rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"), np.ones(8, np.float32))
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()} | buffers
    assert "lm_head.weight" in bare
    safetensors.numpy.save_file(bare, folder / tensor_files.ONE_FILE)
    assert folder_lib.open_folder(folder).entries.keys() == tensors.keys()


@pytest.mark.parametrize("version, is_scaled", [("4.57.1", True), (None, True), ("5.23.0", False)])
def test_mt5_is_t5_by_another_name_and_its_version_says_whether_tied_outputs_are_scaled(copied, version, is_scaled):
    plain = folder_lib.open_folder(copied("t5"))
    found = folder_lib.open_folder(copied("t5", AS_MT5 | {"transformers_version": version}))
    assert plain.model.scale_outputs and found.family is plain.family
    assert found.model == dataclasses.replace(plain.model, scale_outputs=is_scaled)


def test_the_first_tensor_that_holds_nan_or_infinity_is_warned_of_once(copied):
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)]
    odd = {name: np.array([np.nan] + [1.0] * 63, np.float32) for name in names}
    folder = folder_lib.open_folder(copied("llama", **odd))
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=single),
        family.abstract_params(folder.family.parts, folder.model),
    )
    with pytest.warns(UserWarning, match=r"input_layernorm.weight holds NaN or infinity, and so may what") as caught:
        folder_lib.read_params(folder, abstract)
        read_whole(folder, names[1], np.float32)
    assert len(caught) == 1


def test_a_tensor_of_nothing_but_nan_is_refused(copied):
    name = "model.norm.weight"
    folder = folder_lib.open_folder(copied("llama", **{name: np.full(64, np.nan, np.float32)}))
    with pytest.raises(UserError, match=r"safetensors: tensor model.norm.weight holds nothing but NaN, so .*; copy"):
        read_whole(folder, name, np.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_numbers_beyond_the_dtype_that_is_wanted_are_warned_of(copied):
    name = "model.norm.weight"
    folder = folder_lib.open_folder(copied("llama", **{name: np.full(64, 1e5, np.float32)}))
    read_whole(folder, name, np.float32)
    with pytest.warns(UserWarning, match="model.norm.weight holds numbers beyond the range of float16, which become"):
        read_whole(folder, name, np.float16)


def read_whole(folder, name, dtype):
    tensor = next(found for found in layout.tensors(folder.family, folder.model) if found.name == name)
    return folder_lib.read_shard(folder, tensor, tuple(slice(0, size) for size in tensor.leaf_shape), np.dtype(dtype))


def sparse_folder(tmp_path, **changes):
    """Makes a folder whose one file has the bytes of a large model, all holes."""
    raw = json.loads((golden_models.FOLDER / "llama" / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    chosen = folder_lib.families.MODEL_TYPES["llama"]
    model = chosen.huggingface.read(raw, ["lm_head.weight"])
    tensors = layout.tensors(chosen, model)
    size = sum(2 * int(np.prod(tensor.shape)) for tensor in tensors)
    with open(tmp_path / tensor_files.ONE_FILE, "wb") as file:
        shapes = {tensor.name: (tensor.shape, tensor_files.DTYPES["BF16"]) for tensor in tensors}
        tensor_files.write_header(file, shapes)
        file.truncate(file.tell() + size)
    return size, tensors


def test_a_shard_of_a_file_larger_than_memory_is_read_through_small_windows(tmp_path, monkeypatch):
    """One device's shard of 512, of a model whose sparse file has 375 GB."""
    size, tensors = sparse_folder(
        tmp_path,
        hidden_size=32768,
        intermediate_size=131072,
        num_hidden_layers=12,
        num_attention_heads=256,
        num_key_value_heads=32,
        head_dim=128,
        vocab_size=131072,
    )
    assert size > 370e9
    windows, mapped = [], tensor_files._mapped

    def counted(file, offset, length, **options):
        windows.append(length)
        return mapped(file, offset, length, **options)

    monkeypatch.setattr(tensor_files, "_mapped", counted)
    folder = folder_lib.open_folder(tmp_path)
    for tensor in tensors[:5]:  # tables, norms and a projection
        size = tensor.leaf_shape[0]
        index = (slice(0, max(size // 512, 1)), *(slice(0, length) for length in tensor.leaf_shape[1:]))
        array = folder_lib.read_shard(folder, tensor, index, np.float32)
        assert array.shape == tuple(part.stop for part in index) and not array.any()
        assert array.nbytes < 70e6
    assert 0 < max(windows) <= tensor_files.WINDOW_BYTES


def test_each_shard_is_read_once_whatever_the_number_of_devices_that_hold_it(monkeypatch):
    folder = folder_lib.open_folder(golden_models.FOLDER / "llama")
    reads = []
    original = folder_lib.read_shard
    monkeypatch.setattr(folder_lib, "read_shard", lambda *args: reads.append(args[1:3]) or original(*args))
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def place(leaf):
        spec = jax.P("data") if leaf.shape[0] % 4 == 0 else jax.P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    abstract = jax.tree.map(place, family.abstract_params(folder.family.parts, folder.model))
    params = folder_lib.read_params(folder, abstract)
    assert len(reads) == 4 * len(jax.tree.leaves(abstract))
    sizes = sum(int(np.prod([part.stop - part.start for part in index])) for _, index in reads)
    assert sizes == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("budget", [1, 100_000])
def test_shards_that_are_read_at_a_time_stay_within_the_budget_or_are_alone(monkeypatch, budget):
    folder = folder_lib.open_folder(golden_models.FOLDER / "llama")
    lock, held, most, original = threading.Lock(), [], [], folder_lib.read_shard

    def counted(folder, tensor, index, dtype):
        nbytes = 4 * int(np.prod(tensor.leaf_shape))
        with lock:
            held.append(nbytes)
            most.append((len(held), sum(held)))
        time.sleep(0.005)
        with lock:
            held.remove(nbytes)
        return original(folder, tensor, index, dtype)

    monkeypatch.setattr(folder_lib, "read_shard", counted)
    monkeypatch.setattr(folder_lib, "MOST_BYTES", budget)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = family.abstract_params(folder.family.parts, folder.model)
    folder_lib.read_params(
        folder, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), shapes)
    )
    assert all(count == 1 or nbytes <= budget for count, nbytes in most)
    assert (max(count for count, _ in most) > 1) == (budget > 1)


@pytest.mark.parametrize(
    "told, scales", [({}, True), ({"scale_decoder_outputs": None}, False), ({"scale_decoder_outputs": True}, True)]
)
def test_a_head_of_t5_is_scaled_as_its_config_tells_and_null_tells_no(copied, told, scales):
    def change(raw):
        raw.pop("scale_decoder_outputs", None)
        return {"tie_word_embeddings": True, **told}

    assert folder_lib.open_folder(copied("t5", change)).model.scale_outputs == scales


@pytest.mark.parametrize("outside, inside, rotated", [(0.5, 1.0, 0), (0.5, None, 8), (1.0, 0.5, 8)])
def test_the_share_of_rotated_dims_is_that_of_the_ropes_own_parameters_if_they_tell_one(
    copied, outside, inside, rotated
):
    """As transformers reads it."""
    told = {"rope_type": "default", "rope_theta": 1e4} | ({} if inside is None else {"partial_rotary_factor": inside})
    folder = folder_lib.open_folder(copied("phi3", {"partial_rotary_factor": outside, "rope_parameters": told}))
    assert folder.model.rotation.dims == rotated


def test_a_large_folder_is_named_before_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(bytes(2048))
    assert folder_lib.reading(tmp_path) == folder_lib.reading(tmp_path / "absent") == ""
    monkeypatch.setattr(folder_lib, "LARGE", 1024)
    assert folder_lib.reading(tmp_path) == f"reading {tmp_path}, 2.00 KiB"
