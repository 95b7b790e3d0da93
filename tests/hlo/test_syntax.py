import pytest

from zerojax.hlo import syntax

PROGRAM = r"""
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (2, {}, may-alias), {1}: (0, {}, must-alias) }, num_partitions=8

FileNames
1 "/home/me/train.py"
2 "/venv/lib/python3.12/site-packages/flax/linen/linear.py"

FunctionNames
1 "step"
2 "Dense.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=3 end_column=9}
2 {file_name_id=2 function_name_id=2 line=274 end_line=274 column=8 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused (p.0: bf16[8,4]) -> bf16[8,4] {
  %p.0 = bf16[8,4]{1,0} parameter(0)
  ROOT %dot.1 = bf16[8,4]{1,0} dot(%p.0, %p.0), lhs_contracting_dims={1}
}

ENTRY %main.5_spmd (a: f32[], b: (f32[2], s32[])) -> (f32[], f32[<=4]) {
  %a = f32[]{:T(128)} parameter(0), metadata={op_name="state.params[\'layer_0\'][\'kernel\']"}
  %b = (f32[2]{0}, /*index=1*/s32[]) parameter(1)
  %c = bf16[8,4]{1,0:T(8,128)(2,1)S(5)} constant({...})
  %d = f32[<=4]{0} custom-call(f32[] %a, (f32[2]{0:T(8)(2)}, s32[]) %b), custom_call_target="x", metadata={op_name="jit(f)/(a:b)"}
  %f = bf16[8,4]{1,0} fusion(%c), kind=kCustom, calls=%fused, metadata={op_name="jit(f)/dot" stack_frame_id=2}
  %g = pred[4]{0} conditional(%a, %b), branch_computations={%one, %two.1}, metadata={source_file="/x/y.py" source_line=3}
  ROOT %t = (f32[], f32[<=4]{0}) tuple(%a, %d)
}
"""


@pytest.fixture
def module():
    return syntax.parse(PROGRAM)


def test_the_entry_is_read_in_the_order_of_the_schedule(module):
    assert module.entry_name == "main.5_spmd"
    assert [(i.name, i.opcode) for i in module.entry.instructions] == [
        ("a", "parameter"),
        ("b", "parameter"),
        ("c", "constant"),
        ("d", "custom-call"),
        ("f", "fusion"),
        ("g", "conditional"),
        ("t", "tuple"),
    ]
    assert module.entry.root.name == "t"
    assert module.entry.parameters[1].name == "b"


def test_the_root_is_the_last_instruction_though_an_unread_parameter_stands_after_it():
    text = "HloModule a\n\nENTRY %main (x: f32[2], y: f32[2]) -> f32[2] {\n  %x = f32[2]{0} parameter(0)\n"
    text += "  ROOT %n = f32[2]{0} negate(%x)\n  %y = f32[2]{0} parameter(1)\n}\n"
    entry = syntax.parse(text).entry
    assert entry.root.name == "n" and set(entry.parameters) == {0, 1}


def test_types_are_read_through_layouts_tiles_tuples_and_bounds(module):
    found = module.entry.by_name
    assert found["a"].arrays == (syntax.Array("f32", ()),)
    assert found["b"].arrays == (syntax.Array("f32", (2,)), syntax.Array("s32", ()))
    assert found["c"].arrays == (syntax.Array("bf16", (8, 4), is_on_host=True),)
    assert found["d"].arrays == (syntax.Array("f32", (4,)),)
    assert found["c"].arrays[0].nbytes == 64


def test_operands_are_names_with_and_without_their_types(module):
    assert module.entry.by_name["d"].operands == ("a", "b")
    assert module.entry.by_name["t"].operands == ("a", "d")
    assert module.entry.by_name["c"].operands == ()
    assert [user.name for user in module.entry.users["a"]] == ["d", "g", "t"]


def test_called_computations_are_named(module):
    assert module.entry.by_name["f"].called == ("fused",)
    assert module.entry.by_name["g"].called == ("one", "two.1")
    assert module.mentions("fused", "dot") and not module.mentions("fused", "scatter")


def test_attributes_of_several_lines_end_neither_an_instruction_nor_a_computation():
    text = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %k = f32[8] custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256}"
}}, metadata={op_name="jit(step)/splash" stack_frame_id=7}
  ROOT %s = f32[8] add(%k, %a)
}
"""
    entry = syntax.parse(text).entry
    assert [(i.name, i.opcode, i.operands, i.op_name) for i in entry.instructions] == [
        ("a", "parameter", (), ""),
        ("k", "custom-call", ("a",), "jit(step)/splash"),
        ("s", "add", ("k", "a"), ""),
    ]


def test_donation_is_read_as_output_to_parameter(module):
    assert module.aliases == {0: 2, 1: 0}


def test_an_argument_keeps_its_name(module):
    assert module.entry.by_name["a"].op_name == "state.params['layer_0']['kernel']"


def test_a_source_is_the_innermost_frame_outside_the_libraries(module):
    found = module.entry.by_name
    assert module.source(found["f"]) == "/home/me/train.py:12 in step"
    assert module.source(found["g"]) == "/x/y.py:3"
    assert module.source(found["a"]) == ""


def test_a_source_with_only_library_frames_is_the_innermost_one(module):
    text = PROGRAM.replace("/home/me/train.py", "/venv/lib/python3.12/site-packages/jax/x.py")
    found = syntax.parse(text)
    assert found.source(found.entry.by_name["f"]).endswith("linear.py:274 in Dense.__call__")


@pytest.mark.parametrize(
    "joined, expected",
    [
        ("jit(f)/mul", ("jit(f)/mul",)),
        ("jit(f)/(a/mul:b/mul)", ("jit(f)/a/mul", "jit(f)/b/mul")),
        ("jit(f)/(jvp(N)/a:jvp())/add", ("jit(f)/jvp(N)/a/add", "jit(f)/jvp()/add")),
        ("jit(f)/(a/(b:c):d)", ("jit(f)/a/b", "jit(f)/a/c", "jit(f)/d")),
        ("", ("",)),
    ],
)
def test_combined_names_are_separated(joined, expected):
    assert syntax.op_names(joined) == expected


@pytest.mark.parametrize(
    "dtype, bits", [("pred", 8), ("bf16", 16), ("f8e4m3fn", 8), ("s4", 4), ("c64", 64), ("token", 0), ("f32", 32)]
)
def test_bits_of_a_dtype(dtype, bits):
    assert syntax.bits(dtype) == bits


def test_text_that_is_not_hlo_is_an_error():
    with pytest.raises(ValueError, match="as_text"):
        syntax.parse("module @jit_f { }")
