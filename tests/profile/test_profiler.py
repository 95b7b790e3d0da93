import json
import re

import jax
import pytest
import runs

from zerojax import display
from zerojax.errors import UserError
from zerojax.profile import breakdown, phases, profiler, traces
from zerojax.trainer import metrics

PROFILED = {"profile__start": 3, "profile__steps": 2}


@pytest.fixture(scope="module")
def profiled(cache_dir, tmp_path_factory):
    return runs.run(tmp_path_factory.mktemp("profiled"), **PROFILED, checkpoint__every=5)


@pytest.fixture(scope="module")
def saved(profiled):
    return json.loads((profiled / profiler.FILE).read_text())


def test_a_run_writes_a_trace_and_a_table_of_the_configured_steps(profiled, saved):
    assert (saved["first_step"], saved["last_step"], saved["devices"]) == (3, 4, jax.device_count())
    folder = traces.newest(profiled / profiler.FOLDER).parent
    assert [path.suffix for path in sorted(folder.iterdir())] == [".gz", ".pb"]  # for Perfetto, and for XProf
    assert saved["named_share"] == pytest.approx(1)
    for phase in (phases.ATTENTION, phases.MATMULS, phases.LOSS, phases.OPTIMIZER, phases.COLLECTIVES):
        assert saved["phases"][phase]["kernels"] > 0, phase
    assert {"weights forward", "gradients"} <= saved["collectives"].keys()


def test_the_phases_add_up_to_no_more_than_the_steps_took(profiled, saved):
    assert sum(share["seconds"] for share in saved["phases"].values()) == pytest.approx(saved["step_seconds"])
    took = [
        line["step_seconds"] for line in metrics.read(profiled) if line["step"] in (2, 3, 4)
    ]  # a busy host may see step 2's end late
    assert 0 < saved["step_seconds"] <= sum(took) / 2


def test_profiled_steps_are_marked_and_change_no_number(profiled, tmp_path):
    marked = [line["step"] for line in metrics.read(profiled) if "profiled" in line]
    assert marked == [3, 4]
    plain = runs.run(tmp_path)
    assert runs.numbers(plain) == runs.numbers(profiled)
    assert not (plain / profiler.FOLDER).exists() and not (plain / profiler.FILE).exists()


def test_a_resumed_run_that_is_past_the_steps_reports_it(profiled, capsys):
    before = (profiled / profiler.FILE).read_bytes()
    runs.run(profiled, **PROFILED, steps=7, checkpoint__at_end=False)
    assert "nothing is profiled: step 3 was done before this run" in capsys.readouterr().out
    assert (profiled / profiler.FILE).read_bytes() == before


def test_a_trace_in_progress_ends_with_the_run(tmp_path):
    for _ in range(2):  # a second one can begin only after the first has ended
        with pytest.raises(KeyboardInterrupt), profiler.Profiler(tmp_path, 1, 2, enabled=True) as tracer:
            tracer.start()
            raise KeyboardInterrupt


def test_a_profiler_in_use_is_an_error_of_one_line(tmp_path):
    with jax.profiler.trace(str(tmp_path)), pytest.raises(UserError, match=r"^profile: the profiler failed"):
        profiler.Profiler(tmp_path, 1, 2, enabled=True).start()


def test_other_processes_trace_nothing(tmp_path):
    tracer = profiler.Profiler(tmp_path, 1, 2, enabled=False)
    tracer.start()
    assert tracer.stop(None) is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize("first, count", [(1, 0), (1, 1), (3, 2)])
def test_a_trace_begins_once_holds_its_steps_and_ends_once(tmp_path, first, count):
    tracer = profiler.Profiler(tmp_path, first, count, enabled=False)
    expected = list(range(first, first + count))
    assert [step for step in range(1, 9) if tracer.holds(step)] == expected
    assert [step for step in range(1, 9) if tracer.begins(step)] == expected[:1]
    assert [step for step in range(1, 9) if tracer.ends(step)] == expected[-1:]
    assert [done for done in range(9) if tracer.is_missed(done)] == (list(range(first, 9)) if count else [])


@pytest.mark.parametrize(
    "arguments, line",
    [
        ((5, 3, 6, {}), "profile: traces steps 5 to 7, and `steps` is 6; set `steps=7` or"),
        ((3, 3, 9, {"evaluate": 4}), "evaluate=4 interrupts them after step 4; set `first=5`"),
        ((3, 3, 9, {"checkpoint": 3}), "checkpoint=3 interrupts them after step 3"),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_profiled_are_an_error(arguments, line):
    with pytest.raises(UserError, match=re.escape(line)):
        profiler.check(*arguments)


def test_steps_that_can_be_profiled_pass():
    profiler.check(3, 2, 4, {"evaluate": 4, "checkpoint": 2})  # both after the last of them, or before the first
    profiler.check(9, 0, 4, {"evaluate": 1})  # no steps to profile


def test_the_table_has_a_row_for_each_phase_and_the_matched_share(saved):
    shares = {name: phases.Share(0.1, 0.05, 2) for name in (*phases.PHASES, phases.IDLE)}
    found = breakdown.Profile(3, 4, 2, 0.8, shares, {"gradients": phases.Share(0.1, 0.05, 2)}, (), 0.9)
    text = display.as_text(profiler.table(found))
    for name in (*shares, "gradients"):
        assert re.search(rf"│ +{name} +│ +100\.00 │", text), name
    assert "steps 3 to 4" in text and "12.5%" in text and "90%" in text
    empty = breakdown.Profile(3, 3, 0, 0.0, {}, {}, (), 0.0)
    assert "the trace has no kernels" in " ".join(display.as_text(profiler.table(empty)).split())
