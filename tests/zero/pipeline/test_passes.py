"""Checks what a trace of one pass says of its values. This module tests zerojax.zero.pipeline.passes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from pipelines import BLOCKS, HEADS, SPECS, Net, abstract, batch_of, loss_of, prepared

from zerojax import tree
from zerojax.errors import UserError
from zerojax.zero.blocks import block_settings
from zerojax.zero.pipeline import passes, segments
from zerojax.zero.sharded_batch import inputs, outputs


def test_each_param_and_each_gradient_has_a_number_and_a_stage():
    (_, partition), _ = prepared({"pipe": 2}, shard=abstract, schedule="1f1b")
    group = partition.pipeline.groups[0]
    loss = outputs.with_aux(functools.partial(loss_of, Net()), lambda state: 1.0)
    layout = inputs.Layout(group.mesh, 1, SPECS, by_device=True)
    one = passes.Pass(loss, group, block_settings.Blocks(BLOCKS, HEADS), layout, jnp.float32)
    micro = {name: leaf[0] for name, leaf in batch_of(0).items()}
    with jax.checking_leaks(), pytest.raises(UserError, match=r"^JAX_CHECK_TRACER_LEAKS: is True"):
        one.traced(micro)
    trace = one.traced(micro)
    cut = segments.of_trace(trace.inner, 2)
    assert set(trace.params) == set(trace.grads(cut)) == set(partition.placements)
    for path, number in trace.grads(cut).items():
        assert cut.writer(number) == min(cut.readers(trace.params[path])) == partition.pipeline.homes[path]
    (_, aux), _ = trace.results(cut)
    assert {path for path, _ in tree.flatten(aux["metrics"], is_leaf=passes.is_result)}
    embedding = trace.params["params/embed/embedding"]
    assert cut.readers(embedding) == [0, 1], "a tied embedding is read at both ends"
