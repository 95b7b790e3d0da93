import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from zerojax.hlo import collectives, syntax
from zerojax.hlo import flow as hlo_flow
from zerojax.plan import attribution
from zerojax.roles import ACTIVATIONS, GRADIENTS, OTHER, SCALARS, UPDATED_WEIGHTS, WEIGHTS_BACKWARD, WEIGHTS_FORWARD

GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"


def weight(path, *used):
    """Returns a weight sharded 8 ways on its first dim."""
    shard = (used[0] // 8, *used[1:])
    return attribution.WeightDims(path, used, used, shard, shard, shard)


WEIGHTS = {
    w.path: w for w in (weight("up/kernel", 64, 4096), weight("down/kernel", 4096, 64), weight("layers/q", 16, 64, 32))
}


def roles(body, weights=WEIGHTS, **shapes):
    """Returns (role, weights) of the collectives among the instructions of an entry."""
    arguments = "\n".join(
        f'  %{name} = {shape} parameter({n}), metadata={{op_name="{label}"}}'
        for n, (name, (shape, label)) in enumerate(shapes.items())
    )
    text = f"HloModule jit_step, is_scheduled=true\n\nENTRY %main (a: f32[]) -> f32[] {{\n{arguments}\n{body}\n}}\n"
    flow = hlo_flow.flow(syntax.parse(text))
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("x",), axis_types=(AxisType.Auto,))
    owner = attribution.Attribution(flow, weights, mesh.size)
    return [owner.role(found, part) for found in collectives.collectives(flow, mesh) for part in found.parts]


UP = ("f32[8,4096]", "state.params['up']['kernel']")


@pytest.mark.parametrize(
    "op_name, role",
    [
        ("jit(step)/jvp(Net)/up/dot_general", WEIGHTS_FORWARD),
        ("jit(step)/transpose(jvp(Net))/up/dot_general", WEIGHTS_BACKWARD),
        ("jit(step)/transpose(jvp(Net))/checkpoint/rematted_computation/up/dot_general", WEIGHTS_BACKWARD),
        ("jit(step)/add", UPDATED_WEIGHTS),
    ],
)
def test_autodiffs_names_decide_the_pass_of_a_gather_of_a_cast_weight(op_name, role):
    body = f"""  %cast = bf16[8,4096] convert(%w)
  %ag = bf16[64,4096] all-gather(%cast), {GROUPS}, dimensions={{0}}, metadata={{op_name="{op_name}"}}"""
    assert roles(body, w=UP) == [(role, ("up/kernel",))]


def test_a_gather_without_a_name_belongs_to_the_forward_pass_if_it_comes_before_the_backward_pass():
    body = f"""  %ag = f32[64,4096] all-gather(%w), {GROUPS}, dimensions={{0}}
  %dw = f32[64,4096] dot(%ag, %ag), metadata={{op_name="jit(step)/transpose(jvp(Net))/dot"}}
  %ag.2 = f32[64,4096] all-gather(%w), {GROUPS}, dimensions={{0}}"""
    assert [role for role, _ in roles(body, w=UP)] == [WEIGHTS_FORWARD, UPDATED_WEIGHTS]


def test_a_gather_of_a_weights_codes_is_of_the_weight_and_one_of_other_integers_is_not():
    codes = {"up/kernel/nf4": weight("up/kernel/nf4", 64, 2048)}
    name = 'metadata={op_name="jit(step)/jvp(Net)/up/all_gather"}'
    body = f"""  %ag = u8[64,2048] all-gather(%w), {GROUPS}, dimensions={{0}}, {name}
  %ag.2 = s32[64,2048] all-gather(%tokens), {GROUPS}, dimensions={{0}}, {name}"""
    shapes = {"w": ("u8[8,2048]", "state.params['up']['kernel']['nf4']"), "tokens": ("s32[8,2048]", "batch['tokens']")}
    assert roles(body, codes, **shapes) == [(WEIGHTS_FORWARD, ("up/kernel/nf4",)), (OTHER, ())]


def test_a_gather_of_a_computed_value_moves_activations_even_with_a_weights_shape():
    body = f"""  %y = f32[8,4096] dot(%w, %w)
  %ag = f32[64,4096] all-gather(%y), {GROUPS}, dimensions={{0}}, metadata={{op_name="jit(step)/jvp(Net)/dot"}}"""
    assert roles(body, w=UP) == [(ACTIVATIONS, ())]


@pytest.mark.parametrize("dims", ["64,4096", "4096,64", "8,4096"])
def test_a_reduction_with_a_weights_dims_or_its_shards_dims_sums_its_gradient(dims):
    body = f"""  %g = f32[{dims}] dot(%w, %w)
  %ar = f32[{dims}] all-reduce(%g), {GROUPS}, metadata={{op_name="jit(step)/transpose(jvp(Net))/up/dot_general"}}"""
    assert roles(body, w=UP) == [(GRADIENTS, ("up/kernel",))]


def test_a_reduction_with_a_frozen_weights_dims_sums_no_gradient():
    frozen = {path: dataclasses.replace(known, trainable=False) for path, known in WEIGHTS.items()}
    body = f"""  %ar = f32[64,4096] all-reduce(%g), {GROUPS}, to_apply=%sum"""
    operand = ("f32[64,4096]", "batch")
    assert roles(body, g=operand)[0][0] == GRADIENTS and roles(body, frozen, g=operand) == [(ACTIVATIONS, ())]


def test_the_modules_in_a_name_distinguish_weights_of_equal_shapes():
    body = f"""  %g = f32[4096,64] dot(%w, %w)
  %rs = f32[512,64] reduce-scatter(%g), {GROUPS}, dimensions={{0}}, metadata={{op_name="jit(step)/transpose(jvp(Net))/down/dot"}}"""
    assert roles(body, w=UP) == [(GRADIENTS, ("down/kernel",))]


def test_a_methods_name_is_that_of_its_module():
    known = WEIGHTS | {"table/embedding": weight("table/embedding", 64, 4096)}
    body = f"""  %g = f32[64,4096] dot(%w, %w)
  %ar = f32[64,4096] all-reduce(%g), {GROUPS}, metadata={{op_name="jit(step)/transpose(jvp(Net))/table.attend/dot"}}"""
    assert roles(body, known, w=UP) == [(GRADIENTS, ("table/embedding",))]


def test_a_reduce_scatter_is_not_of_a_weight_whose_shard_it_takes():
    """It is of the weight whose dims it takes and whose shard it gives, whatever other modules its name holds."""
    known = WEIGHTS | {"positions/embedding": weight("positions/embedding", 8, 4096)}
    body = f"""  %g = f32[8,4096] dot(%w, %w)
  %rs = f32[1,4096] reduce-scatter(%g), {GROUPS}, dimensions={{0}}, metadata={{op_name="jit(step)/transpose(jvp(Net))/up/reduce_sum"}}"""
    assert roles(body, known, w=UP) == [(GRADIENTS, ("positions/embedding",))]


def test_a_module_in_the_name_counts_more_than_equal_dims():
    """The gradient of a projection that is stored (embed, heads, width) and summed (embed, heads * width), as a table's shard is stored."""
    known = {w.path: w for w in (weight("embed/embedding", 512, 64), weight("layer_0/query/kernel", 64, 4, 16))}
    body = f"""  %g = f32[64,64] dot(%w, %w)
  %ar = f32[64,64] all-reduce(%g), {GROUPS}, metadata={{op_name="jit(step)/transpose(jvp(Net))/layer_0/query/dot_general"}}"""
    assert roles(body, known, w=UP) == [(GRADIENTS, ("layer_0/query/kernel",))]


def test_a_sum_over_all_devices_is_of_no_weight_whose_shard_has_its_dims():
    known = {w.path: w for w in (weight("positions/embedding", 32, 64), weight("layer_0/mlp/kernel", 256, 64))}
    body = f"""  %g = f32[32,64] dot(%w, %w)
  %ar = f32[32,64] all-reduce(%g), {GROUPS}, metadata={{op_name="jit(step)/transpose(jvp(Net))/reduce_sum"}}"""
    assert roles(body, known, w=UP) == [(GRADIENTS, ("positions/embedding",))]


def test_one_layer_of_a_stack_and_a_kernel_with_merged_dims_are_gradients_too():
    for dims in ("64,32", "1024,32"):
        body = f"""  %g = f32[{dims}] dot(%w, %w)
  %ar = f32[{dims}] all-reduce(%g), {GROUPS}, metadata={{op_name="jit(step)/transpose(jvp(Net))/while/body/dot"}}"""
        assert roles(body, w=UP) == [(GRADIENTS, ("layers/q",))]


def test_a_gradient_may_have_its_weights_dims_split_in_any_order():
    """As of a weight that is stored (embed, heads * width) and used (embed, heads, width)."""
    for dims in ("64,16,256", "64,256,16", "16,256,64", "2,32,4096"):
        body = f"""  %g = f32[{dims}] dot(%w, %w)
  %ar = f32[{dims}] all-reduce(%g), {GROUPS}, metadata={{op_name="jit(step)/transpose(jvp(Net))/up/dot_general"}}"""
        assert roles(body, w=UP) == [(GRADIENTS, ("up/kernel",))]
    body = f"""  %g = f32[128,2048] dot(%w, %w)
  %ar = f32[128,2048] all-reduce(%g), {GROUPS}, metadata={{op_name="jit(step)/transpose(jvp(Net))/up/dot_general"}}"""
    assert roles(body, w=UP) == [(ACTIVATIONS, ())]


def test_a_reduce_scatter_in_stages_is_known_by_the_weight_in_its_name():
    """The second stage takes a quarter of the gradient, whose dims no shard has."""
    for scope, expected in (("transpose(jvp(Net))/up/kernel", GRADIENTS), ("transpose(jvp(Net))/other", ACTIVATIONS)):
        body = f"""  %g = f32[16,4096] custom-call(%w), custom_call_target="x"
  %ar = f32[16,4096] all-reduce(%g), {GROUPS}, metadata={{op_name="jit(step)/{scope}/reduce_scatter"}}"""
        assert [role for role, _ in roles(body, w=UP)] == [expected]


@pytest.mark.parametrize("scope", ["transpose(jvp(Net))/up/kernel", "transpose(jvp(up/kernel))"])
def test_the_name_of_an_explicit_reduce_scatter_counts_more_than_dims(scope):
    """The second stage has the dims of another weight."""
    known = WEIGHTS | {"other/kernel": weight("other/kernel", 16, 4096)}
    body = f"""  %g = f32[16,4096] custom-call(%w), custom_call_target="x"
  %rs = f32[4,4096] reduce-scatter(%g), {GROUPS}, dimensions={{0}}, metadata={{op_name="jit(step)/{scope}/reduce_scatter"}}"""
    assert roles(body, known, w=UP) == [(GRADIENTS, ("up/kernel",))]


def test_a_reduction_without_a_name_has_that_of_what_it_sums():
    """XLA names no reduction that it merges or makes asynchronous."""
    body = f"""  %g = f32[4096,64] dot(%w, %w), metadata={{op_name="jit(step)/transpose(jvp(Net))/down/dot_general"}}
  %t = f32[64,4096] transpose(%g), dimensions={{1,0}}
  %b = f32[64,4096] bitcast(%t)
  %ar = f32[64,4096] all-reduce(%b), {GROUPS}"""
    assert roles(body, w=UP) == [(GRADIENTS, ("down/kernel",))]


def test_a_reduction_of_several_arrays_with_the_name_of_one_is_of_what_each_sums():
    known = {w.path: w for w in (weight("norm_0/scale", 64), weight("norm_1/scale", 64))}
    name = "jit(step)/transpose(jvp(Net))/norm_{}/reduce_sum"
    sums = "\n".join(
        f'  %s{n} = f32[64] custom-call(%w), custom_call_target="x", metadata={{op_name="{name.format(n)}"}}'
        for n in (0, 1)
    )
    body = f"""{sums}
  %ar = (f32[64], f32[64]) all-reduce(%s0, %s1), {GROUPS}, metadata={{op_name="{name.format(1)}"}}"""
    assert roles(body, known, w=UP) == [(GRADIENTS, ("norm_0/scale",)), (GRADIENTS, ("norm_1/scale",))]


@pytest.mark.parametrize(
    "made_by, role",
    [("update/add", UPDATED_WEIGHTS), ("jvp(Net)/up/convert", WEIGHTS_BACKWARD), ("convert", WEIGHTS_BACKWARD)],
)
def test_a_gather_of_several_arrays_with_a_backward_name_has_updated_weights_where_the_update_makes_them(made_by, role):
    """XLA merges the gathers of updated weights with one of an embedding's gradient."""
    cast = f'  %new = f32[8,4096] add(%w, %w), metadata={{op_name="jit(step)/{made_by}"}}'
    back = '  %g = f32[8,64] dot(%w, %w), metadata={op_name="jit(step)/transpose(jvp(Net))/embed/mul"}'
    first, second = (back, cast) if role == UPDATED_WEIGHTS else (cast, back)
    name = 'metadata={op_name="jit(step)/transpose(jvp(Net))/scatter-add"}'
    body = f"{first}\n{second}\n  %ag = (f32[64,4096], f32[64,64]) all-gather(%new, %g), {GROUPS}, dimensions={{0}}, {name}"
    assert roles(body, w=UP) == [(role, ("up/kernel",)), (ACTIVATIONS, ())]


@pytest.mark.parametrize("read_by, role", [("clip/mul", GRADIENTS), ("jvp(Net)/BatchNorm/sub", SCALARS)])
def test_a_vector_is_a_statistic_if_the_forward_pass_reads_its_sum(read_by, role):
    """Its own name may be the forward pass's where XLA merges both."""
    scale = {"norm/scale": weight("norm/scale", 64)}
    body = f"""  %g = f32[64] custom-call(%w), custom_call_target="x"
  %ar = f32[64] all-reduce(%g), {GROUPS}, metadata={{op_name="jit(step)/jvp(Net)/norm/reduce_sum"}}
  %r = f32[64] multiply(%ar, %ar), metadata={{op_name="jit(step)/{read_by}"}}"""
    assert [found for found, _ in roles(body, scale, w=UP)] == [role]


@pytest.mark.parametrize(
    "type_text, name, role",
    [
        ("f32[]", "jit(step)/jvp(loss)/psum", SCALARS),
        ("f32[48]", "jit(step)/jvp(Net)/BatchNorm/reduce_sum", SCALARS),
        ("f32[48,999]", "jit(step)/jvp(Net)/dot_general", ACTIVATIONS),
        ("s32[64,4096]", "jit(step)/jvp(Net)/embed/gather", OTHER),
    ],
)
def test_dtype_and_size_decide_the_role_of_a_reduction_that_has_no_weights_dims(type_text, name, role):
    body = f"""  %g = {type_text} custom-call(%w), custom_call_target="x"
  %ar = {type_text} all-reduce(%g), {GROUPS}, metadata={{op_name="{name}"}}"""
    assert roles(body, w=UP) == [(role, ())]
