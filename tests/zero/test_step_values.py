"""Checks that short forms and values of a step are one, and what each refuses. This module tests zerojax.zero.step_values."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.errors import UserError
from zerojax.zero import step_values
from zerojax.zero.wires import experts

MOST_ARGUMENTS = 10  # of `make_train_step`, whose features are fields of values


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = x + nn.Dense(64, name=f"block_{number}")(nn.relu(x))
        return nn.Dense(64, name="head")(x)


def loss_fn(params, batch, state):
    return jnp.mean(Net().apply({"params": params}, batch["x"]) ** 2)


def state_and_partition():
    params = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 64)))["params"]
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.sgd(0.1)), params)
    return zerojax.partition_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=0)


def lowered(passes=1, **how):
    partition = state_and_partition()
    rows = (passes, 16, 64) if passes > 1 else (16, 64)
    batch = {"x": jax.ShapeDtypeStruct(rows, jnp.float32), "weights": jax.ShapeDtypeStruct((3,), jnp.float32)}
    step = zerojax.make_train_step(loss_fn, partition, **{"batch_specs": [("weights", P())]} | how)
    return step.lower(partition.abstract_state, batch).as_text()


BLOCKS, F32, BF16 = r"block_\d", jnp.float32, jnp.bfloat16
WIRES = zerojax.PackedWires(weights="int8")
# By single fields, and by values: the same step.
FORMS = {
    "blocks": (
        {"blocks": BLOCKS, "heads": "head", "remat": "full", "reduce_dtype": F32},
        {"blocks": zerojax.Blocks(BLOCKS, heads="head", remat="full"), "sums": F32},
    ),
    "sums": (
        {"reduce_dtype": F32, "grad_accum": 2, "accum_dtype": BF16, "passes": 2},
        {"sums": zerojax.Sums(F32, grad_accum=2, accum_dtype=BF16), "passes": 2},
    ),
    "batch": (
        {"compute_dtype": BF16, "cast_batch": "weights"},
        {
            "compute_dtype": BF16,
            "batch_specs": [("weights", P())],
            "batch": zerojax.BatchLayout(cast_batch="weights", check_context=False),
        },
    ),
    "fp8": (
        {"blocks": BLOCKS, "reduce_dtype": F32, "compute_dtype": BF16, "fp8": zerojax.Fp8(filter="block_0")},
        {"blocks": BLOCKS, "sums": F32, "compute_dtype": zerojax.Fp8(filter="block_0", dtype=BF16)},
    ),
    "wires": (
        {"blocks": BLOCKS, "reduce_dtype": F32, "wires": WIRES},
        {"blocks": BLOCKS, "sums": F32, "wires": [("params/", WIRES)]},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_single_fields_and_values_make_one_program(name):
    fields, values = FORMS[name]
    passes = fields.get("passes", 1)
    assert lowered(**fields) == lowered(**values) != lowered(passes, grad_accum=passes)


def test_packed_wires_send_the_weights_that_a_row_finds():
    how = {"blocks": BLOCKS, "sums": F32}
    some, every, none = (lowered(wires=wires, **how) for wires in ([("block_0", WIRES)], WIRES, None))
    assert none.count("i8>") == 0 < some.count("i8>") < every.count("i8>")


def test_a_later_row_gives_experts_its_own_numbers():
    single = step_values.SingleWires(expert_load=1.5).rows()
    assert single == [("", experts.ToExperts(load=1.5))]


def test_a_feature_is_a_field_and_no_argument():
    named = [one for one in inspect.signature(zerojax.make_train_step).parameters.values() if one.name != "fields"]
    assert len(named) <= MOST_ARGUMENTS
    assert not step_values.SHORT_FORMS.keys() & {one.name for one in named}
    assert {one.name for one in named} == {"loss_fn", "partition", *step_values.ARGUMENTS}


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"reduce_dtyp": F32}, "unexpected keyword argument 'reduce_dtyp'; did you mean 'reduce_dtype'"),
        ({"grad_accum": "2"}, "grad_accum: must be a whole number, and is '2'"),
        ({"by_columns": None}, "by_columns: must be text, and is None"),
        ({"remat": 3}, "remat: must be text, and is 3"),
        ({"blocks": 3}, "blocks: must be text or a Blocks or None, and is 3"),
        ({"sums": 3}, "sums: must be a dtype or a Sums or None, and is 3"),
        ({"wires": [("", "int8")]}, "wires: '' needs a choice such as zerojax.PackedWires"),
        ({"wires": [("head", zerojax.PackedWires)]}, "wires: 'head' needs a choice such as zerojax.PackedWires"),
        ({"wires": [("nothing", WIRES)], "sums": F32}, "wires: 'nothing' finds no weight"),
        ({"wires": [("", zerojax.ByColumns())], "sums": F32}, "wires: '' of a ByColumns names no module"),
        ({"wires": [("head", zerojax.ToExperts())]}, "wires: 'head' of a ToExperts finds no weight"),
        ({"wires": [("head", zerojax.ToExperts(load="2"))]}, "expert_load: must be a number, and is '2'"),
        ({"wires": [("(", WIRES)]}, r"wires: '\(' is not a regex"),
        (
            {"sums": zerojax.Sums(F32), "reduce_dtype": BF16},
            "reduce_dtype: is .*bfloat16.*, and in Sums .*float32.*; pass it once",
        ),
        (
            {"blocks": zerojax.Blocks(BLOCKS, remat="full"), "remat": "none"},
            "remat: is 'none', and in Blocks 'full'; pass it once",
        ),
        (
            {"compute_dtype": zerojax.Fp8(), "fp8": zerojax.Fp8(first=1)},
            "fp8: is .*, and in SingleWires .*; pass it once",
        ),
        (
            {"compute_dtype": F32, "fp8": zerojax.Fp8(dtype=BF16)},
            "dtype: is .*float32.*, and in Fp8 .*bfloat16.*; pass it once",
        ),
        (
            {"wires": [("block_0", zerojax.PackedWires())]},
            "wires: PackedWires.. of 'block_0' sends weights as they are",
        ),
        ({"check_context": "no"}, "check_context: must be True or False, and is 'no'"),
    ],
)
def test_a_wrong_value_is_named(how, line):
    with pytest.raises(TypeError if "unexpected" in line else UserError, match=line):
        zerojax.make_train_step(loss_fn, state_and_partition(), **how)


def test_what_needs_one_program_says_so_itself():
    rows = [("head", zerojax.ByColumns()), ("", WIRES), ("", zerojax.ToExperts()), ("", zerojax.PackedWires())]
    needs = {pattern or type(choice).__name__: choice.one_program(pattern) for pattern, choice in rows[:3]}
    assert [name for name, need in needs.items() if need] == ["head", "PackedWires"]
    assert rows[3][1].one_program("") is None  # sends all as it is
    assert zerojax.Fp8().one_program() is None and zerojax.Fp8(recipe="delayed").one_program()


@pytest.mark.parametrize(("name", "value"), [("programs", "kinds"), ("activations", [(BLOCKS, P(None, "model"))])])
def test_a_loss_by_itself_refuses_what_only_a_step_can_do(name, value):
    with pytest.raises(UserError, match=f"^{name}: is for make_train_step alone"):
        zerojax.where_used(loss_fn, {}, blocks=zerojax.Blocks(BLOCKS, **{name: value}))


def test_stages_of_a_pipeline_and_programs_of_blocks_are_not_asked_for_together():
    params = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 64)))["params"]
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.sgd(0.1)), params)
    blocks = zerojax.Blocks(BLOCKS, programs="kinds")
    pipeline = zerojax.Pipeline(loss_fn, {"x": jax.ShapeDtypeStruct((8, 64), F32)}, blocks)
    partition = zerojax.partition_state(state, mesh=zerojax.make_mesh(pipe=2), stage=3, min_size=0, pipeline=pipeline)
    with pytest.raises(UserError, match=r"^programs: is 'kinds', and the stages of .pipe."):
        zerojax.make_train_step(loss_fn, partition, sums=zerojax.Sums(F32, grad_accum=2))


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (
            {"expert_load": 1.5, "reduce_dtype": F32},
            "expert_load: has no effect, because no weight is sharded over `expert`",
        ),
        ({"expert_load": 1.5, "expert_parts": 2}, "expert_load, expert_parts: have no effect"),
        ({"cast_batch": "weights"}, "cast_batch: has no effect, because nothing is cast without compute_dtype"),
        ({"batch": zerojax.BatchLayout(cast_batch=False)}, "cast_batch: has no effect"),
    ],
)
def test_what_nothing_reads_is_warned_of(how, line):
    with pytest.warns(UserWarning, match=line):
        zerojax.make_train_step(loss_fn, state_and_partition(), **how)
