"""Checks what a train step refuses. This module tests zerojax.zero.sharded_batch.arguments."""

import functools

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pipelines
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.errors import UserError
from zerojax.zero.sharded_batch import arguments

BATCH = np.ones((8, 64), np.float32)
TX = optax.adam(1e-3)


def init():
    return TrainState.create(apply_fn=None, params={"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}, tx=TX)


def loss_fn(params, batch, state):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def shard(init=init, mesh=None, **options):
    return zerojax.shard_train_state(init, mesh=mesh or zerojax.make_mesh(), min_size=0, **options)


@pytest.mark.parametrize("value", [-1.0, float("nan"), "x", None, True])
def test_a_limit_that_would_turn_gradients_round_is_refused(value):
    with pytest.raises(UserError, match=r"^clip_norm: must be (above 0, or 0 for no limit|a number), and is "):
        zerojax.make_train_step(loss_fn, shard()[1], clip_norm=value)


def test_a_loss_of_other_arguments_is_refused_with_those_that_it_is_given():
    state, partition = shard()
    takes_two = lambda params, batch: loss_fn(params, batch, None)  # noqa: E731
    for compare in (functools.partial(zerojax.compare_sums, state=state, batch=BATCH), zerojax.make_train_step):
        with pytest.raises(
            UserError, match=r"^loss_fn: is called as loss_fn\(params, batch, state\), and takes \(params, batch\);"
        ):
            compare(takes_two, partition)
    zerojax.make_train_step(lambda *all: loss_fn(*all), partition)


@pytest.mark.parametrize("name", ["compute_dtype", "reduce_dtype", "accum_dtype"])
@pytest.mark.parametrize("dtype", ["x", "\ud800", jnp.int8])
def test_a_dtype_that_is_none_or_not_floating_is_refused(name, dtype):
    partition = shard()[1]
    with pytest.raises(UserError, match=rf"^{name}: must be "):
        zerojax.make_train_step(loss_fn, partition, **{name: dtype})
    if name == "compute_dtype":
        with pytest.raises(UserError, match=rf"^{name}: must be "):
            zerojax.where_used(loss_fn, partition.placements, compute_dtype=dtype)


def test_an_infinite_limit_is_none():
    assert [arguments.clip_norm(value) for value in (0, 1, np.float32(2), float("inf"))] == [0.0, 1.0, 2.0, 0.0]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_a_number_of_passes_is_whole_and_above_0(value):
    with pytest.raises(UserError, match=r"^grad_accum: must be (at least 1|a whole number), and is "):
        zerojax.make_train_step(loss_fn, shard()[1], grad_accum=value)


def test_an_empty_batch_is_refused():
    state, partition = shard()
    for accum, batch in ((1, BATCH[:0]), (2, jnp.ones((2, 0, 64)))):
        with pytest.raises(UserError, match=r"^batch/: has no examples, its shape is \(.*0, 64\)"):
            zerojax.make_train_step(loss_fn, partition, grad_accum=accum).trace(state, batch)
    with pytest.raises(UserError, match=r"^batch/x: has no elements in dim 1, its shape is \(64, 0\); omit it"):
        zerojax.make_train_step(loss_fn, partition).trace(state, {"x": jnp.ones((64, 0)), "y": BATCH})


def test_integer_weights_are_refused_unless_they_are_frozen():
    def with_integers():
        state = init()
        return state.replace(params={**state.params, "table": jnp.arange(64)})

    with pytest.raises(
        UserError, match=r"^params/table: is int32 and a weight, and only floating weights have gradients"
    ):
        zerojax.make_train_step(loss_fn, shard(with_integers)[1])
    state, partition = shard(with_integers, trainable="^(w|b)$")
    state, metrics = zerojax.make_train_step(loss_fn, partition)(state, BATCH)
    assert state.params["table"].tolist() == list(range(64)) and np.isfinite(metrics["loss"])


@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
def test_a_donated_state_is_refused_before_it_reaches_xla(reduce_dtype, tmp_path):
    old, partition = shard()
    train_step = zerojax.make_train_step(loss_fn, partition, reduce_dtype=reduce_dtype)
    new, _ = train_step(old, BATCH)
    saver = zerojax.Checkpointer(tmp_path)
    reads = (
        train_step,
        lambda state, _: saver.save(1, state),
        lambda state, _: zerojax.shard_train_state(state, mesh=partition.mesh),
    )
    for read in reads:
        with pytest.raises(UserError, match=r"^state: step was deleted, .* use the state that the step returned"):
            read(old, BATCH)
    with pytest.raises(UserError, match=r"^state: step has no values while jit, grad, vmap or scan traces"):
        jax.jit(lambda state: saver.save(1, state))(new)
    newer, metrics = train_step(new, BATCH)
    assert int(newer.step) == 2 and np.isfinite(metrics["loss"])
    for call in (shard, lambda: train_step(newer, BATCH)):
        with jax.disable_jit(), pytest.raises(UserError, match=r"^JAX_DISABLE_JIT: is True, with which"):
            call()
        line = r"^jax.set_mesh: the mesh is x 4 of devices \[0, 1, 2, 3\], and the state's is replica 1 x data 8"
        with jax.set_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])), pytest.raises(UserError, match=line):
            call()


MESHES = {
    "fewer devices": (lambda: zerojax.make_mesh(devices=jax.devices()[:4]), "is sharded over the mesh"),
    "another shape": (lambda: zerojax.make_mesh(replica=2), "has the sharding"),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_state_of_another_mesh_is_refused(name):
    make, words = MESHES[name]
    other, _ = shard(mesh=make())
    with pytest.raises(UserError, match=rf"^state: \S+ {words}"):
        zerojax.make_train_step(loss_fn, shard()[1])(other, BATCH)


def test_a_state_of_another_stage_model_or_optimizer_is_refused():
    _, partition = shard()
    train_step = zerojax.make_train_step(loss_fn, partition)
    others = {
        r"params/\w has the sharding": shard(stage=0)[0],
        r"static fields \(tx, apply_fn\)": shard(lambda: init().replace(tx=optax.adam(1e-3)))[0],
        r"params/b is not in it": init().replace(params={"w": jnp.ones((64, 64))}),
        r"b:? has shape \(32,\)": init().replace(params={"w": jnp.ones((64, 64)), "b": jnp.zeros(32)}),
    }
    for words, other in others.items():
        with pytest.raises(UserError, match=words):
            train_step(other, BATCH)


@pytest.mark.filterwarnings("ignore:mesh. model is 2, and no weight is sharded over")
@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
@pytest.mark.parametrize(
    "mesh",
    [
        lambda: jax.sharding.Mesh(jax.devices(), ("data",)),
        lambda: jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
        lambda: jax.sharding.Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model")),
    ],
    ids=["Mesh", "make_mesh", "with model"],
)
def test_a_mesh_with_a_data_axis_is_enough(mesh, reduce_dtype):
    def losses(mesh, spec):
        state, partition = shard(mesh=mesh)
        train_step, found = zerojax.make_train_step(loss_fn, partition, reduce_dtype=reduce_dtype), []
        batch = jax.device_put(arrays.normal(0, (8, 64)), jax.NamedSharding(mesh, spec))
        for _ in range(3):
            state, metrics = train_step(state, batch)
            found.append(float(metrics["loss"]))
        return found

    expected = losses(zerojax.make_mesh(), jax.P(("replica", "data")))
    np.testing.assert_allclose(losses(mesh(), jax.P("data")), expected, rtol=1e-6)


@pytest.mark.parametrize("leaf", ["a text", ["a", "text"], np.array(["a"]), np.array([None]), object(), len, 2**31])
@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
def test_a_batch_with_texts_is_refused_with_their_place(leaf, reduce_dtype):
    state, partition = shard()
    step = zerojax.make_train_step(loss_fn, partition, reduce_dtype=reduce_dtype)
    for call in (step, step.lower, step.trace):
        with pytest.raises(
            UserError, match=r"^batch/text(/0)?: is .*, and every leaf of a batch must be an array or a num"
        ):
            call(state, {"x": BATCH, "text": leaf})
    with pytest.raises(UserError, match=r"^state: "):
        step.lower(3, BATCH)


def test_a_batch_on_another_device_is_refused_with_the_call_that_moves_it():
    state, partition = shard()
    batch = jax.device_put(BATCH, jax.devices()[3])
    with pytest.raises(UserError, match=r"^batch/: is committed to 1 device\(s\), .* jax.device_put\(batch, partition"):
        zerojax.make_train_step(loss_fn, partition)(state, batch)


@pytest.mark.parametrize(
    "mesh, how",
    [
        ({"data": 2}, {"state_offload": {"optimizer": "host", "params": "host"}}),
        ({"pipe": 2}, {"schedule": "1f1b"}),
    ],
    ids=["params on the host", "pipe"],
)
def test_a_step_of_several_programs_explains_a_call_as_one_of_one_program_does(mesh, how):
    (state, _), step = pipelines.prepared(mesh, 3, shard=zerojax.shard_train_state, net=pipelines.Net(layers=2), **how)
    batch = pipelines.batch_of(0)
    elsewhere = jax.device_put(batch, jax.devices()[-1])
    for line, call in {
        r"^state: its static fields \(tx, apply_fn\) are not those": (state.replace(tx=TX), batch),
        r"^state: target is no leaf of the state that": (state.replace(target=np.ones(3)), batch),
        r"^batch/labels: is committed to 1 device\(s\), and the state is on 2": (state, elsewhere),
    }.items():
        with pytest.raises(UserError, match=line):
            step(*call)
    if "data" in mesh:
        with pytest.raises(
            UserError, match=r"^state: params/block_0/LayerNorm_0/bias is .*, and this step takes arrays"
        ):
            step(state.replace(params=jax.tree.map(np.asarray, state.params)), batch)
    jax.tree.leaves(state.params)[0].delete()
    with pytest.raises(UserError, match=r"^state: params/block_0/LayerNorm_0/bias was deleted"):
        step(state, batch)


def test_an_optimizer_that_needs_more_than_gradients_is_refused_with_what_it_needs():
    tx = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau())
    state, partition = shard(lambda: TrainState.create(apply_fn=None, params={"w": jnp.ones(64)}, tx=tx))
    step = zerojax.make_train_step(lambda params, batch, state: jnp.mean(batch @ params["w"]), partition)
    with pytest.raises(UserError, match=r"^state\.tx: its update needs 'value', .* zerojax\.where_used"):
        step.trace(state, BATCH)
