"""Checks that a plot shows the records that exist. This module tests zerojax.trainer.plot."""

import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.trainer import plot

TRAINING = [{"step": s, "loss": 4.0 / s, "grad_norm": 1.0, "learning_rate": 1e-3} for s in range(1, 20)]
EVALUATION = [{"step": s, "eval_loss": 5.0 / s} for s in (5, 10)]


def pixels(path, color: str) -> int:
    """Counts pixels of nearly the given colour."""
    import matplotlib.image  # takes a second, of each process that collects tests

    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((abs(matplotlib.image.imread(path)[..., :3] - rgb).max(-1) < 0.02).sum())


def test_each_series_is_drawn_in_its_colour_where_records_hold_it(tmp_path):
    plot.plot_losses(TRAINING + EVALUATION, tmp_path / "all.png")
    plot.plot_losses(EVALUATION, tmp_path / "evaluation.png")
    assert pixels(tmp_path / "all.png", plot.BLUE) > 100 and pixels(tmp_path / "all.png", plot.ORANGE) > 100
    assert pixels(tmp_path / "evaluation.png", plot.BLUE) == 0
    assert pixels(tmp_path / "evaluation.png", plot.ORANGE) > 100


def test_a_value_that_was_not_finite_breaks_the_line(tmp_path):
    broken = [{**record, "loss": None} if 5 < record["step"] < 15 else record for record in TRAINING]
    plot.plot_losses(TRAINING, tmp_path / "whole.png")
    plot.plot_losses(broken, tmp_path / "broken.png")
    assert 0 < pixels(tmp_path / "broken.png", plot.BLUE) < pixels(tmp_path / "whole.png", plot.BLUE)


def test_a_single_step_is_visible(tmp_path):
    plot.plot_losses(TRAINING[:1], tmp_path / "one.png")
    blank = [{"step": 1, "loss": None}]
    plot.plot_losses(blank, tmp_path / "none.png")
    assert pixels(tmp_path / "one.png", plot.BLUE) > pixels(tmp_path / "none.png", plot.BLUE)


def test_records_without_a_loss_are_refused(tmp_path):
    with pytest.raises(UserError, match="no record has a loss"):
        plot.plot_losses([{"step": 1, "grad_norm": 1.0}], tmp_path / "x.png")


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match=r"absent/x\.png: cannot be written"):
        plot.plot_losses(TRAINING, tmp_path / "absent" / "x.png")
