"""How a batch is split, and the charts of the lesson on scaling. No process."""

from __future__ import annotations

import pytest

from course import scaling_plots
from course.formulas import split


@pytest.mark.parametrize("batch_size", [8, 100, 126, 127, 128, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 7, 8])
def test_a_split_loses_nothing_and_is_as_even_as_can_be(batch_size, ranks):
    shares = split(batch_size, ranks)
    assert sum(shares) == batch_size
    assert len(shares) == ranks
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True), "the remainder goes to the first ranks"


def test_a_split_says_who_would_have_nothing_to_do():
    with pytest.raises(ValueError, match="a batch of 5 leaves nothing to do for 3 of 8 ranks"):
        split(5, 8)
    with pytest.raises(ValueError, match="ranks must be a whole number from 1 on, got 0"):
        split(5, 0)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on, got -1"):
        split(-1, 1)


def test_the_lessons_charts_show_the_numbers_and_their_ranges():
    spread = scaling_plots.Spread.of([1.0, 2.0, 4.0])
    assert spread == (2.0, pytest.approx(1.2), pytest.approx(3.6))
    seconds = {(kind, n): scaling_plots.Spread(4 / n, 2 / n, 8 / n) for kind in ("strong", "weak") for n in (1, 2)}
    figure = scaling_plots.speed_ups(seconds, "")
    shown = {(line.name, line.xaxis): list(line.y) for line in figure.data}
    assert shown["strong scaling", "x"] == [1, 2]
    assert shown["strong scaling", "x2"] == [1, 1]
    assert (shown["weak scaling", "x"], shown["weak scaling", "x2"]) == ([1, 4], [1, 2])
    assert shown["ideal", "x"] == [1, 2]
    strong = next(line for line in figure.data if line.name == "strong scaling")
    assert list(strong.error_y.array) == [1, 2]
    assert list(strong.error_y.arrayminus) == [0.5, 1]
    panel = scaling_plots.Panel("ranks", {1: 0.1, 2: 0.05}, {1: 0.11}, {2: 0.04})
    predicted, fitted, held_back = scaling_plots.predictions("", panel).data
    assert [list(line.y) for line in (predicted, fitted, held_back)] == [[100, 50], [110], [40]]
    assert (predicted.mode, fitted.mode) == ("lines+markers", "markers")
