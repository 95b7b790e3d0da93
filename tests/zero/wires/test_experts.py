"""Checks where experts are stored, gathered and summed. This module tests zerojax.zero.wires.experts."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.zero import stages
from zerojax.zero.weights import gather
from zerojax.zero.wires import experts

SHAPE = (8, 16, 24)


def partition(mesh, stage, spec=P("expert")):
    state = {
        "params": {
            "experts": jax.ShapeDtypeStruct(SHAPE, jnp.float32),
            "dense": jax.ShapeDtypeStruct((32, 8), jnp.float32),
        }
    }
    return stages.partition_state(state, mesh=mesh, stage=stage, min_size=0, overrides=[("experts", spec)])


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "sizes", [{"expert": 2}, {"expert": 8}, {"context": 4, "expert": 8}, {"replica": 2, "context": 2, "expert": 2}]
)
def test_an_expert_stays_and_the_stage_shards_it_over_what_is_left(sizes, stage):
    mesh = mesh_lib.make_mesh(**sizes)
    placed = partition(mesh, stage).placements
    own, dense, sharded = placed["params/experts"], placed["params/dense"], stages.STAGES[stage]
    ways, left = sizes["expert"], mesh_lib.size(mesh, mesh_lib.STATE) // sizes["expert"]
    whole, part = (8 // ways, 16, 24), (8 // ways, 16 // left, 24)
    assert own.is_experts and not dense.is_experts and isinstance(own.wire, experts.ToExperts)
    for name, is_part in (
        ("used", False),
        ("stored", sharded.params),
        ("grad", sharded.grads),
        ("update", sharded.opt_state),
    ):
        assert getattr(own, name).shard_shape(SHAPE) == (part if is_part else whole), name
        assert gather.local_shape(SHAPE, getattr(own, name)) == (part if is_part else whole), name
    # Dense weights are sharded over all devices that share the state, whatever lives along them.
    assert dense.stored.shard_shape((32, 8))[0] == (32 // (left * ways) if sharded.params else 32)


def test_a_mesh_without_the_axis_takes_no_notice_of_it():
    mesh = mesh_lib.make_mesh(model=2)
    one, other = (partition(mesh, 3, spec).placements for spec in (P("expert", None, "model"), P(None, None, "model")))
    assert one == other


def test_experts_that_are_not_the_first_dim_are_refused():
    with pytest.raises(UserError, match=r"^expert: the override of params/experts shards a dim after the first"):
        experts.check(partition(mesh_lib.make_mesh(expert=2), 3, P(None, "expert")), jnp.float32)


def test_a_load_below_one_is_refused():
    with pytest.raises(UserError, match="expert_load: must be at least 1"):
        experts.ToExperts(load=0.5).marked(partition(mesh_lib.make_mesh(expert=2), 3), "", "", jnp.float32)
