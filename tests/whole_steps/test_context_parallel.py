"""Trains our families with rows in parts on devices along `mesh.context`, and compares with one device. This module tests what runs over
that axis together: rows, attention, sums, and the state that is sharded over it.
"""

import functools
import math

import numpy as np
import pytest
import runs
from jax.sharding import PartitionSpec as P

from zerojax import specs
from zerojax.errors import UserError
from zerojax.trainer import program

PLAIN = {"model__remat": "dots"}
LORA = {"lora__r": 4, "lora__target_modules": "all-linear"}
PACKED = {"data__task": "chat", "data__chat_template": "plain", "data__train_file": "tests/golden/crosses/train.jsonl"}
HOST = {"offload__optimizer": "host"}

# name -> (what is trained, (replica, data, context, model), how). Few run by default: those that share most of what the others have.
CASES = {
    "three axes, passes, tiles": (PLAIN, (1, 2, 2, 2), {"grad_accum": 2, "model__tile_tokens": 10}),
    "all devices, packed, stage 2": ({**PLAIN, **PACKED}, (1, 1, 8, 1), {"zero__stage": 2}),
    "stage 0": (PLAIN, (1, 1, 4, 1), {"zero__stage": 0}),
    "copies, stage 1, passes": (PLAIN, (2, 2, 2, 1), {"zero__stage": 1, "grad_accum": 2}),
    "stage 2": (PLAIN, (2, 1, 2, 2), {"zero__stage": 2, "grad_accum": 2}),
}
DEFAULT = 2
SUM_ORDER = 1e-5  # relative: the same float32 sums, taken in another order
EIGHT_BITS = 0.02  # relative: a sum in another order may round to another number of 8 bits


@pytest.fixture(scope="module")
def alone():
    """Returns f(what is trained) -> the same on one device at stage 0."""
    return functools.cache(lambda what: runs.trained(zero__stage=0, **dict(what)))


@pytest.mark.parametrize("name", runs.cases(CASES, long=list(CASES)[DEFAULT:]))
def test_mesh_context_gives_the_losses_of_one_device(name, alone):
    what, sizes, how = CASES[name]
    axes = dict(zip(("mesh__replica", "mesh__data", "mesh__context", "mesh__model"), sizes))
    found = runs.trained(math.prod(sizes), **what, **axes, **how)
    allowed = EIGHT_BITS if what.get("precision") == "fp8" else SUM_ORDER
    np.testing.assert_allclose(found, alone(tuple(what.items())), rtol=allowed)


def test_the_state_is_sharded_over_data_and_context_together():
    built = program.build(
        runs.config(mesh__data=2, mesh__context=2, mesh__model=2, zero__min_size=0), tokenizer_vocab=320
    )
    named = {frozenset(specs.axes(leaf.spec)) & {"data", "context"} for leaf in built.partition.leaves.values()}
    assert named == {frozenset(), frozenset({"data", "context"})}
    state, moments = (built.partition.leaves[f"{role}/layer_0/mlp/up/kernel"] for role in ("params", "opt_state/0/mu"))
    assert state.spec == moments.spec == P(("data", "context"), "model")


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"seq_len": 33},
            r"33 tokens of a row do not divide into 4 parts; set --config\.seq_len=36",
        ),
        (
            {"model__preset": "t5_test", "seq_len": 36},
            r"9 targets of a row do not divide into 4 parts; set --config\.seq_len=48",
        ),
    ],
)
def test_rows_that_do_not_divide_are_refused_with_a_length_that_does(settings, words):
    axes = {"mesh__data": 2, "mesh__context": 4}
    with pytest.raises(UserError, match=f"^config\\.mesh\\.context: {words}") as caught:
        program.build(runs.config(**axes, **settings), tokenizer_vocab=320)
    length = int(str(caught.value).rpartition("=")[2])
    assert program.build(runs.config(**axes, **{**settings, "seq_len": length}), tokenizer_vocab=320).way is not None
