"""Checks how XLA's memory dump is read. This module tests zerojax.hlo.buffer_dump."""

import pytest

from zerojax.hlo import buffer_dump

DUMP = {
    "-buffer-assignment.txt": """BufferAssignment:
allocation 0: size 4096, color 5, page 0, parameter 0, shape |f32[32,32]| at ShapeIndex {}, maybe-live-out:
 value: <9 param.2 @0> (size=4096,offset=0): f32[32,32]{1,0}
allocation 1: size 64, parameter 0, shape |f32[16]| at ShapeIndex {3}:
 value: <10 arg{3} @0> (size=64,offset=0): f32[16]{0}
allocation 2: size 8, page 0, output shape is |(f32[1], f32[1])|, maybe-live-out:
 value: <11 tuple.4{} @0> (size=8,offset=0): (f32[1]{0}, f32[1]{0})
allocation 3: size 2048, color 1, page 0, preallocated-temp:
 value: <12 carry{1} (phi) @0> (size=1024,offset=1024): f32[256]{0:T(256)S(1)}
 value: <13 gone @0> (size=4,offset=0): f32[]
allocation 4: size 4, page 0, thread-local:
 value: <14 add.1 @0> (size=4,offset=0): f32[]

Total bytes used: 6220 (6.1KiB)
""",
    "-live-range.txt": """HloLiveRange (max 3):
  InstructionSequence:
    0:param.2
    1:carry
    2:tuple.4
  BufferLiveRange:
    param.2{}:0-3
    carry{1}:1-2
  Live ranges at 1 (peak):
    carry{1}: 1024 bytes (cumulative: 1024 bytes)
""",
    ".txt": """HloModule jit_f
%async_computation.1 (p: f32[8]) -> f32[64] {
  ROOT %all-gather.7.1 = f32[64]{0} all-gather(%p), dimensions={0}
}

ENTRY %main () -> f32[] {
  %all-gather-start.2 = ((f32[8]{0}), f32[64]{0}) async-start(%q), calls=%async_computation.1, metadata={}
}
""",
}


@pytest.mark.parametrize("platform, space", [("gpu", "device"), ("tpu", "chip")])
def test_the_dump_is_read_as_xla_writes_it(tmp_path, platform, space):
    for end, text in DUMP.items():
        (tmp_path / f"module_1.jit_f.{platform}_after_optimizations{end}").write_text(text)
    found = buffer_dump.read(tmp_path)
    assert [(a.kind, a.space, a.parameter, a.is_output) for a in found.allocations] == [
        ("argument", "host", 0, True),
        ("argument", "device", 3, False),
        ("output", "device", None, True),
        ("temporary", space, None, False),
        ("thread-local", "device", None, False),
    ]
    carry, gone = found.allocations[3].values
    assert (carry.name, carry.index, carry.nbytes, carry.offset, carry.start, carry.end) == (
        "carry",
        "1",
        1024,
        1024,
        1,
        2,
    )
    assert gone.start == -1
    assert found.length == 3 and found.started == {"all-gather.7.1": "all-gather-start.2"}
    assert buffer_dump.read(tmp_path / "empty") is None
