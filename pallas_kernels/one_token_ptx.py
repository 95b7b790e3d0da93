"""What the threads of `one_token_mosaic` run, in PTX, which has instructions that Mosaic does not expose. This module holds these texts.

The tensor cores multiply integers. A warp multiplies 32 rows of 128 columns at a time. Its thread 4 g + t (g < 8, t < 4) reads the columns
16 g to 16 g + 15 of eight of these rows, and collects the codes of four rows of one column in each register. Eight `mma.m16n8k32` follow.
Each multiplies two columns of every g, in all 32 rows:

    sum_k codes[k, c] x[k] scales[k, c / 64]  =  step sum_k codes[k, c] (128 high[k] + low[k])

x times its scale is rounded to step (128 high + low), where high and low are integers of 8 bits. The step is the largest of the 32 values
over 127 * 128, so a value changes by at most 1 / 32512 of the largest; as a bfloat16 it would change by up to 1 / 512 of itself. The mma's
right operand has eight columns: high, low, high, low with the scales of the first 64 columns, and then the same with those of the other
64. So a thread with t = g / 2 gets the high and the low sums of its own columns.

In a text %0!, %1!, ... are its results and then its arguments. A name is known in its own text alone. The functions `..._text` return the
lines, and the functions without `_text` run them. Tests run the lines too, without a GPU.
"""

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, WIDE = 256, 128  # of a copy of codes
THREADS = 256  # that multiply
WARPS = THREADS // 32
EIGHT = 8  # values of 16 bits in the 16 bytes that a thread reads at once
IN_ROWS = (plgpu.TilingTransform((8, WIDE)), plgpu.SwizzleTransform(WIDE))  # of codes in shared memory

_SUMS = plgpu.Layout.WG_STRIDED((128 * 16,), vec_size=1)  # 16 columns a thread
_REF, _SAME = plgpu.RefType(), plgpu.Layout.WG_SPLAT
_SYNC = f"bar.sync 9, {THREADS};"
_ALL = "31, 0xffffffff"  # lanes of a warp that exchange values


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """The sizes of a product: `inputs` rows in `parts`, and `columns` in each of `weights`. These are 2 for gate and up, whose strips a
    block multiplies one after the other. The matrices of q, k and v count as one weight, side by side."""

    inputs: int
    columns: int
    weights: int
    parts: int

    @property
    def strips(self) -> int:
        """Returns the number of strips of 128 columns."""
        return self.columns // WIDE

    @property
    def works(self) -> int:
        """Returns the number of pieces of work: a part of the rows of a strip each."""
        return self.strips * self.parts

    @property
    def rows(self) -> int:
        """Returns the rows of a part."""
        return self.inputs // self.parts

    @property
    def steps(self) -> int:
        """Returns the number of copies of 256 rows in a part."""
        return self.rows // ROWS


def _run_ptx(lines: Sequence[str], arguments: Sequence[Any] = (), results: int = 0) -> list[Any]:
    """Runs PTX in each thread, and returns its float32 results."""
    ir, llvm = mgpu.utils.ir, mgpu.utils.llvm
    text, float32 = "\n".join(lines), ir.F32Type.get()
    for n in range(results + len(arguments)):
        text = text.replace(f"%{n}!", f"${n}")
    letters = {"f32": "f", "i64": "l", "i32": "r"}
    constraints = ["=f"] * results + [letters[str(argument.type)] for argument in arguments] + ["~{memory}"]
    kind = None if results == 0 else llvm.StructType.get_literal([float32] * results)
    found: Any = llvm.inline_asm(kind, list(arguments), "{" + text + "}", ",".join(constraints), has_side_effects=True)
    return [llvm.extractvalue(float32, found, [n]) for n in range(results)]


def _address(ref: Any) -> Any:
    """Returns a reference's address: 32 bits in shared memory, 64 in the device's."""
    bits = 32 if mgpu.utils.is_smem_ref(ref) else 64
    kind = mgpu.utils.ir.IntegerType.get_signless(bits)
    return mgpu.utils.llvm.ptrtoint(kind, mgpu.utils.memref_ptr(ref))


def _integer(scalar: Any) -> Any:
    value = scalar.registers.item() if isinstance(scalar, mgpu.FragmentedArray) else scalar
    int32 = mgpu.utils.ir.IntegerType.get_signless(32)
    return value if value.type == int32 else mgpu.utils.arith.index_castui(int32, value)


def _literal(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


_LANES = """.reg .b32 tid, lane, warp, g, t;
mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5; shr.u32 g, lane, 2; and.b32 t, lane, 3;"""


def _from_pair(pair: str, number: int, wide: str) -> str:
    """PTX: wide = the bfloat16 in the low (0) or high (1) half of a register, as float32."""
    how = f"shl.b32 {wide}_, {pair}, 16;" if number == 0 else f"and.b32 {wide}_, {pair}, 0xffff0000;"
    return f"{{ .reg .b32 {wide}_; {how} mov.b32 {wide}, {wide}_; }}"


def _rounded(wide: str) -> str:
    """PTX: rounds a float32 in place to the nearest bfloat16."""
    how = f"cvt.rn.bf16.f32 high_, {wide}; mov.b16 low_, 0; mov.b32 both_, {{low_, high_}}; mov.b32 {wide}, both_;"
    return f"{{ .reg .b16 high_, low_; .reg .b32 both_; {how} }}"


def _four(name: str) -> str:
    """PTX: four registers as an operand."""
    return f"{{{name}_0, {name}_1, {name}_2, {name}_3}}"


def multiplied_text() -> list[str]:
    """PTX of `multiplied`. Results: 16 sums. Arguments: the addresses of codes, scales and x in shared memory, and the 16 sums before.

    The copy engine has swizzled the codes: 16 bytes of row r that begin at 16 c are at 16 (c ^ (r % 8)). A thread's rows are 2 t and
    2 t + 1 of each eight, so that eight threads at a time read from all banks of shared memory.
    """
    lines = [
        _LANES,
        ".reg .b32 at, even, odd, of_x, of_s, u, v, x<4>, s<4>, " + ", ".join(f"w{i}_<4>" for i in range(8)) + ";",
    ]
    lines.append(f"""
shl.b32 at, warp, 12; shl.b32 u, t, 8; add.u32 at, at, u; add.u32 at, at, %16!;
shl.b32 u, t, 1; xor.b32 u, u, g; shl.b32 u, u, 4; add.u32 even, at, u; xor.b32 u, u, 16; add.u32 odd, at, u;
shl.b32 of_x, warp, 6; shl.b32 u, t, 2; add.u32 of_x, of_x, u;
shr.u32 u, g, 2; mul.lo.u32 u, u, {2 * ROWS}; add.u32 of_s, of_x, u; add.u32 of_s, of_s, %17!; add.u32 of_x, of_x, %18!;""")
    lines += [f"ld.shared.u32 x{i}, [of_x+{16 * i}]; ld.shared.u32 s{i}, [of_s+{16 * i}];" for i in range(4)]
    for i in range(8):
        place = f"{'odd' if i % 2 else 'even'}+{1024 * (i // 2) + 128 * (i % 2)}"
        lines.append(f"ld.shared.v4.u32 {_four(f'w{i}')}, [{place}];")
    # x times its scale, at most 127 * 128 steps of either sign, becomes 128 high + low with low in [-64, 64).
    lines.append(".reg .f32 f<8>, of_scale, most, other, inverse, step;")
    for i in range(8):
        lines += [_from_pair(f"x{i // 2}", i % 2, f"f{i}"), _from_pair(f"s{i // 2}", i % 2, "of_scale")]
        lines.append(f"mul.f32 f{i}, f{i}, of_scale;")
    lines.append(
        "abs.f32 most, f0;" + "".join(f"abs.f32 other, f{i}; max.NaN.f32 most, most, other;" for i in range(1, 8))
    )
    lines += [f"shfl.sync.bfly.b32 other, most, {d}, {_ALL}; max.NaN.f32 most, most, other;" for d in (1, 2)]
    lines.append(f"""
max.NaN.f32 most, most, {_literal(1e-30)}; rcp.approx.ftz.f32 inverse, most; mul.f32 inverse, inverse, {_literal(127 * 128)};
mul.f32 step, most, {_literal(1 / (127 * 128))};
.reg .b32 shift, mask, minus, y<8>, b<2>; .reg .pred is_low; and.b32 u, g, 1; setp.ne.u32 is_low, u, 0;
selp.b32 shift, 0, 7, is_low; selp.b32 mask, 127, 255, is_low; selp.b32 minus, 64, 0, is_low;""")
    for i in range(8):  # rounded to an integer in the mantissa of 1.5 * 2^23
        lines.append(f"fma.rn.f32 f{i}, f{i}, inverse, {_literal(1.5 * 2**23)}; mov.b32 y{i}, f{i};")
        lines.append(f"add.s32 y{i}, y{i}, 64;")
        lines.append(f"shr.u32 y{i}, y{i}, shift; and.b32 y{i}, y{i}, mask; sub.s32 y{i}, y{i}, minus;")
    for k in range(2):
        first, second, third, fourth = (f"y{4 * k + i}" for i in range(4))
        lines.append(f"prmt.b32 u, {first}, {second}, 0x0040; prmt.b32 v, {third}, {fourth}, 0x0040;")
        lines.append(f"prmt.b32 b{k}, u, v, 0x5410;")
    # The step of the values that this thread's sums are of: those of thread 8 t.
    lines.append(f".reg .f32 of_sums; shl.b32 u, t, 3; shfl.sync.idx.b32 of_sums, step, u, {_ALL};")
    lines.append(".reg .b32 zero, l0, l1, h0, h1, z<4>, a0_<4>, a1_<4>; .reg .f32 sum; mov.b32 zero, 0;")
    for word in range(4):
        for k in range(2):  # four rows of four columns: one column a register
            w = [f"w{4 * k + i}_{word}" for i in range(4)]
            for half, how in (("l", "0x5140"), ("h", "0x7362")):
                lines.append(f"prmt.b32 {half}0, {w[0]}, {w[1]}, {how}; prmt.b32 {half}1, {w[2]}, {w[3]}, {how};")
            for column, (half, how) in enumerate((("l", "5410"), ("l", "7632"), ("h", "5410"), ("h", "7632"))):
                lines.append(f"prmt.b32 a{k}_{column}, {half}0, {half}1, 0x{how};")
        for pair in range(2):
            one, two = 2 * pair, 2 * pair + 1
            lines.append(
                "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {z0, z1, z2, z3}, "
                f"{{a0_{one}, a0_{two}, a1_{one}, a1_{two}}}, {{b0, b1}}, {{zero, zero, zero, zero}};"
            )
            for d, column in enumerate((4 * word + one, 4 * word + two)):
                high, low = f"z{2 * d}", f"z{2 * d + 1}"
                lines.append(f"shl.b32 {high}, {high}, 7; add.s32 {high}, {high}, {low}; cvt.rn.f32.s32 sum, {high};")
                lines.append(f"fma.rn.f32 %{column}!, sum, of_sums, %{19 + column}!;")
    return lines


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(IN_ROWS), _REF, _REF, _SUMS),
    return_type=plgpu.ShapeDtypeStruct((128 * 16,), jnp.float32, layout=_SUMS),
)
def multiplied(_: Any, codes: Any, scales: Any, x: Any, sums: Any) -> Any:
    """Returns `sums`, of a thread's 16 columns, plus those of the 32 rows of its warp (of 256). In half of the threads they have the
    scales of other columns and mean nothing. `write_sums` takes those of the threads with t = g / 2."""
    vector = mgpu.utils.vector
    olds = [vector.extract(register, [], [0]) for register in sums.registers]
    news = _run_ptx(multiplied_text(), [*map(_address, (codes, scales, x)), *olds], 16)
    one_float = mgpu.utils.ir.VectorType.get((1,), mgpu.utils.ir.F32Type.get())
    registers = np.array([vector.broadcast(one_float, new) for new in news], dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)


@plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((128 * 16,), jnp.float32, layout=_SUMS))
def zeros(_: Any) -> Any:
    """Returns the sums before the first step: 0."""
    zero = mgpu.c(0.0, mgpu.utils.ir.F32Type.get())
    return mgpu.FragmentedArray.splat(zero, (128 * 16,), mgpu.WGStridedFragLayout((128 * 16,), 1))


def write_sums_text() -> list[str]:
    """PTX of `write_sums`. Arguments: the address in shared memory and 16 sums."""
    lines = [_LANES, ".reg .b32 at, u; .reg .pred counts; shr.u32 u, g, 1; setp.eq.u32 counts, u, t;"]
    lines.append("shl.b32 at, warp, 9; shl.b32 u, g, 6; add.u32 at, at, u; add.u32 at, at, %0!;")
    for i in range(4):
        values = ", ".join(f"%{1 + 4 * i + k}!" for k in range(4))
        lines.append(f"@counts st.shared.v4.f32 [at+{16 * i}], {{{values}}};")
    return lines


@plgpu.inline_mgpu(arg_types=(_SUMS, _REF))
def write_sums(_: Any, sums: Any, target: Any) -> None:
    """Writes each warp's sums into shared memory, float32[warps, 128 columns], from the threads with t = g / 2."""
    olds = [mgpu.utils.vector.extract(register, [], [0]) for register in sums.registers]
    _run_ptx(write_sums_text(), [_address(target), *olds])


def _total(name: str, column: str, base: str, factor: float) -> str:
    """PTX: name = factor times the sum over the warps of a column, read from shared memory."""
    lines = [f".reg .b32 at_{name}; .reg .f32 {name}, {name}_<{WARPS}>;"]
    lines.append(f"shl.b32 at_{name}, {column}, 2; add.u32 at_{name}, at_{name}, {base};")
    lines += [f"ld.shared.f32 {name}_{w}, [at_{name}+{4 * WIDE * w}];" for w in range(WARPS)]
    lines.append(
        f"add.f32 {name}, {name}_0, {name}_1;"
        + "".join(f"add.f32 {name}, {name}, {name}_{w};" for w in range(2, WARPS))
    )
    return "\n".join([*lines, f"mul.f32 {name}, {name}, {_literal(factor)};"])


def _joined(name: str, column: str, base: str, parts: int, columns: int) -> str:
    """PTX: name = the sum over the parts, in their order, of a column of float32[parts, columns] in the device's memory."""
    lines = [f".reg .b64 at_{name}; .reg .f32 {name}, {name}_<{parts}>;"]
    lines.append(f"mul.wide.u32 at_{name}, {column}, 4; add.u64 at_{name}, at_{name}, {base};")
    lines += [f"ld.global.cg.f32 {name}_{k}, [at_{name}+{4 * columns * k}];" for k in range(parts)]
    lines.append(
        f"mov.f32 {name}, {name}_0;" + "".join(f"add.f32 {name}, {name}, {name}_{k};" for k in range(1, parts))
    )
    return "\n".join(lines)


def _to_parts(which: int, shape: ProductShape, unit: float, base: str, target: str) -> list[str]:
    """PTX: the first 128 threads write the sum of a column each, of weight `which`, into float32[weights, parts, columns]."""
    offset = 4 * WARPS * WIDE * which
    return [
        "{ .reg .pred is_mine; .reg .b64 at; .reg .b32 u, v; setp.lt.u32 is_mine, tid, 128; @!is_mine bra DONE;",
        f"add.u32 u, {base}, {offset};" + _total("d", "tid", "u", unit),
        f"add.u32 v, part, {which * shape.parts}; mad.lo.u32 v, v, {shape.columns}, column; add.u32 v, v, tid;",
        f"mul.wide.u32 at, v, 4; add.u64 at, at, {target}; st.global.f32 [at], d;",
        "DONE: }",
    ]


_WORK = f".reg .b32 strip, part, column; mov.b32 strip, %0!; mov.b32 part, %1!; mul.lo.u32 column, strip, {WIDE};"


def write_parts_text(shape: ProductShape, unit: float) -> list[str]:
    """PTX of `write_parts`. Arguments: the strip, the part, and the addresses of the sums in shared memory and of the target."""
    return [_SYNC, _LANES, _WORK, *_to_parts(0, shape, unit, "%2!", "%3!"), _SYNC]


def write_parts(sums: Any, target: Any, shape: ProductShape, unit: float, strip: Any, part: Any) -> None:
    """Writes the sums of a strip (128 columns) and a part of the rows into the target, float32[parts, columns]."""

    @plgpu.inline_mgpu(arg_types=(_SAME, _SAME, _REF, _REF))
    def write(_: Any, strip: Any, part: Any, sums: Any, target: Any) -> None:
        _run_ptx(write_parts_text(shape, unit), [*map(_integer, (strip, part)), *map(_address, (sums, target))])

    write(strip, part, sums, target)


def _of_last(shape: ProductShape, unit: float, groups: int) -> list[str]:
    """PTX: writes the sums to the device's memory, and goes to END unless the other parts of these columns have arrived before. %2! are the
    sums in shared memory, %3! the parts in the device's, %4! the counters."""
    lines = [line for which in range(shape.weights) for line in _to_parts(which, shape, unit, "%2!", "%3!")]
    return [
        *lines,
        _SYNC,
        ".reg .b32 arrived; .reg .pred q; .reg .b64 counter; setp.ne.u32 q, tid, 0; @q bra TOLD;",
        f"add.u32 arrived, strip, {groups}; mul.wide.u32 counter, arrived, 4; add.u64 counter, counter, %4!;",
        "fence.acq_rel.gpu; atom.acq_rel.gpu.global.add.u32 arrived, [counter], 1; st.shared.u32 [%2!], arrived;",
        f"setp.ne.u32 q, arrived, {shape.parts - 1}; @!q st.global.u32 [counter], 0;",
        "TOLD:",
        _SYNC,
        f"ld.shared.u32 arrived, [%2!]; setp.ne.u32 q, arrived, {shape.parts - 1}; @q bra END;",
    ]


def _columns_of(names: dict[str, tuple[str, int]], shape: ProductShape, unit: float) -> list[str]:
    """PTX: name = the sum of a column, for {name: (column of the 128, weight)}: from shared memory, or where the rows have parts from
    these."""
    lines = []
    for name, (column, which) in names.items():
        lines.append(f".reg .b32 c_{name};")
        if shape.parts == 1:
            lines.append(
                f"add.u32 c_{name}, %2!, {4 * WARPS * WIDE * which};" + _total(name, column, f"c_{name}", unit)
            )
        else:
            lines.append(
                f"add.u32 c_{name}, column, {column}; add.u32 c_{name}, c_{name}, {which * shape.parts * shape.columns};"
            )
            lines.append(_joined(name, f"c_{name}", "%3!", shape.parts, shape.columns))
    return lines


def write_gated_text(shape: ProductShape, unit: float, groups: int) -> list[str]:
    """PTX of `write_gated`. Arguments: the strip, the part, and the addresses of the sums in shared memory, of those in `more` if the rows
    have parts, and of the target."""
    out = "%5!" if shape.parts > 1 else "%3!"
    lines = [_SYNC, _LANES, _WORK, *(_of_last(shape, unit, groups) if shape.parts > 1 else [])]
    lines += [".reg .pred is_mine; setp.ge.u32 is_mine, tid, 128; @is_mine bra END;"]
    lines += _columns_of({"w": ("tid", 0), "v": ("tid", 1)}, shape, unit)
    lines += [_rounded("w"), _rounded("v"), ".reg .f32 e; .reg .b16 b; .reg .b64 at; .reg .b32 c;"]
    lines.append(
        f"mul.f32 e, w, {_literal(-1.4426950408889634)}; ex2.approx.ftz.f32 e, e; add.f32 e, e, {_literal(1)};"
    )
    lines.append("div.rn.f32 w, w, e; mul.f32 w, w, v; cvt.rn.bf16.f32 b, w;")
    lines.append(f"add.u32 c, column, tid; mul.wide.u32 at, c, 2; add.u64 at, at, {out}; st.global.b16 [at], b;")
    return [*lines, "END:", _SYNC]


def write_gated(
    sums: Any, target: Any, more: list[Any], shape: ProductShape, unit: float, strip: Any, part: Any, groups: int
) -> None:
    """Writes silu(W x) * V x of a strip into the target, bfloat16[columns]. `more`: if the rows have parts, float32[2, parts, columns] for
    their sums, and the counters."""

    @plgpu.inline_mgpu(arg_types=(_SAME, _SAME, *[_REF] * (2 + len(more))))
    def write(_: Any, strip: Any, part: Any, sums: Any, *others: Any) -> None:
        arguments = [_integer(strip), _integer(part), *map(_address, (sums, *others))]
        _run_ptx(write_gated_text(shape, unit, groups), arguments)

    write(strip, part, sums, *more, target)


def write_projected_text(
    q_columns: int, shape: ProductShape, unit: float, keys: tuple[int, ...], groups: int
) -> list[str]:
    """PTX of `write_projected`. Arguments: the strip, the part, and the addresses of the sums in shared memory, of those in `more` if the
    rows have parts, and of the queries, keys, values, angles and the slot."""
    slots, kv_heads, dims = keys
    half, kv_columns = dims // 2, kv_heads * dims
    first = 3 if shape.parts == 1 else 5
    q, k, v, turn, slot = (f"%{first + n}!" for n in range(5))
    lines = [_SYNC, _LANES, _WORK, *(_of_last(shape, unit, groups) if shape.parts > 1 else [])]
    # Thread i has column i % half of the strip's head i / half, and the column that is rotated with it, `half` later.
    lines.append(f""".reg .pred is_mine, is_q, is_k; setp.ge.u32 is_mine, tid, 64; @is_mine bra END;
.reg .b32 first, second, u; .reg .b64 at, turns; rem.u32 u, tid, {half}; mul.wide.u32 turns, u, 4; add.u64 turns, turns, {turn};
div.u32 first, tid, {half}; mad.lo.u32 first, first, {dims}, u; add.u32 second, first, {half};""")
    lines += _columns_of({"a": ("first", 0), "b": ("second", 0)}, shape, unit)
    lines += [_rounded("a"), _rounded("b"), ".reg .f32 cos, sin, c, d; .reg .b16 low, high; .reg .b32 at_slot, place;"]
    lines.append(f"""
add.u32 place, column, first; setp.lt.u32 is_q, place, {q_columns}; setp.lt.u32 is_k, place, {q_columns + kv_columns};
ld.global.f32 cos, [turns]; ld.global.f32 sin, [turns+{4 * half}]; ld.global.u32 at_slot, [{slot}];
mul.f32 c, b, sin; neg.f32 c, c; fma.rn.f32 c, a, cos, c; mul.f32 d, a, sin; fma.rn.f32 d, b, cos, d;
selp.f32 a, c, a, is_k; selp.f32 b, d, b, is_k; cvt.rn.bf16.f32 low, a; cvt.rn.bf16.f32 high, b;
@is_q bra QUERY;
setp.ge.u32 is_q, at_slot, {slots}; @is_q bra END;
sub.u32 place, place, {q_columns}; @!is_k sub.u32 place, place, {kv_columns};
mad.lo.u32 place, at_slot, {kv_columns}, place;
mul.wide.u32 at, place, 2; @is_k add.u64 at, at, {k}; @!is_k add.u64 at, at, {v}; bra STORE;
QUERY: mul.wide.u32 at, place, 2; add.u64 at, at, {q};
STORE: st.global.b16 [at], low; st.global.b16 [at+{2 * half}], high;""")
    return [*lines, "END:", _SYNC]


def write_projected(
    sums: Any,
    outs: Sequence[Any],
    more: list[Any],
    q_columns: int,
    shape: ProductShape,
    unit: float,
    keys: tuple[int, ...],
    strip: Any,
    part: Any,
    groups: int,
) -> None:
    """Writes a strip of the rotated queries, or of the rotated keys or of the values into the cache [S, J, C]. `more`: as in
    `write_gated`."""

    @plgpu.inline_mgpu(arg_types=(_SAME, _SAME, *[_REF] * (1 + len(more) + len(outs))))
    def write(_: Any, strip: Any, part: Any, sums: Any, *others: Any) -> None:
        arguments = [_integer(strip), _integer(part), *map(_address, (sums, *others))]
        _run_ptx(write_projected_text(q_columns, shape, unit, keys, groups), arguments)

    write(strip, part, sums, *more, *outs)


def read_plain_text(count: int) -> list[str]:
    """PTX of `read_plain`. Arguments: the first index, and the addresses of the source and of the target in shared memory."""
    vectors = count // EIGHT
    lines = [_LANES, ".reg .b64 at, own; mul.wide.u32 at, %0!, 2; mul.wide.u32 own, tid, 16;"]
    lines.append("add.u64 at, at, own; add.u64 at, at, %1!;")
    lines.append(".reg .b32 to, u; shl.b32 to, tid, 4; add.u32 to, to, %2!;")
    rounds = range(-(-vectors // THREADS))
    for i in rounds:
        lines.append(f".reg .pred is{i}; .reg .b32 x{i}_<4>;")
        lines.append(f"add.u32 u, tid, {THREADS * i}; setp.lt.u32 is{i}, u, {vectors};")
        lines.append(f"@is{i} ld.global.cg.v4.u32 {_four(f'x{i}')}, [at+{16 * THREADS * i}];")
    lines += [f"@is{i} st.shared.v4.u32 [to+{16 * THREADS * i}], {_four(f'x{i}')};" for i in rounds]
    return [*lines, _SYNC]


def read_plain(source: Any, first: Any, count: int, target: Any) -> None:
    """Copies bfloat16[count] from `first` on into shared memory. Other blocks may have written it, so it is not read through L1 (`.cg`)."""

    @plgpu.inline_mgpu(arg_types=(_SAME, _REF, _REF))
    def read(_: Any, first: Any, source: Any, target: Any) -> None:
        _run_ptx(read_plain_text(count), [_integer(first), _address(source), _address(target)])

    read(first, source, target)


def read_normed_text(size: int, parts: int, eps: float) -> list[str]:
    """PTX of `read_normed`. Arguments: the block, and the addresses of the target and of 8 floats in shared memory, of x, of the scale
    and, if there are parts to add, of these and of the new x."""
    vectors = size // EIGHT
    rounds = range(-(-vectors // THREADS))
    wide = 16 * THREADS  # bytes of a round
    lines = [_LANES, ".reg .b64 own, of_x, of_scale, of_sum, of_new; .reg .b32 u, to; .reg .pred q;"]
    lines.append(".reg .f32 squares, other, inverse; mov.f32 squares, 0f00000000;")
    lines.append("mul.wide.u32 own, tid, 16; add.u64 of_x, own, %3!; add.u64 of_scale, own, %4!;")
    if parts:
        lines.append("add.u64 of_new, own, %6!; shl.b64 own, own, 1; add.u64 of_sum, own, %5!;")
    for i in rounds:
        lines.append(f".reg .pred is{i}; .reg .b32 x{i}_<4>, s{i}_<4>; .reg .f32 f{i}_<8>;")
        lines.append(f"add.u32 u, tid, {THREADS * i}; setp.lt.u32 is{i}, u, {vectors};")
        lines += [f"mov.b32 x{i}_{k}, 0; mov.b32 s{i}_{k}, 0;" for k in range(4)]
        lines.append(f"@is{i} ld.global.v4.u32 {_four(f's{i}')}, [of_scale+{wide * i}];")
        lines.append(f"@is{i} ld.global.cg.v4.u32 {_four(f'x{i}')}, [of_x+{wide * i}];")
        for k in range(parts):
            lines.append(f".reg .f32 p{i}_{k}_<8>;")
            lines += [f"mov.f32 p{i}_{k}_{m}, 0f00000000;" for m in range(8)]
            for part in range(2):
                names, at = ", ".join(f"p{i}_{k}_{4 * part + m}" for m in range(4)), 2 * wide * i + 4 * size * k
                lines.append(f"@is{i} ld.global.cg.v4.f32 {{{names}}}, [of_sum+{at + 16 * part}];")
    for i in rounds:
        for m in range(8):
            own = f"f{i}_{m}"
            lines.append(_from_pair(f"x{i}_{m // 2}", m % 2, own))
            if parts:
                lines += [f"add.f32 p{i}_0_{m}, p{i}_0_{m}, p{i}_{k}_{m};" for k in range(1, parts)]
                lines += [_rounded(f"p{i}_0_{m}"), f"add.f32 {own}, {own}, p{i}_0_{m};", _rounded(own)]
            lines.append(f"fma.rn.f32 squares, {own}, {own}, squares;")
        if parts:
            lines.append(f"setp.eq.and.u32 q, %0!, 0, is{i};")
            lines += [f"cvt.rn.bf16x2.f32 x{i}_{k}, f{i}_{2 * k + 1}, f{i}_{2 * k};" for k in range(4)]
            lines.append(f"@q st.global.v4.u32 [of_new+{wide * i}], {_four(f'x{i}')};")
    lines += [
        f"shfl.sync.bfly.b32 other, squares, {d}, {_ALL}; add.f32 squares, squares, other;" for d in (1, 2, 4, 8, 16)
    ]
    lines.append("setp.eq.u32 q, lane, 0; shl.b32 u, warp, 2; add.u32 u, u, %2!; @q st.shared.f32 [u], squares;")
    lines += [_SYNC, "mov.f32 squares, 0f00000000;"]
    lines += [f"ld.shared.f32 other, [%2!+{4 * w}]; add.f32 squares, squares, other;" for w in range(WARPS)]
    lines.append(f"fma.rn.f32 squares, squares, {_literal(1 / size)}, {_literal(eps)};")
    lines.append("rsqrt.approx.f32 inverse, squares;")
    lines.append("shl.b32 to, tid, 4; add.u32 to, to, %1!;")
    for i in rounds:
        for m in range(8):
            own = f"f{i}_{m}"
            lines += [f"mul.f32 {own}, {own}, inverse;", _rounded(own), _from_pair(f"s{i}_{m // 2}", m % 2, "other")]
            lines.append(f"mul.f32 {own}, {own}, other;")
        lines += [f"cvt.rn.bf16x2.f32 x{i}_{k}, f{i}_{2 * k + 1}, f{i}_{2 * k};" for k in range(4)]
        lines.append(f"@is{i} st.shared.v4.u32 [to+{wide * i}], {_four(f'x{i}')};")
    return [*lines, _SYNC]


def read_normed(x: Any, added: Any, scale: Any, new: Any, target: Any, sums: Any, block: Any, eps: float) -> None:
    """Writes norm(x + the sum of `added`'s parts) into shared memory, as bfloat16. Block 0 also writes x + the sum into `new`. None: no
    parts."""
    size, parts = x.shape[0], 0 if added is None else added.shape[0]

    @plgpu.inline_mgpu(arg_types=(_SAME, *[_REF] * (4 if added is None else 6)))
    def read(_: Any, block: Any, target: Any, sums: Any, x: Any, scale: Any, *more: Any) -> None:
        arguments = [_integer(block), *map(_address, (target, sums, x, scale, *more))]
        _run_ptx(read_normed_text(size, parts, eps), arguments)

    read(block, target, sums, x, scale, *([] if added is None else [added, new]))


def arrive_text(n: int) -> list[str]:
    """PTX of `arrive`. Argument: the address of the counters."""
    lines = [".reg .b32 tid; .reg .pred q; mov.u32 tid, %tid.x; setp.eq.u32 q, tid, 0; @q fence.acq_rel.gpu;"]
    return [*lines, f"@q red.relaxed.gpu.global.add.u32 [%0!+{8 * n}], 1;"]


def arrive(counts: Any, n: int) -> None:
    """Tells the other blocks that this one has written all its results of product n."""

    @plgpu.inline_mgpu(arg_types=(_REF,))
    def arrive(_: Any, counts: Any) -> None:
        _run_ptx(arrive_text(n), [_address(counts)])

    arrive(counts)


def wait_text(n: int, arrivals: int, waiters: int) -> list[str]:
    """PTX of `wait`. Argument: the address of the counters."""
    lines = [".reg .b32 tid, seen; .reg .pred q; mov.u32 tid, %tid.x; setp.ne.u32 q, tid, 0; @q bra END;"]
    lines.append(f"AGAIN: ld.acquire.gpu.global.u32 seen, [%0!+{8 * n}];")
    lines.append(f"setp.lt.u32 q, seen, {arrivals}; @q bra AGAIN;")
    lines.append(f"atom.relaxed.gpu.global.add.u32 seen, [%0!+{8 * n + 4}], 1;")
    lines.append(f"setp.ne.u32 q, seen, {waiters - 1}; @q bra END;")
    lines.append(f"st.global.u32 [%0!+{8 * n}], 0; st.global.u32 [%0!+{8 * n + 4}], 0;")
    return [*lines, "END:", _SYNC]


def wait(counts: Any, n: int, arrivals: int, waiters: int) -> None:
    """Waits until `arrivals` blocks have written their results of product n. The last of the `waiters` sets the product's two counters to
    0."""

    @plgpu.inline_mgpu(arg_types=(_REF,))
    def wait(_: Any, counts: Any) -> None:
        _run_ptx(wait_text(n, arrivals, waiters), [_address(counts)])

    wait(counts)
