"""Compares kinds of weights with transformers' rule, and names weights of foreign trees. This module tests zerojax.kinds."""

import dataclasses
import json
import re

import equinox as eqx
import flax.linen as nn
import golden_models
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import zerojax
from zerojax import kinds, tree
from zerojax.interop import layout
from zerojax.models import families
from zerojax.models import family as family_lib
from zerojax.optim import muon, registry

# Vectors, which Trainer's rule decays
UNDECAYED = (".correct_output_scale", ".router.scale", ".router.per_expert_scale")
VERDICTS = json.loads((golden_models.GOLDEN / "trainer" / "decayed.json").read_text())


def tensors_of(name):
    """Returns the tensors of a golden model, each with what Trainer's rule says of it."""
    folder = golden_models.FOLDER / name
    raw = json.loads((folder / "config.json").read_text())
    family = families.MODEL_TYPES[raw["model_type"]]
    told = {tensor: verdict for verdict, names in VERDICTS[name].items() for tensor in names}
    for tensor in layout.tensors(family, family.huggingface.read(raw, load_file(folder / "model.safetensors"))):
        if tensor.name.endswith(UNDECAYED):
            continue
        (verdict,) = {told[re.sub(r"\.\d+\.", ".0.", member.name)] for member in tensor.members}
        yield tensor, verdict


# Names of tensors in layers, and of projections between them and the embedding
IN_LAYERS = r"\.(layers?|h|block)\.\d+\.|per_layer_model_projection|altup_(unembed_)?projections"
# Golden models of a family that has others: they have its weights, and other positions.
OTHER_POSITIONS = {"llamadynamic", "phi3long"}
# Trainer's rule decays vectors of recurrent layers, which their authors spare.
RECURRENT = {"mamba2", "qwen3next", *golden_models.HYBRIDS}


def test_all_golden_models_are_compared():
    assert VERDICTS.keys() | OTHER_POSITIONS | RECURRENT == {
        path.parent.name for path in golden_models.FOLDER.glob("*/config.json")
    }


@pytest.mark.parametrize("name", VERDICTS)
def test_the_leaves_that_decay_are_those_of_trainers_rule(name):
    for tensor, verdict in tensors_of(name):
        leaf = jax.ShapeDtypeStruct(tensor.leaf_shape, jnp.float32)
        assert kinds.decayed({tensor.path: leaf})[tensor.path] == (verdict == "decayed"), tensor
        is_decayed = kinds.of(tensor.name, tensor.shape) not in kinds.SPARED  # by the name in PyTorch
        assert is_decayed == (verdict == "decayed"), tensor


@pytest.mark.parametrize("name", VERDICTS)
def test_muon_takes_the_matrices_of_layers_alone(name):
    """They are what decays in a layer, but for sinks."""
    for tensor, verdict in tensors_of(name):
        is_in_layer = re.search(IN_LAYERS, tensor.name) and "sinks" not in tensor.name
        of_muon = verdict == "decayed" and bool(is_in_layer)
        assert bool(muon.form(tensor.path, tensor.leaf_shape)) == of_muon, tensor
        assert (kinds.of(tensor.path, tensor.leaf_shape) == kinds.MATRIX) == of_muon, tensor


def test_decays_steps_and_skips_of_recurrent_layers_are_spared():
    family = families.PRESETS["mamba2_test"]
    params = family_lib.abstract_params(family.parts, dataclasses.replace(family.presets["mamba2_test"], vocab_size=64))
    spared = {path for path, decays in tree.flatten(kinds.decayed(params["layer_0"])) if not decays}
    of_mixer = {f"mixer/{name}" for name in ("A_log", "D", "dt_bias", "conv/bias", "norm/scale")}
    assert spared == {"norm/scale", *of_mixer}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, 16, normalize_qk=True, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)])
        self.general = nnx.LinearGeneral(8, (2, 4), rngs=rngs)
        self.embed = nnx.Embed(8, 8, rngs=rngs)
        self.lora = nnx.LoRA(8, 2, 8, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(3))


OF_BLOCK = {
    "attention/query/kernel": "matrix",
    "attention/value/kernel": "matrix",
    "attention/value/bias": "bias",
    "attention/out/bias": "bias",
    "attention/query_ln/scale": "norm",
    "norms/0/bias": "bias",
    "norms/1/scale": "norm",
    "general/bias": "bias",
    "general/kernel": "matrix",
    "embed/embedding": "embedding",
    "lora/lora_b": "adapter",
    "gain": "vector",
}


class Stack(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda key: Block(nnx.Rngs(key)), in_axes=0)
        self.layers = make(jax.random.split(rngs.params(), 3))


@pytest.mark.parametrize("make, prefix", [(Block, ""), (Stack, "layers/")])
def test_weights_of_nnx_are_named_with_and_without_a_stack(make, prefix):
    weights = nnx.state(make(nnx.Rngs(0)), nnx.Param)
    found = dict(tree.flatten(kinds.weight_kinds(weights)))
    assert found.items() >= {f"{prefix}{path}/value": kind for path, kind in OF_BLOCK.items()}.items()
    forms = {path: muon.form(path, leaf.shape) for path, leaf in tree.flatten(weights)}
    assert {path for path, form in forms.items() if form} == {path for path, kind in found.items() if kind == "matrix"}
    assert forms[f"{prefix}attention/query/kernel/value"] == ("brcc" if prefix else "rcc")


def test_weights_of_equinox_are_named_by_attributes_and_dims():
    class Net(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        layers: eqx.nn.Sequential
        norm: eqx.nn.LayerNorm
        conv: eqx.nn.Conv2d
        wte: eqx.nn.Embedding
        cell: eqx.nn.GRUCell

    key = jax.random.key(0)
    net = Net(
        eqx.nn.MultiheadAttention(2, 8, use_query_bias=True, key=key),
        eqx.nn.Sequential([eqx.nn.Linear(8, 8, key=key), eqx.nn.RMSNorm(8)]),
        eqx.nn.LayerNorm(8),
        eqx.nn.Conv2d(2, 4, 3, key=key),
        eqx.nn.Embedding(8, 8, key=key),
        eqx.nn.GRUCell(3, 4, key=key),
    )
    found = dict(tree.flatten(kinds.weight_kinds(eqx.filter(net, eqx.is_array))))
    assert found == {
        "attention/query_proj/weight": "matrix",
        "attention/query_proj/bias": "bias",
        "attention/key_proj/weight": "matrix",
        "attention/value_proj/weight": "matrix",
        "attention/output_proj/weight": "matrix",
        "layers/layers/0/weight": "matrix",
        "layers/layers/0/bias": "bias",
        "layers/layers/1/weight": "vector",
        "layers/layers/1/bias": "bias",
        "norm/weight": "norm",
        "norm/bias": "bias",
        "conv/weight": "matrix",
        "conv/bias": "bias",  # [4, 1, 1]
        "wte/weight": "embedding",
        "cell/weight_ih": "matrix",
        "cell/weight_hh": "matrix",
        "cell/bias": "bias",
        "cell/bias_n": "bias",
    }


def test_weights_of_linen_are_named():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(nn.Dense(8)(x))
            return nn.Embed(4, 8).attend(nn.MultiHeadDotProductAttention(2)(x))

    params = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 3, 8)))["params"]
    found = dict(tree.flatten(kinds.weight_kinds(params)))
    by_kind = {kind: {path for path, own in found.items() if own == kind} for kind in set(found.values())}
    attention = {f"MultiHeadDotProductAttention_0/{name}" for name in ("query", "key", "value", "out")}
    assert by_kind == {
        "matrix": {"Dense_0/kernel", *(f"{name}/kernel" for name in attention)},
        "bias": {"Dense_0/bias", "LayerNorm_0/bias", *(f"{name}/bias" for name in attention)},
        "norm": {"LayerNorm_0/scale"},
        "embedding": {"Embed_0/embedding"},
    }


@pytest.mark.parametrize(
    "path, shape, kind",
    [
        ("decoder/~/mha/query/w", (8, 16), "matrix"),  # Haiku's names
        ("decoder/~/mha/query/b", (16,), "bias"),
        ("batch_norm/offset", (1, 1, 1, 4), "bias"),
        ("batch_norm/scale", (1, 1, 1, 4), "norm"),
        ("embed/embeddings", (40, 8), "embedding"),
        ("batch_normalization_2/gamma", (3, 8), "norm"),  # of Keras, in a stack
        ("blocks/ln_f/weight", (12, 8), "norm"),
        ("layers/attention_norm", (12, 8), "norm"),  # arrays in plain dicts, stacked
        ("layers/rms_att_weight", (12, 8), "vector"),
        ("layers/wq", (12, 8, 8), "matrix"),
        ("layers/scores", (12, 4), "vector"),
        ("layers/3/up", (8, 16), "matrix"),
        ("LayerNormMLP_0/wi_kernel", (8, 2, 16), "matrix"),
        ("LayerNormMLP_0/ln_bias", (8,), "bias"),
        ("norm/linear/kernel", (8, 16), "matrix"),
        ("normal_flow/weight", (8, 16), "matrix"),
        ("gnn/weight", (8, 16), "matrix"),
        ("ssm/B", (8, 16), "matrix"),
        ("mlp/lora/b", (2, 16), "adapter"),
        ("swin.blocks.0.attn.relative_position_bias_table", (49, 4), "bias"),  # a state dict of PyTorch
        ("model.layers.0.input_layernorm.weight", (8,), "norm"),
        ("0", (8, 16), "matrix"),
        ("1", (8,), "vector"),
        ("", (8, 16), "matrix"),
    ],
)
def test_names_decide_and_dims_where_no_name_tells(path, shape, kind):
    assert kinds.of(path, shape) == kind


def test_biases_are_no_matrices_whatever_adamw_on_finds_unless_a_form_is_given():
    assert muon.form("attention/q/bias", (4, 8), adamw_on="embed") == ""
    assert muon.form("layers/norm/weight", (3, 8), adamw_on="") == ""
    assert muon.form("normed_mixer/weight", (8, 8), forms=[("normed_mixer", 2, "rc")]) == "rc"


@pytest.mark.parametrize("name", [name for name in registry.OPTIMIZERS if "weight_decay" in registry.READS[name]])
def test_each_optimizer_spares_biases_and_norms_of_many_dims(name):
    params = {
        "q": {"kernel": jnp.ones((8, 2, 4)), "bias": jnp.ones((2, 4))},
        "layers": {"norm": {"scale": jnp.ones((3, 8))}},
    }
    tx = registry.make_optimizer(name, 0.1, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.5)
    state = tx.init(params)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    moved = {path for path, leaf in tree.flatten(updates) if leaf.any()}
    assert moved == {"q/kernel"}
    everywhere = registry.make_optimizer(name, 0.1, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.5, weight_decay_on="all")
    stored = [[(path, leaf.shape) for path, leaf in tree.flatten(own)] for own in (state, everywhere.init(params))]
    assert stored[0] == stored[1]  # so a checkpoint restores whatever decayed before


def test_kinds_are_a_mask_and_labels_for_optax():
    params = {"q": {"kernel": jnp.ones((8, 2, 4)), "bias": jnp.ones((2, 4))}, "wte": jnp.ones((5, 8))}
    of_kind = {"matrix": optax.sgd(1.0), "bias": optax.sgd(2.0), "embedding": optax.sgd(0.0)}
    tx = optax.chain(optax.add_decayed_weights(1.0, zerojax.decayed), optax.partition(of_kind, zerojax.weight_kinds))
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert {path: float(leaf.ravel()[0]) for path, leaf in tree.flatten(updates)} == {
        "q/kernel": -2.0,
        "q/bias": -2.0,
        "wte": 0.0,
    }
