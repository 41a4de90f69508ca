"""A NaN or an Inf among what is logged: named once, with its rank and step; under `watch="nan"` the end of the run."""

from __future__ import annotations

from array import array

import pytest

import labkit
from labkit.monitor.history import History
from labkit.monitor.not_finite import first
from labkit.protocol import events
from labkit.run import Run
from labkit.ui import charts, summary
from labkit.ui.view import state_of
from tests.support.fake_engine import FakeEngine, a_worker

NAN, INF = float("nan"), float("inf")


def log(rank, first, *losses, name="loss"):
    steps = range(first, first + len(losses))
    return events.Log(rank, (name,), array("q", steps), array("d", [0.1 * step for step in steps]), array("d", losses))


def logged(*logs, world_size=2):
    history = History(world_size)
    for each in logs:
        history.add(each)
    return history


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ([log(0, 0, 1.0, 2.0)], "None"),
        ([log(1, 0, 1.0, NAN)], "rank 1 logged loss NaN at step 1"),
        ([log(0, 5, INF)], "rank 0 logged loss Inf at step 5"),
        ([log(0, 5, -INF)], "rank 0 logged loss -Inf at step 5"),
        ([log(0, 9, NAN), log(1, 8, NAN), log(0, 10, NAN)], "rank 1 logged loss NaN at step 8"),
        ([log(0, 3, NAN, name="accuracy"), log(0, 3, NAN)], "rank 0 logged accuracy NaN at step 3"),
    ],
)
def test_the_value_of_the_earliest_step_is_the_one_that_is_named(logs, said):
    assert str(first(logged(*logs))).removesuffix(", the first value that is not finite") == said
    history = logged()
    for each in logs:
        history.add(each)
        found = first(history)
    assert str(found).startswith(said), "however often one looks"


def a_run(*logs):
    run = Run(FakeEngine(), 2, "train")
    for each in logs:
        run.recorded.add(each)
    return run


def test_every_view_names_rank_and_step_once():
    run = a_run(log(0, 0, 1.0, 1.0, 1.0), log(1, 0, 1.0, NAN, NAN))
    said = "rank 1 logged loss NaN at step 1, the first value that is not finite"
    assert summary.as_text(run).count(said) == 1
    assert summary.as_html(run).count(said) == 1
    assert state_of(run)["notice"].count(said) == 1
    assert "finite" not in summary.as_html(a_run(log(0, 0, 1.0))) + state_of(a_run())["notice"]


def test_the_chart_marks_the_step_in_its_panel():
    history = logged(log(0, 0, 1.0, 1.0), log(1, 0, 1.0, 1.0), log(0, 0, 0.1, name="lr"))
    figure = charts.logged(history)
    assert not figure.layout.shapes
    history.add(log(1, 2, NAN))
    figure = charts.logged(history)
    (mark,) = figure.layout.shapes
    assert (mark.x0, mark.x1, mark.xref) == (2, 2, "x")
    assert [note.text for note in figure.layout.annotations][-1] == "rank 1: NaN"
    history.add(log(1, 3, NAN))
    assert len(charts.logged(history).layout.shapes) == 1, "marked once"


# watch="nan"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_watched_a_log_of_nan_or_inf_raises_once_it_is_logged(value):
    worker, batcher, channel = a_worker(watches_nan=True)
    worker.log(loss=1.0, lr=0.1)
    with pytest.raises(FloatingPointError, match=rf"lr is {value} at step 1: the run was launched with watch='nan'"):
        worker.log(loss=1.0, lr=value)
    batcher.close()
    assert [step for event in channel.sent for step in event.steps] == [0, 1]


def diverges(worker, at):
    scale = 1.0
    for step in range(100):
        if worker.rank == 1 and step == at:
            scale = NAN
        worker.log(loss=scale)


@pytest.mark.spawns
def test_watched_a_run_ends_as_that_ranks_failure_with_its_frames():
    with pytest.raises(labkit.WorkerFailed) as failure:
        labkit.launch(diverges, 7, world_size=2, watch="nan", live=False)
    error = failure.value
    assert error.rank == 1
    assert "rank 1 failed: FloatingPointError: loss is nan at step 7" in error.diagnosis.headline
    assert {"scale": "nan", "step": "7"}.items() <= error.frames[0].variables.items()
    assert str(first(error.run.recorded)).startswith("rank 1 logged loss NaN at step 7,")
