"""Each test plants one defect in a train step, compiles it for GPUs, and asks whether the findings name it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from compile_only import compile_plain, mesh, plain_state, plain_step, read, rules, staged
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.plan import findings

ALL_REDUCED = "gradients are all-reduced where the plan scatters them"
FLOAT32 = "weights are gathered in float32 where the arithmetic is 16-bit"
RESHARDED = "activations are resharded"
KEPT = "gathered weights are kept for the backward pass"
ANOTHER_DIM = "weights or gradients change the dim they are split on"
EVERY_PASS = "gradients are summed over devices in each of 4 passes"


def test_a_plain_data_parallel_step_has_no_findings():
    on = mesh()
    state = plain_state(on, split=P())
    assert rules(read(compile_plain(plain_step, state, on), state, on), state) == []


def test_a_constraint_that_makes_weights_whole_is_found_to_all_reduce_gradients_and_to_gather_float32():
    on = mesh()
    state = plain_state(on)

    def whole(params):
        return jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(on, P())), params)

    found = read(compile_plain(functools.partial(plain_step, used=whole), state, on), state, on)
    assert set(rules(found, state)) == {ALL_REDUCED, FLOAT32, KEPT}
    worst = next(f for f in findings.findings(found, planned=state) if f.rule == ALL_REDUCED)
    assert "block_" in worst.where and "zerojax.where_used" in worst.remedy
    assert worst.nbytes == 2 * 6 * 256 * 512 * 2 * 7 // 8


def test_a_dtype_given_by_the_user_overrules_the_programs():
    on = mesh()
    state = plain_state(on)

    def whole(params):
        return jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(on, P())), params)

    found = read(compile_plain(functools.partial(plain_step, used=whole), state, on), state, on)
    assert FLOAT32 not in rules(found, state, compute_dtype=jnp.float32)


def test_weights_kept_for_the_backward_pass_are_found_and_weights_gathered_again_are_not():
    on = mesh()
    state = plain_state(on)
    kept = read(compile_plain(plain_step, state, on), state, on)
    assert rules(kept, state) == [KEPT]
    assert "1.50 MiB" in findings.findings(kept, planned=state)[0].amount  # six kernels in bf16
    again, partition = staged(3)
    assert KEPT not in rules(again, partition.abstract_state)


def test_a_constraint_that_reshards_activations_is_found(monkeypatch):
    on = mesh()

    class Turned(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(512, use_bias=False, dtype=jnp.bfloat16, name="wide")(x)
            x = jax.lax.with_sharding_constraint(x, NamedSharding(on, P(None, "fsdp")))
            return nn.Dense(256, use_bias=False, dtype=jnp.bfloat16, name="narrow")(jnp.tanh(x))

    monkeypatch.setattr("compile_only.Net", Turned)
    state = plain_state(on, split=P())
    found = read(compile_plain(plain_step, state, on), state, on)
    assert RESHARDED in rules(found, state)


def test_weights_used_along_another_dim_than_they_are_stored_along_are_found():
    on = mesh()
    state = plain_state(on)

    def turned(params):
        return jax.tree.map(
            lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(on, P(None, "fsdp"))) if w.ndim > 1 else w,
            params,
        )

    found = read(compile_plain(functools.partial(plain_step, used=turned), state, on), state, on)
    listed = {f.rule: f for f in findings.findings(found, planned=state)}
    assert "kernel" in listed[ANOTHER_DIM].where and "zerojax.partition_state" in listed[ANOTHER_DIM].remedy


def test_gradients_that_are_whole_and_yet_summed_in_every_pass_are_found():
    found, partition = staged(1, grad_accum=4)
    assert EVERY_PASS in rules(found, partition.abstract_state, passes=4)
