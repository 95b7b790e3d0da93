"""Checks the table of stages and the rule that picks the dim. This module tests zerojax.zero.stages."""

import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.optim import master_weights
from zerojax.zero import stages, state_bytes

FAST = hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 7, 8, 16, 24, 64]), max_size=4).map(tuple)
NAMES = st.sampled_from(["a", "b", "kernel", "scale"])
PARAMS = st.dictionaries(NAMES, st.recursive(SHAPES, lambda x: st.dictionaries(NAMES, x, min_size=1)), min_size=1)
WAYS = st.sampled_from([1, 2, 3, 4, 8])
MATRICES = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)  # noqa: E731

# name -> (transformation, the trees within its state that mirror params)
ADAM_TREES = lambda adam: [adam.mu, adam.nu]  # noqa: E731
TRANSFORMATIONS = {
    "adamw": (optax.adamw(1e-3), lambda s: ADAM_TREES(s[0])),
    "master": (
        master_weights.with_master_weights(optax.adamw(1e-3)),
        lambda s: [s.master, *ADAM_TREES(s.inner[0])],
    ),
    "chain": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), lambda s: ADAM_TREES(s[1][0])),
    "masked": (optax.masked(optax.adam(1e-3), MATRICES), lambda s: ADAM_TREES(s.inner_state[0])),
    "multi_transform": (
        optax.multi_transform(
            {"adam": optax.adam(1e-3), "momentum": optax.sgd(1e-3, momentum=0.9)},
            lambda params: jax.tree.map(lambda p: "adam" if p.ndim >= 2 else "momentum", params),
        ),
        lambda s: [
            *ADAM_TREES(s.inner_states["adam"].inner_state[0]),
            s.inner_states["momentum"].inner_state[0].trace,
        ],
    ),
    "injected": (
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        lambda s: ADAM_TREES(s.inner_state[0]),
    ),
}


def make_mesh(data: int, replica: int = 1, model: int = 1):
    return mesh_lib.make_mesh(replica, data, model, devices=jax.devices()[: data * replica * model])


def abstract_state(shapes, tx, dtype=jnp.float32):
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=is_shape)
    return jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=tx), params)


def data_dims(spec: P) -> list[int]:
    return [dim for dim, entry in enumerate(spec) if entry == "data" or (isinstance(entry, tuple) and "data" in entry)]


def assert_valid(state, part):
    """Checks that every sharding divides its array, which XLA requires."""
    for path, leaf in tree.flatten(part.abstract_state):
        leaf.sharding.shard_shape(leaf.shape)
        assert len(data_dims(leaf.sharding.spec)) <= 1, path
    assert jax.tree.structure(part.specs) == jax.tree.structure(part.shardings) == jax.tree.structure(state)


@FAST
@hypothesis.given(SHAPES, st.integers(1, 9), st.data())
def test_shard_dim_is_the_first_free_dim_that_divides(shape, ways, data):
    base = P(*data.draw(st.lists(st.sampled_from([None, "model"]), max_size=len(shape))))
    dim = stages.shard_dim(shape, base, ways)
    free = [d for d in range(len(shape)) if d >= len(base) or base[d] is None]
    assert dim == next((d for d in free if shape[d] % ways == 0), None)
    assert dim == stages.shard_dim(list(shape), base, ways)


def test_shard_dim_leaves_empty_dims_alone():
    assert stages.shard_dim((0, 8), P(), 8) == 1
    assert stages.shard_dim((), P(), 8) is None


@FAST
@hypothesis.given(
    PARAMS,
    WAYS,
    st.sampled_from(list(stages.STAGES)),
    st.sampled_from(list(TRANSFORMATIONS)),
    st.sampled_from([0, 16, 500]),
    st.sampled_from(["whole", "pad"]),
    st.data(),
)
def test_all_leaves_of_one_weight_are_sharded_on_one_dim(shapes, ways, stage, name, min_size, indivisible, data):
    """Params, master, moments and gradients, for every stage, optimizer and shape, overrides included."""
    tx, mirrors = TRANSFORMATIONS[name]
    dtype = jnp.bfloat16 if name == "master" else jnp.float32
    state = abstract_state(shapes, tx, dtype)
    weights = dict(tree.flatten(state.params))
    chosen = data.draw(st.sampled_from(sorted(weights)))
    ends = [d for d, n in enumerate(weights[chosen].shape) if n % ways == 0]
    override = data.draw(st.sampled_from([None, P(), *(P(*[None] * d, "data") for d in ends)]))
    overrides = [] if override is None else [(f"^params/{chosen}$", override)]
    part = stages.partition_state(
        state, mesh=make_mesh(ways), stage=stage, min_size=min_size, indivisible=indivisible, overrides=overrides
    )
    assert_valid(state, part)
    roles_sharded = stages.STAGES[stage]
    for path, spec in tree.flatten(part.specs.params):
        placement = part.placements[f"params/{path}"]
        sharded = part.leaves[f"params/{path}"].sharded
        assert (
            data_dims(spec) == data_dims(placement.stored.spec) == (data_dims(sharded) if roles_sharded.params else [])
        )
        assert data_dims(placement.grad.spec) == (data_dims(sharded) if roles_sharded.grads else [])
        assert data_dims(placement.opt_state.spec) == (data_dims(sharded) if roles_sharded.opt_state else [])
        assert data_dims(placement.used.spec) == []
    for mirror in mirrors(part.specs.opt_state):
        for path, spec in tree.flatten(mirror):
            assert spec == part.placements[f"params/{path}"].opt_state.spec
    for mirror in mirrors(part.abstract_state.opt_state):
        stored = dict(tree.flatten(part.abstract_state.params))
        assert all(leaf.shape == stored[path].shape for path, leaf in tree.flatten(mirror))
    if override is not None:
        assert part.leaves[f"params/{chosen}"].sharded == override


@hypothesis.settings(FAST, max_examples=25)
@hypothesis.given(PARAMS, WAYS, st.sampled_from([1, 2, 3]), st.sampled_from([0, 20]), st.sampled_from(["whole", "pad"]))
def test_a_leaf_is_sharded_unless_a_reason_is_given(shapes, ways, stage, min_size, indivisible):
    state = abstract_state(shapes, optax.adam(1e-3))
    mesh = make_mesh(ways)
    part = stages.partition_state(state, mesh=mesh, stage=stage, min_size=min_size, indivisible=indivisible)
    for path, leaf in tree.flatten(state.params):
        decided, reason = part.leaves[f"params/{path}"], part.kept_whole.get(f"params/{path}")
        divides = any(n % ways == 0 for n in leaf.shape)
        if ways == 1:
            assert reason == "data axis of 1"
        elif leaf.size < min_size or not leaf.shape:
            assert reason == f"fewer than {min_size} elements"
        elif not divides and indivisible == "whole":
            assert reason == f"no dim of {leaf.shape} divides by data={ways}"
        else:
            assert reason is None and len(data_dims(decided.sharded)) == 1
            assert bool(decided.padding) == (not divides)
        longest = max(leaf.shape, default=0)
        added = [extra for extra in decided.padding if extra]
        assert added in ([], [-longest % ways])


@hypothesis.settings(FAST, max_examples=12)
@hypothesis.given(PARAMS, WAYS, st.sampled_from(list(stages.STAGES)), st.booleans())
def test_factored_moments_have_valid_shardings_beside_any_override(shapes, ways, stage, overridden):
    state = abstract_state(shapes, optax.adafactor(1e-3, min_dim_size_to_factor=4))
    matrices = [path for path, leaf in tree.flatten(state.params) if leaf.ndim >= 2 and leaf.shape[1] % ways == 0]
    overrides = [(f"{re.escape(path)}$", P(None, "data")) for path in matrices] if overridden else []
    hypothesis.assume(not overridden or len(matrices) == len(jax.tree.leaves(state.params)))
    part = stages.partition_state(state, mesh=make_mesh(ways), stage=stage, min_size=0, overrides=overrides)
    assert_valid(state, part)


def test_stage_0_shards_nothing_and_pads_nothing():
    state = abstract_state({"kernel": (64, 64), "odd": (67, 3)}, optax.adam(1e-3))
    part = stages.partition_state(state, mesh=make_mesh(8), stage=0, min_size=0, indivisible="pad")
    assert {str(spec) for spec in jax.tree.leaves(part.specs)} == {str(P())}
    assert jax.tree.map(lambda leaf: leaf.shape, part.abstract_state) == jax.tree.map(lambda leaf: leaf.shape, state)


def test_the_threshold_counts_elements():
    state = abstract_state({"below": (1023,), "at": (1024,), "matrix": (8, 128)}, optax.adam(1e-3))
    part = stages.partition_state(state, mesh=make_mesh(8))
    assert part.kept_whole == {"params/below": "fewer than 1024 elements"}
    assert {path: leaf.spec for path, leaf in part.leaves.items() if leaf.role == "params"} == {
        "params/below": P(),
        "params/at": P("data"),
        "params/matrix": P("data"),
    }


class OwnState(TrainState):
    averages: dict
    momentum: dict
    statistics: dict


def own_state(shapes):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    fields = {"averages": {"net": params}, "momentum": params, "statistics": {"mean": params["kernel"]}}
    return jax.eval_shape(
        lambda params, fields: OwnState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), **fields),
        params,
        fields,
    )


@pytest.mark.parametrize("stage", stages.STAGES)
@pytest.mark.parametrize("indivisible", stages.INDIVISIBLE)
def test_arrays_of_the_users_own_for_each_weight_are_sharded_as_moments(stage, indivisible):
    state = own_state({"kernel": (64, 64), "odd": (67, 65), "small": (8,)})
    part = stages.partition_state(state, mesh=make_mesh(8), stage=stage, indivisible=indivisible)
    sharded = P("data") if stages.STAGES[stage].opt_state else P()
    for place in ("averages/net", "momentum"):
        found = {path: part.leaves[f"{place}/{path}"] for path in ("kernel", "odd", "small")}
        assert {path: leaf.spec for path, leaf in found.items()} == {"kernel": sharded, "odd": P(), "small": P()}
        assert not any(leaf.padding for leaf in found.values())
        assert part.abstract_state.averages["net"]["odd"].shape == (67, 65)
    table = state_bytes.bytes_per_device(part)
    assert table["opt_state"] == sum(
        4 * np.prod(leaf.sharding.shard_shape(leaf.shape))
        for tree_of in (part.abstract_state.averages, part.abstract_state.momentum)
        for leaf in jax.tree.leaves(tree_of)
    )


@pytest.mark.parametrize("stage", stages.STAGES)
@pytest.mark.parametrize("trainable", ["", "odd", "kernel"])
def test_every_sharding_of_a_padded_run_divides_the_shape_of_its_weight(stage, trainable):
    state = own_state({"kernel": (64, 64), "odd": (67, 65)})
    part = stages.partition_state(state, mesh=make_mesh(6), stage=stage, indivisible="pad", trainable=trainable)
    for weight in part.placements.values():
        for sharding in (weight.stored, weight.used, weight.grad, weight.opt_state, weight.update):
            sharding.shard_shape(weight.shape)  # raises otherwise


def test_leaves_that_stay_replicated_are_told_if_a_sharded_one_is_no_larger():
    state = own_state({"kernel": (64, 64), "odd": (67, 65), "small": (8,)})
    reason = "no dim of (67, 65) divides by data=8"
    part = stages.partition_state(state, mesh=make_mesh(8), stage=1)
    weights = {"params/odd": reason, "params/small": "fewer than 1024 elements"}
    assert part.kept_whole == {**weights, "statistics/mean": "neither weight nor moment"}
    padded = stages.partition_state(state, mesh=make_mesh(8), stage=3, indivisible="pad").kept_whole
    del weights["params/odd"]
    assert padded == {
        **weights,
        "statistics/mean": "neither weight nor moment",
        "averages/net/odd": reason,
        "momentum/odd": reason,
    }
    assert "statistics/mean" not in stages.partition_state(state, mesh=make_mesh(8), stage=0).kept_whole


def test_moments_in_one_vector_are_told_where_it_does_not_divide():
    state = abstract_state({"kernel": (64, 64), "odd": (67, 3)}, optax.flatten(optax.adam(1e-3)))
    part = stages.partition_state(state, mesh=make_mesh(8))
    told = {path: reason for path, reason in part.kept_whole.items() if path.startswith("opt_state")}
    assert told == dict.fromkeys(("opt_state/0/mu", "opt_state/0/nu"), "no dim of (4297,) divides by data=8")


def test_a_role_of_the_users_own_is_kept_though_a_weight_has_the_name():
    state = own_state({"kernel": (64, 64)})
    roles = [("(^|/)averages/", "other"), *stages.ROLES]
    part = stages.partition_state(state, mesh=make_mesh(8), roles=roles)
    assert part.leaves["averages/net/kernel"].spec == P() and part.leaves["momentum/kernel"].spec == P("data")
    assert part.kept_whole["averages/net/kernel"] == "neither weight nor moment"


def test_the_first_override_found_wins_for_a_weight_and_all_that_belongs_to_it():
    state = abstract_state({"a": {"kernel": (64, 64)}, "b": {"kernel": (64, 64)}, "c": (64, 64)}, optax.adam(1e-3))
    overrides = [("a/kernel", P(None, "data")), ("kernel", P()), ("a/kernel", P("data"))]
    part = stages.partition_state(state, mesh=make_mesh(8), overrides=overrides)
    for role in ("params", "opt_state/0/mu", "opt_state/0/nu"):
        found = {path: part.leaves[f"{role}/{path}"].spec for path in ("a/kernel", "b/kernel", "c")}
        assert found == {"a/kernel": P(None, "data"), "b/kernel": P(), "c": P("data")}
    assert part.kept_whole == {"params/b/kernel": "override"}


@pytest.mark.parametrize(("shape", "base", "sharded"), [((64, 64), P(None, "model"), P("data", "model"))])
@pytest.mark.parametrize("stage", stages.STAGES)
def test_the_stage_adds_data_to_an_override_of_other_axes(stage, shape, base, sharded):
    mesh = make_mesh(2, model=2)
    state = abstract_state({"kernel": shape}, optax.adam(1e-3))
    part = stages.partition_state(state, mesh=mesh, stage=stage, overrides=[("kernel", base)])
    roles_sharded = stages.STAGES[stage]
    assert part.leaves["params/kernel"].spec == (sharded if roles_sharded.params else base)
    assert part.leaves["opt_state/0/mu/kernel"].spec == (sharded if roles_sharded.opt_state else base)
    assert part.placements["params/kernel"].used.spec == base


def test_a_base_that_takes_every_dim_keeps_the_leaf_as_it_is():
    state = abstract_state({"kernel": (64, 64)}, optax.adam(1e-3))
    mesh = mesh_lib.make_mesh(replica=2, data=2, model=2)
    part = stages.partition_state(state, mesh=mesh, overrides=[("kernel", P("replica", "model"))])
    assert part.leaves["params/kernel"].spec == P("replica", "model")
    assert "params/kernel" in part.kept_whole


def test_an_override_may_shard_a_dim_over_two_axes():
    state = abstract_state({"kernel": (64, 63)}, optax.adam(1e-3))
    part = stages.partition_state(
        state, mesh=make_mesh(2, model=2), overrides=[("kernel", P(("model", "data")))], stage=2
    )
    assert part.leaves["opt_state/0/nu/kernel"].spec == P(("model", "data"))
    assert part.leaves["params/kernel"].spec == P("model")


def test_the_roles_of_nnx_variables_follow_their_types():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(64, 64, rngs=rngs)
            self.norm = nnx.BatchNorm(2048, rngs=rngs)

    def init():
        model = Net(nnx.Rngs(0))
        return {"model": model, "opt_state": nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param).opt_state}

    part = stages.partition_state(nnx.eval_shape(init), mesh=make_mesh(8))
    role = {path.removesuffix("/value"): leaf.role for path, leaf in part.leaves.items()}
    assert role["model/linear/kernel"] == role["model/norm/scale"] == "params"
    assert role["model/norm/mean"] == "other"
    assert all(found == "opt_state" for path, found in role.items() if path.startswith("opt_state"))


def test_a_role_of_ones_own_makes_a_weight_of_any_nnx_variable():
    class Table(nnx.Variable):
        pass

    state = {"params": {"table": Table(jnp.zeros((64, 64)))}}
    with pytest.raises(UserError, match="no leaf has the role 'params'; pass roles="):
        stages.partition_state(state, mesh=make_mesh(8))
    part = stages.partition_state(state, mesh=make_mesh(8), roles=[("table", "params"), *stages.ROLES])
    assert [leaf.role for leaf in part.leaves.values()] == ["params"]


def test_two_leaves_of_one_path_are_refused():
    params = {"a/b": jnp.zeros((8, 8)), "a": {"b": jnp.zeros((8, 8))}}
    with pytest.raises(
        UserError, match=r"^params/a/b: is the path of 2 leaves of the state, .*; rename the key with a '/'"
    ):
        stages.partition_state({"params": params}, mesh=mesh_lib.make_mesh(), stage=1)


def test_roles_may_be_given_by_regex():
    state = {"weights": {"w": jnp.zeros((64, 64))}, "momentum": {"w": jnp.zeros((64, 64))}, "stats": jnp.zeros((4096,))}
    with pytest.raises(UserError, match="no leaf has the role 'params'"):
        stages.partition_state(state, mesh=make_mesh(8))
    roles = [("^weights", "params"), ("^momentum", "opt_state")]
    part = stages.partition_state(state, mesh=make_mesh(8), stage=2, roles=roles)
    assert {path: leaf.spec for path, leaf in part.leaves.items()} == {
        "weights/w": P(),
        "momentum/w": P("data"),
        "stats": P(),
    }


BAD = {
    "stage 4": ({"stage": 4}, r"^stage: must be one of 0, 1, 2, 3, and is 4$"),
    "choice": ({"indivisible": "drop"}, r"^indivisible: must be one of whole, pad, and is 'drop'"),
    "no match": ({"overrides": [("absent", P())]}, r"'absent' matches no weight's path; paths look like params/"),
    "axis": (
        {"overrides": [("kernel", P("tensor"))]},
        r"names \['tensor'\]; the mesh has \['replica', 'data', 'context', 'model'\]",
    ),
    "dims": ({"overrides": [("kernel", P(None, None, "data"))]}, r"has 3 dims, and the leaf has shape \(64, 63\)"),
    "divide": (
        {"overrides": [("kernel", P(None, "data"))]},
        r"shards dim 1 of \(64, 63\) in 8, which does not divide 63",
    ),
    "pair": ({"overrides": ["kernel"]}, r"overrides: each is a pair \(path regex, PartitionSpec\)"),
    "string": ({"overrides": [("kernel", "data")]}, r"overrides: each is a pair \(path regex, PartitionSpec\)"),
    "regex": ({"overrides": [("(", P())]}, r"overrides: '\(' is not a regex"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_in_one_line(name):
    options, message = BAD[name]
    state = abstract_state({"kernel": (64, 63)}, optax.adam(1e-3))
    with pytest.raises(UserError, match=message) as caught:
        stages.partition_state(state, mesh=make_mesh(8), **options)
    assert "\n" not in str(caught.value)


def test_a_mesh_without_a_data_axis_is_refused():
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    with pytest.raises(UserError, match=r"needs an axis named 'data', and has \('x',\)"):
        stages.partition_state(abstract_state({"kernel": (64,)}, optax.adam(1e-3)), mesh=mesh)


def test_nothing_is_allocated():
    huge = abstract_state({"kernel": (1 << 20, 1 << 20)}, optax.adam(1e-3))
    part = stages.partition_state(huge, mesh=make_mesh(8), stage=3)
    stored = part.abstract_state.params["kernel"]
    assert math.prod(stored.sharding.shard_shape(stored.shape)) == (1 << 40) // 8


def test_an_axis_shards_one_dim():
    for spec in (P("data", "data"), P(("data", "data")), (("model", "data"), "data")):
        with pytest.raises(UserError, match=r"^overrides: .* of params/\S+ names 'data' twice"):
            stages.partition_state(
                abstract_state({"kernel": (64, 64)}, optax.adam(1e-3)), mesh=make_mesh(8), overrides=[("kernel", spec)]
            )


BAD_ROLES = {
    "no match": ([("zzz", "params")], r"^roles: 'zzz' matches no leaf's path; paths look like "),
    "no role": (
        [("params", "param")],
        r"^roles: 'param', the role of 'params', is not known; did you mean 'params'\?$",
    ),
    "no regex": ([("(", "params")], r"^roles: '\(' is not a regex"),
    "no pair": (["params"], r"^roles: each is a pair \(path regex, role\), and one is 'params'$"),
}


@pytest.mark.parametrize("name", BAD_ROLES)
def test_roles_that_fit_nothing_are_refused(name):
    roles, message = BAD_ROLES[name]
    with pytest.raises(UserError, match=message):
        stages.partition_state(abstract_state({"kernel": (64, 64)}, optax.adam(1e-3)), mesh=make_mesh(8), roles=roles)
