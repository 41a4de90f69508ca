"""Runs that are meant to hang: launched, reported and drawn. Shared by lessons 12 and 13."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import psutil
import torch._dynamo  # noqa: F401 - what DDP imports when it is first used

import labkit
from labkit import Run, Session, Worker, WorkerFailed


def _begin(worker: Worker, function: Callable[[Worker], Any]) -> Any:
    return function(worker)


def launch(function: Callable[[Worker], Any], world_size: int, **options: Any) -> Run:
    """Launch `function(worker)` on fresh ranks, on the CPU with gloo.

    A rank imports this module, and with it what DDP needs, before it counts as started: `stall_s` is the time of the
    function alone.
    """
    options = {"backend": "gloo", "live": False, "name": function.__name__, **options}
    return labkit.launch(_begin, function, world_size=world_size, **options)


def report_of(function: Callable[[Worker], Any], world_size: int, **options: Any) -> WorkerFailed:
    """Launch a function that is meant to fail; print its report in short, and return the report."""
    try:
        launch(function, world_size, **options)
    except WorkerFailed as failure:
        for line in (failure.diagnosis.headline, *failure.diagnosis.others):
            print(textwrap.shorten(line, 240))
        return failure
    raise AssertionError(f"{function.__name__} should have failed")


def children() -> list[psutil.Process]:
    """Return all processes that this one has started, and those that they have."""
    return psutil.Process().children(recursive=True)


def left_over(before: Iterable[psutil.Process], session: Session) -> list[psutil.Process]:
    """Return the processes that runs have left, apart from those of `before` and the reserved ranks."""
    from course import exercises

    exercises.close()
    labkit.standby.off()
    return [
        process
        for process in children()
        if process not in before
        and process.pid not in session.pids
        and process.status() != psutil.STATUS_ZOMBIE
        and "resource_tracker" not in " ".join(process.cmdline())
    ]


def _about(failure: WorkerFailed, rank: int) -> str:
    """Return the part of a report that is about one rank, in a few words."""
    words = (
        r"has not entered \w+ #\d+|waits? in \w+|(?:is|are) in [\w.]+(?: #\d+)?|in [A-Z]+ #\d+ of shape \S+|"
        r"returned|failed|noticed|did not come|lost its connection"
    )
    report = "\n".join([failure.diagnosis.headline, *failure.diagnosis.others])
    found = re.search(rf"ranks? [\d, and]*\b{rank}\b.*?({words})", report)
    return found[1].replace("wait ", "waits ").replace("are ", "is ").strip(";") if found else "was ended"


def picture(reports: Mapping[str, WorkerFailed], world_size: int, title: str) -> Any:
    """Draw one row per report, by the function's name: what it has of each rank; the rank that it names is orange."""
    import plotly.graph_objects as go  # not at the top: ranks import this module

    ranks = range(world_size)
    figure = go.Figure(
        go.Heatmap(
            z=[[int(rank == failure.rank) for rank in ranks] for failure in reports.values()],
            text=[[_about(failure, rank) for rank in ranks] for failure in reports.values()],
            x=[f"rank {rank}" for rank in ranks],
            y=[name.replace("_", " ") for name in reports],
            texttemplate="%{text}",
            colorscale=["#E8EEF4", "#E69F00"],
            showscale=False,
            xgap=3,
            ygap=3,
        )
    )
    figure.update_xaxes(showgrid=False).update_yaxes(showgrid=False, autorange="reversed")
    return labkit.charts.style(figure, title, 90 + 34 * len(reports))
