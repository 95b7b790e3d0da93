"""Runs PTX in numpy. This module interprets the instructions that `pallas_kernels.one_token_ptx` uses, and raises on others.

A register is an array of one value a thread, kept as unsigned bits. Each instruction says what type the bits have. Before they are written
registers hold noise. Each step runs one instruction: that of the threads which are earliest in the text, among those that wait at no
barrier. So threads that took different branches meet again at the label.

Beyond what hardware checks, these raise:
- an access outside of the arrays, or one that is not aligned;
- a read of a byte that another thread of the block has written since the last barrier, or a write of one that another has read or written;
- a read through L1 of what other blocks write;
- an atomic operation that tells other blocks of results, without a fence, or without a barrier since the block wrote them.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

KINDS = {
    **dict.fromkeys(("b32", "u32"), np.uint32),
    **dict.fromkeys(("b64", "u64"), np.uint64),
    **{"b16": np.uint16, "s32": np.int32, "f32": np.float32, "pred": np.bool_},
}
NONE, MANY = -1, -2  # in place of the thread that has used a byte
OUTSIDE, PLAIN, FRESH = range(3)  # a byte is of no array, of one, or of one that other blocks write
MOST_STEPS = 5000  # of a run of one text; one that takes more does not end


class Memory:
    """Arrays at addresses from `base` on, with gaps between them. `fresh`: the names of those that other blocks write."""

    def __init__(self, base: int, arrays: dict[str, np.ndarray], fresh: Sequence[str] = ()) -> None:
        self.at, self.arrays, end = {}, {}, 0
        for name, array in arrays.items():
            self.at[name], end = base + end, end + -(-array.nbytes // 256) * 256 + 1024
        self.base, self.bytes, self.state = base, np.zeros(end, np.uint8), np.zeros(end, np.uint8)
        for name, array in arrays.items():
            begin = self.at[name] - base
            self.arrays[name] = self.bytes[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
            self.arrays[name][...] = array
            self.state[begin : begin + array.nbytes] = FRESH if name in fresh else PLAIN

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]


class Block:
    """A block of threads, its shared memory (addresses of 32 bits), and the device's memory (64)."""

    def __init__(self, shared: Memory, device: Memory, threads: int = 256) -> None:
        self.memories, self.threads = {"shared": shared, "global": device}, threads
        self.noise = np.random.default_rng(0)
        self.synchronize()

    def synchronize(self) -> None:
        """Forgets, at a barrier, which threads have read and written, and which have run a fence."""
        self.seen = {
            name: [np.full(len(memory.bytes), NONE, np.int16) for _ in range(2)]
            for name, memory in self.memories.items()
        }
        self.is_fenced = np.zeros(self.threads, np.bool_)

    def run(self, lines: Sequence[str], arguments: Sequence[Any], results: int = 0) -> list[np.ndarray]:
        """Runs a text, in which %0!, %1!, ... are the results and then the arguments, and returns its results, float32[threads].

        Args:
          lines: of the text.
          arguments: addresses, integers of 32 bits, or float32[threads].
          results: how many.
        """
        program, sizes = _parsed("\n".join(lines))
        self.registers = {
            name: self.noise.integers(0, 2 if kind == "pred" else 2 ** (8 * _size(kind)), self.threads, _bits(kind))
            for name, kind in sizes.items()
        }
        for n in range(results):
            self.registers[f"%{n}!"] = np.zeros(self.threads, np.uint32)
        for n, argument in enumerate(arguments):
            array = np.broadcast_to(np.asarray(argument), self.threads)
            if array.dtype != np.float32:
                array = array.astype(np.uint64 if array.max() >= 2**32 else np.uint32)
            self.registers[f"%{results + n}!"] = array.view(_bits_of(array.dtype)).copy()
        self.registers["%tid.x"] = np.arange(self.threads, dtype=np.uint32)
        with np.errstate(all="ignore"):
            self._run(program)
        return [self.registers[f"%{n}!"].view(np.float32) for n in range(results)]

    def _run(self, program: list[tuple]) -> None:
        at, waits = np.zeros(self.threads, np.int64), np.zeros(self.threads, np.bool_)
        for _ in range(MOST_STEPS):
            if waits.all():
                assert (at == at[0]).all(), "threads wait at different barriers"
                self.synchronize()
                waits[:] = False
            now = int(np.where(waits, len(program), at).min())
            if now == len(program):
                assert not waits.any(), "some threads wait at a barrier, the others have ended"
                return
            guard, operation, operands = program[now]
            self.runs = (at == now) & ~waits
            at[self.runs] += 1
            if guard is not None:
                self.runs &= self.registers[guard[1]] != (guard[0] == "!")
            name, *more = operation.split(".")
            if name == "bra":
                at[self.runs] = operands[0]
            elif name == "bar":
                assert operands == ["9", str(self.threads)] and guard is None, operands
                waits |= self.runs
            elif name == "fence":
                assert more == ["acq_rel", "gpu"], more
                self.is_fenced |= self.runs
            elif self.runs.any():
                try:
                    self._do(name, more, operands)
                except Exception as error:
                    error.add_note(f"in {operation} {operands}")
                    raise
        raise TimeoutError(f"{(at == len(program)).sum()} threads have ended, the others do not")

    def read(self, operand: str, kind: str) -> np.ndarray:
        """Returns the value of an operand, a register or a literal, in every thread."""
        if operand in self.registers:
            bits = self.registers[operand]
            assert bits.dtype.itemsize == _size(kind), (operand, bits.dtype, kind)
            return bits.view(KINDS[kind])
        if operand.startswith("0f"):
            return np.full(self.threads, int(operand[2:], 16), np.uint32).view(KINDS[kind])
        return np.full(self.threads, int(operand, 0) % 2 ** (8 * _size(kind)), _bits(kind)).view(KINDS[kind])

    def write(self, register: str, values: np.ndarray) -> None:
        """Writes a register of the threads that run."""
        old, bits = self.registers[register], values.view(_bits_of(values.dtype))
        assert old.dtype == bits.dtype, (register, old.dtype, bits.dtype)
        old[self.runs] = bits[self.runs]

    def _do(self, name: str, more: list[str], operands: list[Any]) -> None:
        kind, out = more[-1], operands[0]
        if name in ("ld", "st", "atom", "red"):
            self._access(name, more, operands)
        elif name == "setp":
            compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "ge": np.greater_equal}[more[0]]
            value = compare(self.read(operands[1], kind), self.read(operands[2], kind))
            assert more[1:-1] == ["and"] * (len(operands) - 3), more
            self.write(out, value & self.read(operands[3], "pred") if more[1:-1] else value)
        elif name == "selp":
            first, second = (self.read(operand, kind) for operand in operands[1:3])
            self.write(out, np.where(self.read(operands[3], "pred"), first, second))
        elif name == "mov" and isinstance(operands[1], list):
            low, high = (self.read(operand, "b16").astype(np.uint32) for operand in operands[1])
            self.write(out, low | high << np.uint32(16))
        elif name == "shfl":
            self._shuffle(more, *operands)
        elif name == "mma":
            self._multiply(more, *operands)
        else:
            full = ".".join([name, *more])
            assert full in OPERATIONS, f"{full} is not known"
            kinds, function = OPERATIONS[full]
            self.write(out, function(*(self.read(*pair) for pair in zip(operands[1:], kinds, strict=True))))

    def _access(self, name: str, more: list[str], operands: list[Any]) -> None:
        space, kind = next(word for word in more if word in self.memories), more[-1]
        assert set(more[:-1]) <= {space, "cg", "v4", "acquire", "acq_rel", "relaxed", "gpu", "add"}, more
        assert (name in ("atom", "red")) == ("add" in more), more
        operands = operands.copy()
        place = operands.pop(0) if name in ("st", "red") else operands.pop(1)
        memory, (base, offset) = self.memories[space], re.fullmatch(r"\[([^+]*)\+?(.*)\]", place).groups()
        registers = operands[0] if "v4" in more else operands
        assert len(registers) == {"v4": 4, "atom": 2}.get("v4" if "v4" in more else name, 1), registers
        threads, size = np.flatnonzero(self.runs), _size(kind) * (4 if "v4" in more else 1)
        begin = self.read(base, "u32" if space == "shared" else "u64")[threads].astype(np.int64) + int(offset or 0)
        assert not (begin % size).any(), f"not aligned: {place}"
        at = begin[:, None] - memory.base + np.arange(size)
        is_inside = at.min() >= 0 and at.max() < len(memory.bytes) and (memory.state[at] != OUTSIDE).all()
        assert is_inside, f"outside of the arrays: {place}"
        writers, readers = self.seen[space]
        if name in ("atom", "red"):  # one thread after the other
            if name == "red" or "acq_rel" in more:  # others wait for it
                assert self.is_fenced[threads].all(), f"no fence before {place}"
                assert np.isin(writers, [NONE, *threads]).all(), f"no barrier before {place}"
            for thread, where in zip(threads, at):
                old = memory.bytes[where].view(np.uint32)
                if name == "atom":
                    self.registers[registers[0]][thread] = old[0]
                memory.bytes[where] = (old + self.read(registers[-1], kind)[thread]).view(np.uint8)
            return
        for seen in (writers, readers) if name == "st" else (writers,):
            is_own = (seen[at] == NONE) | (seen[at] == threads[:, None])
            assert is_own.all(), f"no barrier between threads that access {place}"
        seen = writers if name == "st" else readers
        old, seen[at] = seen[at], threads[:, None]
        seen[at[((old != NONE) & (old != threads[:, None])) | (seen[at] != threads[:, None])]] = MANY
        if name == "st":
            assert not (seen[at] == MANY).any(), f"two threads write {place}"
            values = np.stack([self.read(register, kind)[threads] for register in registers], axis=1)
            memory.bytes[at] = values.view(np.uint8)
            return
        is_fresh = space == "shared" or "cg" in more or "acquire" in more
        assert is_fresh or (memory.state[at] == PLAIN).all(), f"may be old: {place}"
        values = memory.bytes[at].view(KINDS[kind])
        for n, register in enumerate(registers):
            whole = np.zeros(self.threads, KINDS[kind])
            whole[threads] = values[:, n]
            self.write(register, whole)

    def _warps(self) -> None:
        runs = self.runs.reshape(-1, 32)
        assert (runs.all(axis=1) == runs.any(axis=1)).all(), "a part of a warp"

    def _shuffle(self, more: list[str], out: str, source: str, lane: str, clamp: str, mask: str) -> None:
        assert more[0] == "sync" and more[2] == "b32" and (clamp, mask) == ("31", "0xffffffff"), more
        self._warps()
        own, lane_T = np.arange(self.threads), self.read(lane, "u32").astype(np.int64)
        from_T = {"bfly": own ^ lane_T, "idx": own // 32 * 32 + lane_T % 32}[more[1]]
        self.write(out, self.read(source, "b32")[from_T])

    def _multiply(self, more: list[str], out: list[str], left: list[str], right: list[str], old: list[str]) -> None:
        """Multiplies matrices of 16 x 32 and 32 x 8 bytes: PTX ISA, "Matrix Fragments for mma.m16n8k32"."""
        assert ".".join(more) == "sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", more
        self._warps()

        def bytes_of(registers: list[str]) -> np.ndarray:  # [warp, g, t, register, byte]
            words = np.stack([self.read(register, "b32") for register in registers], axis=1)
            return words.view(np.int8).reshape(-1, 8, 4, len(registers), 4).astype(np.int64)

        def words_of(registers: list[str]) -> np.ndarray:  # [warp, g, t, register]
            return np.stack([self.read(register, "s32") for register in registers], axis=1).reshape(-1, 8, 4, 4)

        # Register r of the left has row g + 8 (r % 2) and depth 4 t + 16 (r / 2) + byte; of the right column g and depth 4 t + 16 r + byte.
        left_WMK = bytes_of(left).reshape(-1, 8, 4, 2, 2, 4).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 32)
        right_WNK = bytes_of(right).transpose(0, 1, 3, 2, 4).reshape(-1, 8, 32)
        product_WMN = np.einsum("wmk,wnk->wmn", left_WMK, right_WNK)
        # Register r of the sums has row g + 8 (r / 2) and column 2 t + r % 2.
        product = product_WMN.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, 8, 4, 4)
        news = (product + words_of(old)).astype(np.int32).reshape(-1, 4)
        for n, register in enumerate(out):
            self.write(register, news[:, n].copy())


def _size(kind: str) -> int:
    return np.dtype(KINDS[kind]).itemsize


def _bits_of(dtype: Any) -> Any:
    return np.bool_ if dtype == np.bool_ else getattr(np, f"uint{8 * np.dtype(dtype).itemsize}")


def _bits(kind: str) -> Any:
    return _bits_of(KINDS[kind])


def _shifted(shift: Callable) -> Callable:
    def function(value: np.ndarray, by: np.ndarray) -> np.ndarray:
        assert (by < 8 * value.itemsize).all(), "a shift by more than the bits"
        return shift(value, by.astype(value.dtype))

    return function


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a b + c, rounded once: float64 holds the product, and the sum is rounded to odd before it is rounded to float32."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    is_even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & is_even & np.isfinite(error), np.nextafter(total, toward), total).astype(np.float32)


def _bfloat16(wide: np.ndarray) -> np.ndarray:
    """Returns the bits of the nearest bfloat16, of two the even one."""
    bits = wide.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(wide), 0x7FFF, nearest).astype(np.uint16)


def _permuted(a: np.ndarray, b: np.ndarray, how: np.ndarray) -> np.ndarray:
    nibbles = how[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    assert (nibbles < 8).all(), "copies of a sign"
    bytes_ = np.stack([a, b], axis=1).view(np.uint8)
    return np.take_along_axis(bytes_, nibbles.astype(np.int64), axis=1).view(np.uint32)[:, 0]


def _by_table(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    found = np.zeros_like(a)
    for n in range(8):
        own = [bits if n >> place & 1 else ~bits for bits, place in ((a, 2), (b, 1), (c, 0))]
        found |= np.where(table >> np.uint32(n) & np.uint32(1), own[0] & own[1] & own[2], np.uint32(0))
    return found


def _fused_pairs(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    wide = [(bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32) for bits in (a, b, c)]
    return _bfloat16(_fused(*wide)).view(np.uint32)


OPERATIONS: dict[str, tuple[list[str], Callable[..., np.ndarray]]] = {
    **{f"mov.{kind}": ([kind], np.copy) for kind in ("b16", "b32", "u32", "f32")},
    **{f"add.{kind}": ([kind] * 2, np.add) for kind in ("u32", "s32", "u64", "f32")},
    **{f"sub.{kind}": ([kind] * 2, np.subtract) for kind in ("u32", "s32")},
    **{f"shl.{kind}": ([kind, "u32"], _shifted(np.left_shift)) for kind in ("b32", "b64")},
    "shr.u32": (["u32", "u32"], _shifted(np.right_shift)),
    "and.b32": (["b32"] * 2, np.bitwise_and),
    "xor.b32": (["b32"] * 2, np.bitwise_xor),
    "mul.lo.u32": (["u32"] * 2, np.multiply),
    "mul.wide.u32": (["u32"] * 2, lambda a, b: a.astype(np.uint64) * b),
    "mad.lo.u32": (["u32"] * 3, lambda a, b, c: a * b + c),
    "div.u32": (["u32"] * 2, np.floor_divide),
    "rem.u32": (["u32"] * 2, np.remainder),
    "prmt.b32": (["b32"] * 3, _permuted),
    "lop3.b32": (["b32"] * 4, _by_table),
    "fma.rn.bf16x2": (["b32"] * 3, _fused_pairs),
    "mul.f32": (["f32"] * 2, np.multiply),
    "max.NaN.f32": (["f32"] * 2, np.maximum),
    "abs.f32": (["f32"], np.abs),
    "neg.f32": (["f32"], np.negative),
    "div.rn.f32": (["f32"] * 2, np.divide),
    "fma.rn.f32": (["f32"] * 3, _fused),
    "rcp.approx.ftz.f32": (["f32"], lambda a: np.float32(1) / a),
    "ex2.approx.ftz.f32": (["f32"], np.exp2),
    "rsqrt.approx.f32": (["f32"], lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32)),
    "cvt.rn.f32.s32": (["s32"], lambda a: a.astype(np.float32)),
    "cvt.rn.bf16.f32": (["f32"], _bfloat16),
    "cvt.rn.bf16x2.f32": (["f32"] * 2, lambda a, b: _bfloat16(a).astype(np.uint32) << np.uint32(16) | _bfloat16(b)),
}


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> tuple[list[tuple], dict[str, str]]:
    """Returns the instructions, (guard, name, operands), and the registers' types. A register is named NAME@SCOPE, since each {} of a text
    is a scope. A branch's operand is the number of the instruction that it goes to."""
    program: list[tuple] = []
    kinds: dict[str, str] = {}
    labels: dict[str, int] = {}
    scopes, count, branches = [0], 0, []

    def inner(name: str, known: dict, scopes: Sequence[int]) -> str | None:
        return next((f"{name}@{scope}" for scope in reversed(scopes) if f"{name}@{scope}" in known), None)

    def operand(word: str) -> Any:
        if word[0] == "{":
            return [operand(part.strip()) for part in word[1:-1].split(",")]
        if word[0] == "[":
            base, plus, offset = word[1:-1].partition("+")
            return f"[{operand(base)}{plus}{offset}]"
        return inner(word, kinds, scopes) or word

    for token in re.findall(r"\w+:|[{}]|[^;{}:\s](?:[^;]*);", text):
        if token == "{":
            count += 1
            scopes.append(count)
        elif token == "}":
            scopes.pop()
        elif token[-1] == ":":
            name = f"{token[:-1]}@{scopes[-1]}"
            assert name not in labels, f"two labels {token}"
            labels[name] = len(program)
        elif token.startswith(".reg"):
            _, kind, names = token[:-1].split(maxsplit=2)
            for name in names.split(","):
                stem, _, number = name.strip().rstrip(">").partition("<")
                for register in [f"{stem}{n}" for n in range(int(number))] if number else [stem]:
                    assert f"{register}@{scopes[-1]}" not in kinds, f"two registers {register}"
                    kinds[f"{register}@{scopes[-1]}"] = kind[1:]
        else:
            guard, operation, words = re.fullmatch(r"(?:@(!?\w+)\s+)?([\w.]+)\s*(.*);", token, re.DOTALL).groups()
            operands = [operand(word) for word in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]]+", words)]
            if guard is not None:
                guard = ("!" if guard[0] == "!" else "", inner(guard.lstrip("!"), kinds, scopes))
            if operation == "bra":
                branches.append((len(program), words, tuple(scopes)))
            program.append((guard, operation, operands))
    for at, label, scopes_of in branches:
        program[at] = (program[at][0], "bra", [labels[inner(label, labels, scopes_of) or label]])
    return program, kinds
