"""Checks what a plan's picture shows, at any size of a model. This module tests zerojax.plan.picture."""

import dataclasses
import re

import pytest

from zerojax import roles
from zerojax.clock import kernels, walk
from zerojax.errors import UserError
from zerojax.plan import picture, targets
from zerojax.plan.offload import streams
from zerojax.zero.offload import step_by_block

SPANS = (
    walk.Span(kernels.MATMUL, 0.0, 2.0),
    walk.Span(kernels.COLLECTIVE, 1.0, 3.0, links=(walk.NEAR, walk.FAR)),
    walk.Span(kernels.TO_HOST, 1.0, 4.0, links=(kernels.TO_HOST,)),
)


def foretold(plan, seconds=4.0):
    """Returns the plan with a foretold step of this length."""
    share = seconds / 4.0
    spans = tuple(dataclasses.replace(s, begin=s.begin * share, end=s.end * share) for s in SPANS)
    return dataclasses.replace(plan, foretold=walk.StepTime(seconds, dict.fromkeys(walk.PARTS, 0.0), {}, spans))


def axes_of(plan, tmp_path, monkeypatch):
    """Returns the axes that are drawn: of the peak, of the temporaries, and of the time."""
    from matplotlib.figure import Figure  # takes a second, of each process that collects tests

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    picture.draw(plan, tmp_path / "plan.png")
    figures[0].draw_without_rendering()  # places the legends
    return figures[0].axes


def legend_colors(axes):
    handles = axes.get_legend().legend_handles
    names = [text.get_text().split(":")[0] for text in axes.get_legend().get_texts()]
    return {name: h.get_facecolor() for name, h in zip(names, handles) if hasattr(h, "get_facecolor")}


def test_the_picture_is_a_png_and_has_the_time_of_a_step_where_it_is_foretold(plan, tmp_path):
    sizes = []
    for drawn in (plan, foretold(plan)):
        picture.draw(drawn, tmp_path / "plan.png")
        written = (tmp_path / "plan.png").read_bytes()
        assert written.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(written[20:24], "big"))
    assert sizes[1] > sizes[0], "a row of axes more"


@pytest.mark.parametrize("seconds, unit", [(4.0, "s"), (4e-3, "ms"), (4e-6, "µs")])
def test_time_begins_at_0_in_the_unit_of_its_magnitude(plan, tmp_path, monkeypatch, seconds, unit):
    _, _, timed = axes_of(foretold(plan, seconds), tmp_path, monkeypatch)
    assert timed.get_xlim() == pytest.approx((0.0, 4.0)) and timed.get_xlabel() == unit


def test_a_step_block_by_block_has_a_bar_for_each_program(plan, tmp_path, monkeypatch):
    used = (3 << 30, 5 << 30, 2 << 30)
    by_block = step_by_block.Memory(fetched=0, used=used, params=0, waiting=0)
    stream = streams.Stream(0, groups=2, before=0, in_flight=0, at_once=0, peak=5 << 30, by_block=by_block)
    _, programs, *_ = axes_of(dataclasses.replace(plan, stream=stream), tmp_path, monkeypatch)
    assert [bar.get_height() for bar in programs.patches] == [3.0, 5.0, 2.0]
    assert programs.get_ylabel() == "GiB on a device" and "the most: 5" in programs.get_title()


@pytest.mark.parametrize("times, is_drawn", [(2, True), (10_000, False)])
def test_the_limit_of_a_device_is_drawn_near_the_peak_and_else_told(plan, tmp_path, monkeypatch, times, is_drawn):
    memory = targets.Figure(times * plan.peak, "assumed")
    plan = dataclasses.replace(plan, target=dataclasses.replace(plan.target, memory=memory))
    peak, _, _ = axes_of(foretold(plan), tmp_path, monkeypatch)
    highest = peak.get_ylim()[1] * 2**10
    assert (highest > memory.value) == is_drawn and peak.patches[0].get_height() > 0
    assert highest < 2.5 * plan.peak, "the bar fills the axes"
    assert f"{1 / times:.2%} of the device's" in peak.get_title() and peak.get_ylabel() == "KiB on a device"
    assert bool(peak.lines) == is_drawn == ("the device's memory" in peak.get_legend_handles_labels()[1])


def test_a_role_has_one_color_and_a_legend_covers_no_data(plan, tmp_path, monkeypatch):
    peak, temporaries, timed = axes_of(foretold(plan), tmp_path, monkeypatch)
    of_peak, of_program = legend_colors(peak), legend_colors(temporaries)
    shared = set(of_peak) & set(of_program)
    assert shared and all(of_peak[role] == of_program[role] for role in shared)
    assert roles.ACTIVATIONS in of_program and len({*of_program.values()}) == len(of_program)
    for axes in (peak, temporaries, timed):
        assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent().padded(-2))


def test_the_peak_of_temporaries_is_marked_and_named(plan, tmp_path, monkeypatch):
    _, temporaries, _ = axes_of(foretold(plan), tmp_path, monkeypatch)
    (mark,) = temporaries.lines
    assert mark.get_xdata()[0] == plan.buffers.peak_position and mark.get_label().startswith("the most: ")
    most = max(map(sum, zip(*plan.buffers.curve.by_role.values())))
    assert temporaries.get_ylim()[0] == 0 and mark.get_ydata()[0] == pytest.approx(most / 2**10)


def test_a_path_that_no_picture_can_have_is_refused_before_a_step_is_compiled(tmp_path):
    for path, words in (
        (tmp_path, "is a folder"),
        (tmp_path / "plan.gif9", "no picture is written as .gif9"),
        ("/proc/x.png", "cannot"),
    ):
        with pytest.raises(UserError, match=f"^--picture {re.escape(str(path))}: {words}"):
            picture.check(str(path))
    picture.check(str(tmp_path / "new" / "plan"))  # to which matplotlib adds .png
    picture.check(str(tmp_path / "plan.PDF"))
