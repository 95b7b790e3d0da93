"""Tests zerojax.interop.huggingface."""

import dataclasses
import functools
import json
import os
import pathlib
import weakref

import file_systems
import jax
import ml_dtypes
import numpy as np
import programs
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.errors import UserError
from zerojax.interop import huggingface, tensor_files
from zerojax.models import families
from zerojax.models.llama.config import LlamaConfig, Norms
from zerojax.models.rope import Rotation

HERE = pathlib.Path(__file__).parent
SUPPORT = HERE.parent / "support"
LOGITS_TOLERANCE = 2e-5  # float32 rounding in two implementations; the weights are the same bfloat16 values


LLAMA = families.PRESETS["tiny"]
Model = functools.partial(
    LlamaConfig,
    vocab_size=48,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    rotation=Rotation(500.0),
    norms=Norms(eps=1e-3),
    max_seq_len=64,
)


def random_params(model):
    random = np.random.default_rng(0)

    def draw(*shape):
        return random.normal(size=shape, scale=0.3).astype(np.float32)

    d, f, h, k, n = model.embed_dim, model.mlp_dim, model.num_heads, model.num_kv_heads, model.head_dim
    params = {"embed": {"embedding": draw(model.vocab_size, d)}, "norm": {"scale": draw(d)}}
    if not model.tie_embeddings:
        params["head"] = {"kernel": draw(d, model.vocab_size)}
    for layer in range(model.num_layers):
        params[f"layer_{layer}"] = {
            "attention_norm": {"scale": draw(d)},
            "attention": {
                "q": {"kernel": draw(d, h, n)},
                "k": {"kernel": draw(d, k, n)},
                "v": {"kernel": draw(d, k, n)},
                "o": {"kernel": draw(h, n, d)},
            },
            "mlp_norm": {"scale": draw(d)},
            "mlp": {"gate": {"kernel": draw(d, f)}, "up": {"kernel": draw(d, f)}, "down": {"kernel": draw(f, d)}},
        }
    return params


def expected_tensors(params, model):
    """Lists Hugging Face's tensors one by one."""
    d, h, k, n = model.embed_dim, model.num_heads, model.num_kv_heads, model.head_dim
    tensors = {"model.embed_tokens.weight": params["embed"]["embedding"], "model.norm.weight": params["norm"]["scale"]}
    if not model.tie_embeddings:
        tensors["lm_head.weight"] = params["head"]["kernel"].T
    for layer in range(model.num_layers):
        ours, name = params[f"layer_{layer}"], f"model.layers.{layer}"
        attention, mlp = ours["attention"], ours["mlp"]
        tensors[f"{name}.input_layernorm.weight"] = ours["attention_norm"]["scale"]
        tensors[f"{name}.post_attention_layernorm.weight"] = ours["mlp_norm"]["scale"]
        tensors[f"{name}.self_attn.q_proj.weight"] = np.einsum("dhn->hnd", attention["q"]["kernel"]).reshape(h * n, d)
        tensors[f"{name}.self_attn.k_proj.weight"] = np.einsum("dkn->knd", attention["k"]["kernel"]).reshape(k * n, d)
        tensors[f"{name}.self_attn.v_proj.weight"] = np.einsum("dkn->knd", attention["v"]["kernel"]).reshape(k * n, d)
        tensors[f"{name}.self_attn.o_proj.weight"] = np.einsum("hnd->dhn", attention["o"]["kernel"]).reshape(d, h * n)
        for kind in ("gate", "up", "down"):
            tensors[f"{name}.mlp.{kind}_proj.weight"] = mlp[kind]["kernel"].T
    return {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}


def on_devices(params, memory_kind="device"):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

    def place(leaf):
        dim = next((i for i, size in enumerate(leaf.shape) if size % 8 == 0), None)
        spec = P() if dim is None else P(*[None] * dim, "data")
        return jax.device_put(leaf, NamedSharding(mesh, spec, memory_kind=memory_kind))

    return jax.tree.map(place, params)


def load(directory):
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        found = safetensors.numpy.load_file(file)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


def assert_exported(directory, params, model):
    tensors, expected = load(directory), expected_tensors(params, model)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == ml_dtypes.bfloat16 and tensor.shape == expected[name].shape
        assert tensor.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("model", [Model(), Model(tie_embeddings=True), Model(num_kv_heads=4, num_layers=1)])
@pytest.mark.parametrize("place", [on_devices, lambda params: params])
def test_every_tensor_is_the_bfloat16_weight_in_hugging_faces_layout(tmp_path, model, place):
    params = random_params(model)
    huggingface.export(place(params), LLAMA, model, tmp_path / "out", bos_token_id=1)
    assert_exported(tmp_path / "out", params, model)
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == [tensor_files.CHECKSUMS, "config.json", "model.safetensors"]
    tensor_files.check([tmp_path / "out" / "model.safetensors"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["torch_dtype"] == "bfloat16"
    assert config["num_key_value_heads"] == model.num_kv_heads and config["rope_theta"] == 500.0
    assert config["tie_word_embeddings"] == model.tie_embeddings
    assert config["bos_token_id"] == 1 and config["eos_token_id"] is None


@pytest.mark.parametrize("max_shard_bytes", [1, 2000, 6000])
def test_shards_hold_every_tensor_once_within_their_bound(tmp_path, max_shard_bytes):
    model = Model()
    params = random_params(model)
    huggingface.export(params, LLAMA, model, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    assert_exported(tmp_path / "out", params, model)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = 0
    for file in files:
        with safetensors.safe_open(tmp_path / "out" / file, "numpy") as opened:
            names = list(opened.keys())
            sizes = [opened.get_tensor(name).nbytes for name in names]
            assert all(index["weight_map"][name] == file for name in names)
            assert opened.metadata() == {"format": "pt"}
        assert sum(sizes) <= max_shard_bytes or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total
    assert len(index["weight_map"]) == len(expected_tensors(params, model))


def test_one_leaf_at_a_time_is_on_the_host_and_none_stays(tmp_path, monkeypatch):
    model = Model()
    params = on_devices(random_params(model))
    live, most = set(), 0
    as_numpy = np.asarray

    def counted(array, *args, **kwargs):
        nonlocal most
        copy = as_numpy(array, *args, **kwargs)
        if isinstance(array, jax.Array):
            live.add(id(array))
            weakref.finalize(array, live.discard, id(array))  # an array caches its host copy
            most = max(most, len(live))
        return copy

    monkeypatch.setattr(np, "asarray", counted)
    huggingface.export(params, LLAMA, model, tmp_path / "out")
    assert most == 1 and not live


def test_offloaded_weights_are_exported_too(tmp_path):
    params = random_params(Model())
    huggingface.export(on_devices(params, "pinned_host"), LLAMA, Model(), tmp_path / "out")
    assert_exported(tmp_path / "out", params, Model())


def test_weights_of_another_model_are_refused_by_name(tmp_path):
    model = Model()
    params = random_params(model)
    cases = {
        "params/layer_2/attention_norm/scale: is missing": dataclasses.replace(model, num_layers=3),
        "params/layer_1/attention/k/kernel: is not a weight": dataclasses.replace(model, num_layers=1),
        "params/head/kernel: is not a weight": dataclasses.replace(model, tie_embeddings=True),
        "params/embed/embedding: has shape (48, 16), but the model's config gives (40, 16)": dataclasses.replace(
            model, vocab_size=40
        ),
    }
    for message, wrong in cases.items():
        with pytest.raises(UserError) as caught:
            huggingface.export(params, LLAMA, wrong, tmp_path / "out")
        assert message in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_an_earlier_export_is_replaced_and_other_files_are_not(tmp_path):
    model = Model(num_layers=1)
    huggingface.export(random_params(Model()), LLAMA, Model(), tmp_path / "out", max_shard_bytes=2000)
    huggingface.export(random_params(model), LLAMA, model, tmp_path / "out")
    assert_exported(tmp_path / "out", random_params(model), model)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt, which no export wrote"):
        huggingface.export(random_params(model), LLAMA, model, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").exists()
    assert os.listdir(tmp_path) == ["out"]


def test_the_folder_of_a_link_is_replaced_and_that_of_a_mount_is_refused(tmp_path, monkeypatch):
    model = Model(num_layers=1)
    params = random_params(model)
    (tmp_path / "out").symlink_to(tmp_path / "real")
    for _ in range(2):
        huggingface.export(params, LLAMA, model, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out", "real"] and (tmp_path / "out").is_symlink()
    assert_exported(tmp_path / "real", params, model)
    monkeypatch.setattr(huggingface.pathlib.Path, "is_mount", lambda path: path.name == "real")
    with pytest.raises(
        UserError, match="real: a file system is mounted there, so it cannot be replaced; name a folder in"
    ):
        huggingface.export(params, LLAMA, model, tmp_path / "out")


@pytest.mark.parametrize("stop_at", ["a leaf", "the swap"])
def test_a_killed_export_leaves_the_earlier_one_and_the_next_cleans_up(tmp_path, monkeypatch, stop_at):
    model = Model(num_layers=1)
    params = random_params(model)
    huggingface.export(params, LLAMA, model, tmp_path / "out")

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if stop_at == "a leaf":
            patch.setattr(huggingface, "write_tensor", killed)
        else:
            (tmp_path / "out").rename(tmp_path / ".out.replaced")  # between the two renames of the swap
            patch.setattr(huggingface, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            huggingface.export(params, LLAMA, model, tmp_path / "out")
    assert_exported(tmp_path / "out", params, model)
    huggingface.export(params, LLAMA, model, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_is_reported_and_the_earlier_export_stays(tmp_path, monkeypatch):
    model = Model(num_layers=1)
    params = random_params(model)
    huggingface.export(params, LLAMA, model, tmp_path / "out")

    monkeypatch.setattr(huggingface, "write_tensor", file_systems.full)
    with pytest.raises(UserError, match="no space left on the disk") as caught:
        huggingface.export(params, LLAMA, model, tmp_path / "out")
    assert str(tmp_path / "out") in str(caught.value)
    assert os.listdir(tmp_path) == ["out"]
    assert_exported(tmp_path / "out", params, model)


TWO_PROCESSES = """
import os, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank = int(sys.argv[2])
jax.distributed.initialize(f"localhost:{sys.argv[3]}", 2, rank)
import importlib
from zerojax.interop import huggingface
sys.path[:0] = sys.argv[4:]
tests = importlib.import_module("test_huggingface")
model = tests.Model()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
def place(leaf):
    dim = next(i for i, size in enumerate(leaf.shape) if size % 8 == 0)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * dim, "data"))
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
huggingface.export(jax.tree.map(place, tests.random_params(model)), tests.LLAMA, model, sys.argv[1])
assert os.path.exists(sys.argv[1] + "/config.json")

from zerojax import mesh as mesh_lib
from zerojax.inference import generate
from zerojax.models import family
from zerojax.zero import stages
from zerojax.zero.host import memory_kind
from zerojax.zero.offload import fetched_params
mesh, host = mesh_lib.make_mesh(), {"stage": 3, "min_size": 64, "offload": {"params": "host"}, "trainable": "norm"}
params = tests.random_params(model)
partition = stages.partition_state({"params": params}, mesh=mesh, **host)
stored = jax.tree.map(
    lambda leaf, sharding: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]),
    params, partition.shardings["params"],
)
assert sum(map(memory_kind.is_on_host, jax.tree.leaves(stored))) > 10
fetched_params.SMALL = 160  # larger shards are copied on their own, the others by programs
run = generate.make_generator(tests.LLAMA, model, partition, new_tokens=3, special=family.SpecialTokens())
np.save(f"{sys.argv[1]}-{rank}.npy", run(stored, tests.PROMPTS))
jax.distributed.shutdown()  # waits for the other
print("DONE")
"""
PROMPTS = np.arange(16).reshape(8, 2)


@pytest.mark.long
def test_two_processes_gather_together_and_the_first_writes_and_both_generate_from_host_memory(commands, tmp_path):
    port = programs.free_port()
    words = [["", str(tmp_path / "out"), str(rank), str(port), str(HERE), str(SUPPORT)] for rank in (0, 1)]
    for worker in [commands.start_python(f"sys.argv = {argv}\n{TWO_PROCESSES}") for argv in words]:
        assert "DONE" in worker.wait().out, worker.err
    assert_exported(tmp_path / "out", random_params(Model()), Model())
    found = [np.load(path) for path in tmp_path.glob("out-*.npy")]
    assert len(found) == 2 and np.array_equal(*found)
    params = random_params(Model())
    for row in (0, 5):
        for length in (2, 3, 4):
            logits = reference_logits(params, Model(), found[0][row, :length])
            assert logits[-1].argmax() == found[0][row, length], "each token is the likeliest after those before"


def reference_logits(params, model, tokens):
    """Computes Llama's logits in plain numpy, one sequence, float64, from the bfloat16 weights."""
    weights = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16).astype(np.float64), params)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + model.norms.eps) * scale

    half = model.head_dim // 2
    angles = np.arange(len(tokens))[:, None] * model.rotation.theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(x):
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = weights["embed"]["embedding"][tokens]
    for layer in range(model.num_layers):
        w = weights[f"layer_{layer}"]
        y = norm(x, w["attention_norm"]["scale"])
        q, k, v = (np.einsum("td,dhn->thn", y, w["attention"][name]["kernel"]) for name in "qkv")
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(z, model.num_heads // model.num_kv_heads, 1) for z in (k, v))
        scores = np.einsum("thn,shn->hts", q, k) / np.sqrt(model.head_dim)
        scores = np.where(np.tri(len(tokens)), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,shn->thn", scores / scores.sum(-1, keepdims=True), v)
        x = x + np.einsum("thn,hnd->td", mixed, w["attention"]["o"]["kernel"])
        y = norm(x, w["mlp_norm"]["scale"])
        gate = y @ w["mlp"]["gate"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp"]["up"]["kernel"])) @ w["mlp"]["down"]["kernel"]
    head = weights["embed"]["embedding"].T if model.tie_embeddings else weights["head"]["kernel"]
    return norm(x, weights["norm"]["scale"]) @ head


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_transformers_loads_the_export_and_computes_the_same_logits(tmp_path, tie_embeddings):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = Model(tie_embeddings=tie_embeddings)
    params = random_params(model)
    huggingface.export(params, LLAMA, model, tmp_path / "out", max_shard_bytes=6000)
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").max_position_embeddings == 64
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, 13)
    with torch.no_grad():
        logits = loaded(torch.tensor(tokens)[None]).logits[0].numpy()
    reference = reference_logits(params, model, tokens)
    np.testing.assert_allclose(logits, reference, atol=LOGITS_TOLERANCE * np.abs(reference).max(), rtol=0)
