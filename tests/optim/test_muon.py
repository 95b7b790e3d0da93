"""Compares Muon with optax's on one device, and checks which weights are matrices. This module tests zerojax.optim.muon."""

import functools

import chex
import jax
import jax.numpy as jnp
import muon_by_optax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import tree
from zerojax.errors import UserError
from zerojax.models import families, family
from zerojax.optim import fused, locality, muon

SHAPES = {
    "layer_0": {"q": {"kernel": (16, 4, 8)}, "o": {"kernel": (4, 8, 16)}, "mlp": {"kernel": (16, 64)}, "scale": (16,)},
    "experts": {"up": (8, 16, 32)},
    "layers": {"up": {"kernel": (3, 24, 16)}, "scale": (3, 16)},
    "embed": {"embedding": (40, 16)},
}
ROUNDING = 2e-6  # float32 through five iterations, which enlarge small singular values


def make_params():
    shapes = jax.tree.leaves(SHAPES, is_leaf=lambda node: isinstance(node, tuple))
    leaves = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    return jax.tree.unflatten(jax.tree.structure(SHAPES, is_leaf=lambda node: isinstance(node, tuple)), leaves)


def three_steps(update, state, params):
    for _ in range(3):
        params, state = update(jax.tree.map(jnp.sin, params), state, params)
    return params


def through_optax(tx):
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(update)


@functools.cache
def expected(rms=muon.RMS):
    tx = muon_by_optax.reference(rms)
    return three_steps(through_optax(tx), tx.init(make_params()), make_params())


@pytest.mark.long
@pytest.mark.parametrize("rms", [muon.RMS, pytest.param(None, marks=pytest.mark.long)])
def test_muon_is_optax_with_these_forms(rms):
    tx = zerojax.muon(**muon_by_optax.settings(rms=rms))
    found = three_steps(through_optax(tx), tx.init(make_params()), make_params())
    chex.assert_trees_all_close(found, expected(rms), atol=ROUNDING)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_an_update_of_an_orthogonal_matrix_has_the_given_rms_or_the_scale_of_jordan_et_al(shape):
    def norm(**how):
        tx, params = zerojax.muon(1.0, **how), {"kernel": jax.random.normal(jax.random.key(0), shape)}
        return float(optax.global_norm(jax.jit(tx.update)(params, tx.init(params), params)[0]))

    rows, columns = shape
    scale = norm(rms=0.5) / (0.5 * max(shape) ** 0.5)
    assert scale == pytest.approx(min(shape) ** 0.5, rel=0.2), "singular values are near one"
    assert norm(rms=None) == pytest.approx(scale * max(1.0, columns / rows) ** 0.5, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(P(), marks=pytest.mark.long),
        P(("data", "context"), "model"),
        pytest.param(P("model"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_shards_update_as_one_device_does(spec):
    tx = zerojax.muon(**muon_by_optax.settings())
    mesh = zerojax.make_mesh(replica=2, data=2, model=2)

    def fitting(leaf):
        entries = [entry if n % 4 == 0 else None for entry, n in zip(spec, leaf.shape)]
        return NamedSharding(mesh, P(*entries))

    shardings = jax.tree.map(fitting, make_params())
    params = jax.device_put(make_params(), shardings)
    update = jax.jit(lambda grads, state, params: tx.apply(grads, state, params, shardings=shardings)[:2])
    chex.assert_trees_all_close(three_steps(update, tx.init(params), params), expected(), atol=ROUNDING)


def test_a_skipped_step_changes_nothing_and_a_scale_multiplies_gradients():
    tx, params = zerojax.muon(**muon_by_optax.settings()), make_params()
    state = tx.init(params)
    apply = jax.jit(tx.apply)
    bad = jax.tree.map(lambda p: p * jnp.nan, params)
    chex.assert_trees_all_equal(apply(bad, state, params, scale=1.0, finite=jnp.array(False))[:2], (params, state))
    grads = jax.tree.map(jnp.sin, params)
    doubled = apply(jax.tree.map(lambda g: 2 * g, grads), state, params, scale=0.5, finite=jnp.array(True))
    chex.assert_trees_all_equal(doubled[:2], apply(grads, state, params)[:2])


def test_padding_changes_no_other_element():
    tx, params = zerojax.muon(**muon_by_optax.settings()), {"kernel": make_params()["layer_0"]["mlp"]["kernel"]}
    padded = {"kernel": jnp.pad(params["kernel"], ((0, 3), (0, 2)))}
    shapes = {"kernel": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
    found = jax.jit(functools.partial(tx.apply, shapes=shapes))(padded, tx.init(padded), padded)[0]["kernel"]
    plain = jax.jit(tx.apply)(params, tx.init(params), params)[0]["kernel"]
    np.testing.assert_allclose(found[:16, :64], plain, atol=ROUNDING)
    assert not found[16:].any() and not found[:, 64:].any()


def test_newton_schulz_brings_singular_values_near_one():
    x = jax.random.normal(jax.random.key(0), (2, 48, 16))
    for dtype in (jnp.float32, jnp.bfloat16):
        values = jnp.linalg.svd(muon.newton_schulz(x.astype(dtype)).astype(jnp.float32), compute_uv=False)
        assert values.min() > 0.6 and values.max() < 1.3  # as Jordan et al. say


def test_one_momentum_is_kept_of_a_matrix_and_two_moments_of_others():
    state = zerojax.muon(1e-3).init(make_params())
    assert sorted(path for path, _ in tree.flatten(state.nu)) == ["embed/embedding", "layer_0/scale", "layers/scale"]
    assert jax.tree.structure(state.mu) == jax.tree.structure(make_params())


def test_weights_of_one_form_are_of_one_kind():
    paths = [path for path, _ in tree.flatten(make_params())]
    kinds = dict(zip(paths, zerojax.muon(1e-3).kinds(make_params()), strict=True))
    assert kinds["layer_0/scale"] == kinds["embed/embedding"] != kinds["layer_0/mlp/kernel"]


def test_cuts_of_a_matrix_are_no_update_of_it():
    tx = zerojax.muon(1e-3)
    assert locality.of(tx, make_params()).kind == locality.in_step(tx, make_params()).kind == locality.PER_LEAF
    masters = zerojax.with_master_weights(tx)
    assert not masters.is_elementwise and masters.received is tx.received


# Weights of each family that are no matrix of a hidden layer, and the forms of some that are.
FORMS = {
    "llama3_8b": {
        "layer_0/attention/q/kernel": "rcc",
        "layer_0/attention/o/kernel": "rrc",
        "layer_0/mlp/up/kernel": "rc",
    },
    "phi3_mini": {"layer_0/attention/qkv/kernel": "rbcc", "layer_0/mlp/gate_up/kernel": "rbc"},
    "olmoe_1b_7b": {
        "layer_0/mlp/experts/gate": "brc",
        "layer_0/mlp/experts/router": "rc",
        "layer_0/attention/q_norm/scale": "",
    },
    "gpt_oss_20b": {
        "layer_0/mlp/experts/gate_up": "brcb",
        "layer_0/mlp/experts/gate_up_bias": "",
        "layer_0/attention/q/bias": "",
    },
    "deepseek_v3": {"layer_3/attention/kv_b/kernel": "rcc", "layer_3/mlp/shared/down/kernel": "rc"},
    "t5_v1_1_small": {"decoder_0/cross/v/kernel": "rcc", "decoder_bias/embedding": ""},
    "bart_base": {"encoder_0/attention/k/bias": "", "encoder_positions/embedding": ""},
    "bert_base": {"head/dense/kernel": "", "kinds/embedding": ""},
}


@pytest.mark.parametrize("preset", FORMS)
def test_the_matrices_of_the_families_are_those_of_their_layers(preset):
    found = families.PRESETS[preset]
    params = family.abstract_params(found.parts, found.presets[preset])
    forms = {path: muon.form(path, leaf.shape) for path, leaf in tree.flatten(params)}
    assert forms.items() >= FORMS[preset].items()
    assert not any(form for path, form in forms.items() if path.startswith(("embed", "head", "positions")))


def test_forms_of_foreign_models_are_known_or_given():
    assert muon.form("attn/attn_vec_einsum/w", (8, 256, 2048)) == "rrc"
    assert muon.form("attn/kv_einsum/w", (2, 1, 2048, 256)) == "bcrc"
    assert muon.form("conv/kernel", (3, 3, 64, 128)) == "rrrc"
    assert muon.form("layers/attention/q/kernel", (12, 64, 4, 16)) == "brcc"
    assert muon.form("layers/3/mlp/kernel", (64, 256)) == "rc"
    assert muon.form("layers/gamma", (12, 64)) == "" and muon.form("layer_0/q/lora_a", (64, 8)) == ""
    assert muon.form("head/kernel", (64, 256), adamw_on="") == "rc"
    assert muon.form("mix/kernel", (4, 64, 256), forms=[("mix", 3, "brc")]) == "brc"


@pytest.mark.parametrize(
    "how, line",
    [
        ({"adamw_on": "("}, "adamw_on: '\\(' is not a regex"),
        ({"forms": [("mix", 3, "rc")]}, "forms: 'rc' of 'mix' is no form of 3 dims"),
        ({"forms": [("mix", 2, "rr")]}, "forms: 'rr' of 'mix' is no form"),
        ({"momentum": 1.0}, "momentum: must be at least 0 and below 1"),
    ],
)
def test_wrong_arguments_are_refused(how, line):
    with pytest.raises(UserError, match=line):
        zerojax.muon(1e-3, **how)


def test_weights_without_a_matrix_are_refused():
    with pytest.raises(
        UserError,
        match="optimizer: muon orthogonalizes matrices, and all trained weights are AdamW's: vectors, or found by `adamw_on='embed",
    ):
        zerojax.muon(1e-3).init({"q": {"lora_a": jnp.ones((8, 2)), "lora_b": jnp.ones((2, 8))}, "scale": jnp.ones(3)})
    with fused.of_a_part():  # a group of a pipeline may hold norms alone
        assert zerojax.muon(1e-3).init({"scale": jnp.ones(3)}).nu["scale"].shape == (3,)


def test_a_regex_of_adamws_matrices_that_matches_no_weight_is_refused():
    with pytest.raises(UserError, match="adamw_on: 'embd' matches no trained weight's path; paths look like mlp/up"):
        zerojax.muon(1e-3, adamw_on="embd").init({"mlp": {"up": jnp.ones((8, 8))}})
