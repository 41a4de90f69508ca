"""More ranks than are drawn and listed one by one: least, mean and greatest against NumPy, the first and the failed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from labkit.monitor.history import FEW, History
from labkit.protocol.events import Exit, Failure, Output, Started
from labkit.run import Run
from labkit.ui import charts, summary
from labkit.ui.view import state_of
from tests.support.fake_engine import FakeEngine
from tests.support.logs import log

RANKS, STEPS = 64, 50


def losses(ranks=RANKS, steps=STEPS):
    """(ranks, steps): noise around a curve that falls, with a NaN and an Inf."""
    values = 1 / (1 + np.arange(steps)) + 0.1 * np.random.default_rng(0).normal(size=(ranks, steps))
    values[3, steps // 2], values[5, steps // 3] = np.nan, np.inf
    return values


def history_of(values):
    """What ranks log that take their steps by turns, a few at a time."""
    history = History(len(values))
    for start in range(0, values.shape[1], 7):
        for rank, row in enumerate(values):
            history.add(log(rank, range(start, min(start + 7, len(row))), loss=row[start : start + 7]))
    return history


def a_run(values):
    """A run of which each rank has begun, logged and printed; rank 40 has failed."""
    run = Run(FakeEngine(RANKS), RANKS, "train")
    for rank in range(RANKS):
        run._follower.take(Started(rank))
        run._follower.take(log(rank, range(values.shape[1]), loss=values[rank]))
        run._follower.take(Output(rank, f"this is rank {rank}\n"))
    run._follower.take(Failure(40, 1.0, "running", "ValueError: bad", "ValueError: bad"))
    return run


def of_kind(curves):
    return {curve.key: curve for curve in curves}


def test_the_chart_has_numpys_least_mean_and_greatest_of_what_is_finite():
    values = losses()
    curves = of_kind(history_of(values).drawn())
    finite = np.where(np.isfinite(values), values, np.nan)
    assert list(curves) == ["least", "mean", "greatest"]
    assert curves["mean"].x.tolist() == list(range(STEPS))
    assert curves["least"].y.tolist() == np.nanmin(finite, axis=0).tolist()
    assert curves["mean"].y == pytest.approx(np.nanmean(finite, axis=0))
    assert curves["greatest"].y.tolist() == np.nanmax(finite, axis=0).tolist()


def test_a_step_is_drawn_where_half_of_those_have_a_value_that_log():
    history = History(40)
    for rank in range(10):  # a pipeline: the last stages know the loss
        count = 20 if rank < 6 else 10
        history.add(log(rank, range(count), loss=[rank] * count))
    history.add(log(0, [20], loss=[99.0]))  # one rank alone is ahead
    assert of_kind(history.drawn())["mean"].x.tolist() == list(range(20))
    assert [x.tolist() for x, _ in History(40).over_ranks("loss").values()] == [[], [], []]


def test_at_sixteen_ranks_every_rank_has_its_curve_and_of_more_there_are_three():
    assert len(charts.logged(history_of(losses(FEW))).data) == FEW + 1
    values = losses()
    history = history_of(values[:, :20])
    figure = charts.logged(history)
    assert [trace.name for trace in figure.data if trace.showlegend] == ["least", "mean", "greatest"]


def test_the_view_and_the_summary_have_the_first_ranks_and_those_that_failed():
    run = a_run(losses())
    shown = state_of(run)
    assert "64 ranks: 63 running, 1 failed" in shown["notice"]
    assert [row["rank"] for row in shown["rows"]] == [*range(FEW), 40]
    page = summary.as_html(run)
    assert [int(rank) for rank in re.findall(r"<summary>output of rank (\d+)</summary>", page)] == [*range(FEW), 40]
    assert f"output of {RANKS - FEW - 1} more ranks: run.output" in page
    assert [rank for rank, _ in shown["output"]] == [*range(FEW)]
    assert "this is rank 15" in shown["output"][15][1]


def test_what_became_of_many_is_told_in_few_lines():
    run = a_run(losses())
    run.engine._killed = set(range(RANKS)) - {40}
    for rank in range(RANKS):
        run._follower.take(Exit(rank, 1 if rank == 40 else -9))
    run._follower.settle()
    assert run.error.diagnosis.others == [
        f"63 ranks (0–39, 41–63): was still running and was ended after logging step {STEPS - 1}"
    ]
    assert "what became of the other 63 ranks" in summary.as_html(run)
