"""Checks the programs of stages. This module tests zerojax.zero.pipeline.stage_programs; test_step runs them."""

import jax
import pytest
from pipelines import Net, abstract, batch_of, prepared

import zerojax
from zerojax.errors import UserError
from zerojax.zero.pipeline import order


def test_each_program_reads_what_came_before_it_and_adds_up_its_own_gradients():
    (_, partition), step = prepared({"pipe": 2}, shard=abstract, schedule="1f1b")
    found = step.programs(jax.tree.map(lambda leaf: leaf[0], batch_of(0)))
    sums = [path for program in found.programs.values() for path in program.sums]
    assert sorted(sums) == sorted(partition.placements)
    known = {*found.paths, *found.constants}
    for key in [(order.FORWARD, 0), (order.FORWARD, 1), (order.BACKWARD, 1), (order.BACKWARD, 0)]:
        program = found.programs[key]
        assert set(program.reads) <= known
        known |= set(program.writes)
        homes = {partition.pipeline.homes[path] for path in program.sums}
        assert homes == ({program.group} if key[0] == order.BACKWARD else set())


def test_a_loss_that_renews_the_state_is_refused():
    def loss(params, batch, state):
        scores = Net().apply({"params": params}, batch["tokens"])
        return scores.mean(), {"state": {"step": state.step + 1}}

    (_, partition), _ = prepared({"pipe": 2}, shard=abstract, schedule="1f1b")
    how = {"blocks": r"block_\d+", "heads": "head", "grad_accum": 4, "reduce_dtype": "float32"}
    step = zerojax.make_train_step(loss, partition, batch_specs=partition.pipeline.pipeline.batch_specs, **how)
    with pytest.raises(UserError, match="pipe: the loss returns the state's field 'step'"):
        step.programs(jax.tree.map(lambda leaf: leaf[0], batch_of(0)))


def test_inner_stages_and_groups_whose_layers_are_equal_have_one_program_each():
    _, step = prepared({"pipe": 4}, 1, shard=abstract, schedule="1f1b", net=Net(layers=4))
    alike: dict = {}
    found = step.stand_ins(step.micro(jax.eval_shape(lambda: batch_of(0))), None, alike)
    runs = {key: program.run for key, program in found.programs.items()}
    for kind in (order.FORWARD, order.BACKWARD):  # of the first, the inner and the last stage
        assert runs[kind, 1] is runs[kind, 2] and len({id(runs[kind, stage]) for stage in range(4)}) == 3
    updates = step.update_programs(found, alike)
    assert updates[1] == updates[2] and len({own for two in updates for own in two}) == 6


@pytest.mark.long
def test_where_nothing_runs_equal_programs_are_compiled_once_and_say_the_same():
    _, step = prepared({"pipe": 4}, 1, shard=abstract, schedule="1f1b", net=Net(layers=4))
    micro = step.micro(jax.eval_shape(lambda: batch_of(0)))
    alike: dict = {}
    found, own = step.stand_ins(micro, None, alike), step.programs(micro)
    assert len({id(program.run) for program in found.programs.values()}) == len(alike) < len(own.programs)
    for key, program in own.programs.items():
        other = found.programs[key]
        assert (other.group, other.reads, other.writes) == (program.group, program.reads, program.writes)
        sums = [{path: (like.shape, like.sharding.spec) for path, like in own.sums.items()} for own in (other, program)]
        assert sums[0] == sums[1]
    assert {n: found.nbytes(n) for n in found.values} == {n: own.nbytes(n) for n in own.values}
    updates = step.update_programs(found, alike)
    assert len(updates) == 4 and all(len(two) == 2 for two in updates)
