"""Checks the count of operations against closed forms. This module tests zerojax.plan.flops."""

import compile_only
import context_costs
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from configs import base
from pallas_kernels import grouped
from zerojax import mesh
from zerojax.models.llama import model as llama
from zerojax.ops import context_attention
from zerojax.plan import flops
from zerojax.trainer import config, program
from zerojax.zero.gradients import accumulate

SIZES = st.integers(1, 40)


def total(*args, **kwargs):
    return sum(count(*args, **kwargs).values())


def count(function, *shapes, dtype=jnp.bfloat16):
    """Returns the operations of a function, by dtype."""
    return flops.count(jax.jit(function).trace(*[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]))


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
    SIZES, SIZES, SIZES, SIZES, st.sampled_from([(jnp.bfloat16, "bf16"), (jnp.float32, "fp32"), (jnp.int8, "fp8")])
)
def test_a_matmul_takes_two_operations_per_element_and_term(b, m, k, n, kind):
    dtype, name = kind
    found = count(lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), (b, m, k), (b, k, n), dtype=dtype)
    assert found == {name: 2.0 * b * m * k * n}


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2]))
def test_a_convolution_uses_its_kernel_once_per_output(c_in, c_out, window, groups):
    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "VALID", feature_group_count=groups)

    found = total(convolve, (2, groups * c_in, 8, 8), (groups * c_out, c_in, window, window))
    outputs = 2 * groups * c_out * (9 - window) ** 2
    assert found == 2.0 * outputs * c_in * window**2


def test_loops_count_times_their_length_and_branches_by_the_longest():
    one = 2.0 * 4**3
    square = jnp.ones((4, 4))
    assert total(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=7)[0], (4, 4)) == 7 * one
    assert total(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x @ x), (4, 4)) == 2 * one
    twice = jax.checkpoint(lambda x: jnp.sum(jnp.sin(x @ square) @ square))
    # The value is unused and the last matmul is not recomputed: one matmul forward, two backward.
    assert total(jax.grad(twice), (4, 4), dtype=jnp.float32) == 3 * one
    found = total(lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ c, x), (4, 4))
    assert found == one


def test_a_product_of_groups_counts_each_row_once_forward_and_twice_backward():
    """Its twin for other devices, the other branch, multiplies all rows by every matrix."""
    rows, groups, k, n = 64, 4, 16, 32
    sizes = jnp.full(groups, rows // groups, jnp.int32)

    def product(lhs, rhs):
        return jnp.sum(grouped.grouped_matmul(lhs, rhs, sizes, grouped.BY_PLATFORM))

    one = 2 * rows * k * n
    assert count(product, (rows, k), (groups, k, n)) == {"bf16": one}
    assert total(jax.grad(product, argnums=(0, 1)), (rows, k), (groups, k, n)) == pytest.approx(2 * one)


def test_a_product_of_groups_by_the_kernels_of_hopper_counts_the_same():
    gpus = Mesh(np.asarray(compile_only.gpus("h100")[:1]), ("data",))
    rows, groups, k, n = 64, 4, 64, 128
    sizes = np.full(groups, rows // groups, np.int32)

    def product(lhs, rhs):
        return jax.shard_map(
            lambda lhs, rhs: grouped.grouped_matmul(lhs, rhs, sizes, grouped.BY_PLATFORM),
            mesh=gpus,
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )(lhs, rhs)

    assert count(product, (rows, k), (groups, k, n)) == {"bf16": 2 * rows * k * n}


def test_work_inside_shard_map_counts_on_every_device():
    def local(x):
        return jax.shard_map(
            lambda x: x @ x.T, mesh=mesh.make_mesh(replica=2), in_specs=P("data"), out_specs=P("data")
        )(x)

    assert total(local, (8, 4)) == 8 * 2.0 * 2 * 4 * 2


@pytest.mark.parametrize("passes", [1, 3])
def test_accumulation_counts_every_pass(passes):
    step = accumulate.value_and_grad(lambda p, batch, _: (jnp.mean(batch @ p), {}), passes)
    assert total(lambda p, b: step(p, b, None), (4, 5), (passes, 6, 4)) == passes * 2 * 2.0 * 6 * 4 * 5


def trained(**settings):
    """Returns the operations of a small Llama's step beside its model's own formula."""
    built = program.build(_config(**settings))
    tokens = (built.sizes.global_batch_size, built.config.seq_len + 1)
    batch = {"tokens": jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=built.batch_sharding)}
    return built, sum(flops.count(built.train_step.trace(built.partition.abstract_state, batch)).values())


def _config(**settings):
    values = base.get_config()
    values.model.preset, values.model.vocab_size, values.model.attention = "test", 320, "xla"
    values.update_from_flattened_dict(settings)
    return config.from_dict(values)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_the_count_of_a_train_step_equals_the_models_formula(remat):
    built, found = trained(**{"model.remat": remat})
    model, length = built.model, built.config.seq_len
    tokens = built.sizes.global_batch_size * length
    norms = (2 * model.num_layers + 1) * model.embed_dim  # weights of the formula that multiply no matrix
    causal = 6.0 * model.num_layers * model.num_heads * model.head_dim * length  # XLA's attention computes both halves
    assert found == tokens * (llama.flops_per_token(model, length) - 6.0 * norms + causal)


def test_full_rematerialisation_adds_less_than_a_forward_pass():
    _, once = trained(**{"model.remat": "none"})
    _, again = trained(**{"model.remat": "full"})
    assert once < again < once * 4 / 3


def test_cudnn_attention_counts_the_causal_half():
    devices = compile_only.gpus(topology="1x1")

    def attend(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn"))

    with jax.set_mesh(mesh.make_mesh(devices=devices)):
        q, kv = (2, 64, 4, 16), (2, 64, 2, 16)
        found = total(jax.grad(attend), q, kv, kv)
    pairs = 2 * 4 * 64 * 64 / 2  # batch x heads x queries x keys, the lower half
    assert found == (2 + 5) * 2.0 * pairs * 16


@pytest.mark.parametrize("way, order", [("ring", "zigzag"), ("gather", "contiguous")])
def test_cudnn_attention_over_sharded_tokens_counts_on_every_device(way, order):
    ways, heads, kv_heads, width, length = 4, 4, 2, 16, 256
    tokens = P(None, "context")

    def attend(q, k, v):
        chosen = context_attention.Way(way, order, "")
        kwargs = {"axis": "context", "way": chosen, "order": order, "is_causal": True}
        return jnp.sum(context_attention.attend(q, k, v, "cudnn", **kwargs))

    devices = jax.sharding.Mesh(jax.devices()[:ways], ("context",))
    run = jax.shard_map(jax.grad(attend), mesh=devices, in_specs=tokens, out_specs=tokens, check_vma=False)
    found = count(run, (1, length, heads, width), *[(1, length, kv_heads, width)] * 2)
    shape = {"heads": heads, "kv_heads": kv_heads, "ways": ways, "length": length, "head_dim": width}
    pairs = context_costs.cost(way, order, is_causal=True, **shape).pairs
    assert found == {"bf16": (2 + 5) * 2.0 * width * pairs * ways}
