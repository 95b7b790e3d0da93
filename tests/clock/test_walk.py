"""Checks the time of programs against sums by hand, with rates at which a kernel of n bytes takes n seconds."""

import json

import pytest

from zerojax.clock import kernels, rates, walk
from zerojax.hlo import flow, syntax

ROUNDING = 1e-12
FIGURES = {
    "bandwidth": 1.0,
    "least": 0.0,
    "unfused": 1.0,
    "gap": 0.0,
    "alpha": 0.0,
    "beta": 1.0,
    "network": 1.0,
    "link.alpha": 0.0,
    "link.to host": 1.0,
    "link.from host": 1.0,
    "link.both": 0.5,
    "host.to host.1": 1e9,
    "host.from host.1": 1e9,
    "host.both.1": 1e9,
    "spread": 0.0,
    "slowdown.elementwise": 1.0,
}
# A kernel `kN` reads and writes N bytes in all.
PROGRAM = """HloModule m, is_scheduled=true

ENTRY %main (a: s8[1000]) -> s8[1000] {{
  %a = s8[1000]{{0}} parameter(0)
  %h = s8[1000]{{0:S(5)}} parameter(1)
{lines}
}}
"""


def walked(lines, devices=2, per_host=0, sent=None, **figures):
    """Returns the time of an entry of these lines. `K 100` is a kernel of 100 seconds."""
    text, fused = [], []
    for number, line in enumerate(lines.strip().splitlines()):
        line = line.strip()
        if line.startswith("K "):
            half = int(line[2:]) // 2
            fused.append(
                f"%f{number} (p: s8[{half}]) -> s8[{half}] {{\n  %p = s8[{half}]{{0}} parameter(0)\n"
                f"  ROOT %n = s8[{half}]{{0}} negate(%p)\n}}\n"
            )
            text.append(f"  %x{number} = s8[{half}]{{0}} parameter({number + 2})")
            line = f"%k{number} = s8[{half}]{{0}} fusion(%x{number}), kind=kLoop, calls=%f{number}"
        text.append("  " + line)
    head, entry = PROGRAM.format(lines="\n".join(text)).split("\n\n")
    module = syntax.parse("\n\n".join([head, *fused, entry]))
    found = walk.walk(flow.flow(module), rates.GpuRates("fake", FIGURES | figures), devices, per_host, sent=sent or {})
    assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=ROUNDING)
    return found


START = (
    "%g = (s8[500]{0}, s8[1000]{0}) all-gather-start(%half), replica_groups=[1,2]<=[2], dimensions={0}"  # 500 seconds
)
HALF = "%half = s8[500]{0} parameter(100)"
DONE = "%d = s8[1000]{0} all-gather-done(%g)"


def test_kernels_run_one_after_the_other_with_gaps():
    found = walked("K 100\nK 40", gap=3.0)
    assert found.seconds == 146 and found.parts[kernels.ELEMENTWISE] == 140 and found.parts[walk.GAPS] == 6


@pytest.mark.parametrize("beside, waits", [(600, 0), (500, 0), (200, 300)])
def test_a_collective_hides_behind_the_kernels_before_its_done(beside, waits):
    found = walked("\n".join([HALF, START, f"K {beside}", DONE, "K 10"]))
    assert found.seconds == max(beside, 500) + 10
    assert found.parts[walk.EXPOSED] == waits and found.busy == {kernels.COLLECTIVE: 500}


def test_a_collective_begins_after_the_kernels_before_its_start_and_after_the_one_before():
    second = START.replace("%g ", "%g2 ")
    found = walked("\n".join([HALF, "K 100", START, second, DONE, DONE.replace("%d", "%d2").replace("%g", "%g2")]))
    assert found.seconds == 100 + 500 + 500


@pytest.mark.parametrize(
    "groups, seconds", [(("0,1},{2,3", "0,2},{1,3"), 500), (("0,2},{1,3",) * 2, 1000), (("0,1},{2,3",) * 2, 1000)]
)
def test_collectives_inside_hosts_and_between_them_run_at_once_and_slow_a_kernel_once(groups, seconds):
    starts = [
        START.replace("%g ", f"%g{number} ").replace("[1,2]<=[2]", "{{" + group + "}}")
        for number, group in enumerate(groups)
    ]
    dones = [DONE.replace("%d", f"%d{number}").replace("%g", f"%g{number}") for number in range(2)]
    found = walked("\n".join([HALF, *starts, *dones]), 4, 2)
    assert found.seconds == seconds and found.busy[kernels.COLLECTIVE] == 1000
    beside = walked("\n".join([HALF, *starts, "K 1000", *dones]), 4, 2, **{"slowdown.elementwise": 2.0})
    assert beside.seconds == 1000 + seconds / 2


@pytest.mark.parametrize("share, waits", [(1.0, 300), (0.5, 50), (0.0, 0)])
def test_a_collective_of_which_a_share_is_left_takes_that_share_of_its_time(share, waits):
    found = walked("\n".join([HALF, START, "K 200", DONE]), sent={("main", "g"): share})
    assert found.seconds == 200 + waits and found.busy.get(kernels.COLLECTIVE, 0) == 500 * share


def test_a_synchronous_collective_hides_nothing():
    found = walked(
        "\n".join([HALF, START.replace("dimensions", 'backend_config={"is_sync":true}, dimensions'), "K 600", DONE])
    )
    assert found.seconds == 1100 and found.parts[walk.EXPOSED] == 500


@pytest.mark.parametrize("seconds, end", [(200, 400), (250, 500), (300, 550)])
def test_kernels_take_longer_while_a_collective_runs_and_only_then(seconds, end):
    found = walked("\n".join([HALF, START, f"K {seconds}", DONE]), **{"slowdown.elementwise": 2.0})
    assert found.seconds == max(end, 500) and found.parts[walk.SLOWED] == end - seconds


def test_copies_run_beside_kernels_and_share_the_link_in_both_directions():
    out = "%o = (s8[1000]{0:S(5)}, s8[1000]{0}, u32[]) copy-start(%a)"
    back = "%i = (s8[1000]{0}, s8[1000]{0:S(5)}, u32[]) copy-start(%h)"
    done = "%e = s8[1000]{0:S(5)} copy-done(%o)\n%b = s8[1000]{0} copy-done(%i)"
    assert walked(f"{out}\nK 1400\n%e = s8[1000]{{0:S(5)}} copy-done(%o)").seconds == 1400
    found = walked(f"{out}\n{back}\nK 600\n{done}")
    assert found.seconds == 2000 and found.parts[walk.WAITS] == 1400  # the second copy has half of the rate


def test_a_loop_takes_its_length_times_its_body():
    body = """%b (t: (s32[], s8[30])) -> (s32[], s8[30]) {
  %t = (s32[], s8[30]{0}) parameter(0)
  %y = s8[30]{0} get-tuple-element(%t), index=1
  %c = s8[30]{0} copy(%y)
  ROOT %r = (s32[], s8[30]{0}) tuple(%c, %c)
}

"""
    loop = '%w = (s32[], s8[30]{0}) while(%a), condition=%b, body=%b, backend_config={"known_trip_count":{"n":"100"}}'
    text = PROGRAM.format(lines=f"  {loop}").replace("ENTRY", body + "ENTRY")
    found = walk.walk(flow.flow(syntax.parse(text)), rates.GpuRates("fake", FIGURES), 1)
    assert found.seconds == pytest.approx(100 * 60, rel=ROUNDING)
    assert found.parts[kernels.ELEMENTWISE] == pytest.approx(found.seconds, rel=ROUNDING)
    assert sum((span.end - span.begin) * span.times for span in found.spans) == pytest.approx(
        found.seconds, rel=ROUNDING
    )
    unknown = loop.replace(
        'backend_config={"known_trip_count":{"n":"100"}}', 'metadata={op_name="jit(f)/further_rounds/while"}'
    )
    module = syntax.parse(text.replace(loop, unknown))
    for further in (0, 2):  # of tokens to their experts: as many as a router makes
        again = walk.walk(flow.flow(module), rates.GpuRates("fake", FIGURES), 1, further=further)
        assert again.seconds == 60 * further


def test_of_branches_the_longest_counts():
    branch = (
        "%b{0} (t: s8[{1}]) -> s8[{1}] {{\n  %t = s8[{1}]{{0}} parameter(0)\n  ROOT %c = s8[{1}]{{0}} copy(%t)\n}}\n\n"
    )
    branches = "".join(branch.format(number, size) for number, size in enumerate((10, 50, 20)))
    line = "  %w = s8[10]{0} conditional(%a, %a, %a, %a), branch_computations={%b0, %b1, %b2}"
    text = PROGRAM.format(lines=line).replace("ENTRY", branches + "ENTRY")
    assert walk.walk(flow.flow(syntax.parse(text)), rates.GpuRates("fake", FIGURES), 1).seconds == 100


def test_all_devices_wait_for_the_slowest():
    one, eight = (walked("K 100", devices, spread=0.01) for devices in (1, 8))
    assert one.seconds == 100 and 101 < eight.seconds < 102
    assert eight.parts[walk.SLOWEST] == pytest.approx(eight.seconds - 100, rel=ROUNDING)


def test_parts_are_json_values():
    assert json.loads(json.dumps(dict(walked("K 100").parts)))[kernels.ELEMENTWISE] == 100


def test_a_collective_goes_on_faster_while_the_program_waits_for_it_and_those_behind_it_begin_earlier():
    lines = """
        %s0 = (s8[100]{0}, s8[200]{0}) all-gather-start(%a0), replica_groups={{0,1}}, dimensions={0}
        %s1 = (s8[100]{0}, s8[200]{0}) all-gather-start(%a0), replica_groups={{0,1}}, dimensions={0}
        K 20
        %d0 = s8[200]{0} all-gather-done(%s0)
        K 10
        %d1 = s8[200]{0} all-gather-done(%s1)
    """
    lines = "%a0 = s8[100]{0} parameter(90)\n" + lines.strip()
    assert walked(lines).seconds == 200
    # 20 beside the first kernel, 80 / 4 alone, 10 beside the second, 90 / 4 alone
    found = walked(lines, **{"beta.alone": 4.0})
    assert found.seconds == 20 + 80 / 4 + 10 + 90 / 4
    assert found.parts[walk.EXPOSED] == 80 / 4 + 90 / 4
    assert [(span.begin, span.end) for span in found.spans if span.kind == kernels.COLLECTIVE] == [(0, 40), (40, 72.5)]
