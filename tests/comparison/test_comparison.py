"""Plain runs side by side: their curves, and a row each."""

import math
import re

import numpy as np
import pandas as pd
import pytest

import labkit
from labkit.protocol.events import Exit, Memory, Result
from labkit.protocol.packing import pack_result
from labkit.run import Run
from labkit.ui import kernel
from tests.conftest import LONG_S
from tests.support import logs
from tests.support.fake_engine import FakeEngine, a_job

MIB = 2**20


def log(rank, times_s, **columns):
    return logs.log(rank, range(len(times_s)), times_s=times_s, **columns)


def run_of(*records, world_size=2, codes=(0, 0)):
    codes = codes[:world_size]
    returned = [Result(rank, pack_result(None)) for rank, code in enumerate(codes) if code == 0]
    ends = [Exit(rank, code) for rank, code in enumerate(codes)]
    engine = FakeEngine(world_size)
    for event in (*records, *returned, *ends):
        engine.arrived.put(event)
    run = Run(engine, world_size, "test")
    run.start(a_job())
    assert run.over.wait(LONG_S)
    return run


@pytest.fixture
def two_ranks():
    """Ten calls per rank in 0.9 s; 32 samples each."""
    times_s = np.arange(10) / 10 + 5
    losses = [np.linspace(2, 0.5, 10), np.linspace(2, 0.7, 10)]
    logs = [log(rank, times_s, loss=losses[rank], samples=[32] * 10) for rank in (0, 1)]
    return run_of(*logs, Memory(0, 300 * MIB, 0), Memory(1, 500 * MIB, 0))


@pytest.fixture
def one_rank():
    return run_of(log(0, [1, 2], loss=[2, 1], accuracy=[0.5, 0.75]), Memory(0, 900 * MIB, 100 * MIB), world_size=1)


def test_the_table_has_a_row_per_run_in_the_order_given(two_ranks, one_rank):
    table = labkit.compare({"DDP": two_ranks, "one process": one_rank}).frame()
    assert list(table.index) == ["DDP", "one process"]
    assert list(table.columns) == [
        "ranks",
        "status",
        "error",
        "final loss",
        "accuracy",
        "loss off by",
        "seconds",
        "samples_per_s",
        "peak_mib",
    ]
    assert table["ranks"].tolist() == [2, 1]
    assert table["status"].tolist() == ["finished", "finished"]
    assert table["final loss"].tolist() == pytest.approx([0.6, 1])  # mean over ranks of the last value
    assert table["accuracy"].tolist() == pytest.approx([float("nan"), 0.75], nan_ok=True)
    assert table["seconds"].tolist() == [two_ranks.elapsed_s, one_rank.elapsed_s]
    # The first call's samples were worked on before the span began: 9 × 32 in 0.9 s, on two ranks.
    assert table["samples_per_s"].tolist() == pytest.approx([2 * 9 * 32 / 0.9, float("nan")], nan_ok=True)
    assert table["peak_mib"].tolist() == [500, 100]  # the greatest of a rank; on the GPU if it has one


def test_a_failed_run_and_one_that_logged_nothing_have_their_rows(two_ranks):
    died = run_of(log(0, [1], loss=[3]), codes=(0, 3))
    table = labkit.compare({"DDP": two_ranks, "died": died, "silent": run_of()}).frame()
    assert table["status"].tolist() == ["finished", "failed", "finished"]
    assert table["final loss"].tolist() == pytest.approx([0.6, 3, float("nan")], nan_ok=True)
    assert table["samples_per_s"].isna().tolist() == [False, True, True]


def test_tables_and_pictures_are_of_the_runs_that_are_asked_for_by_title_or_slug(two_ranks, one_rank):
    compared = labkit.compare({"DDP, accumulated": two_ranks, "one process": one_rank})
    for titles in (["one process"], ["one_process"]):
        assert list(compared.frame(titles).index) == ["one process"]
        assert list(compared.table(titles).data.index) == ["one process"]
        assert {trace.name for trace in compared.figure(titles).data} == {"one process"}
    assert list(compared.frame(["one_process", "ddp_accumulated"]).index) == ["DDP, accumulated", "one process"]
    for ask in (compared.frame, compared.table, compared.figure, compared.memory):
        with pytest.raises(ValueError, match=r"known are DDP, accumulated \(ddp_accumulated\), .*; got 'dpp'"):
            ask(["dpp"])
    with pytest.raises(ValueError, match="saved as a page"):
        compared.save("page.png")


@pytest.mark.parametrize(
    ("runs", "metric", "error", "said"),
    [
        (lambda run: [run], "loss", TypeError, "mapping of title to run.*got list"),
        (lambda run: {"DDP": run.history}, "loss", TypeError, "takes runs and functions, got a DataFrame for 'DDP'"),
        (lambda run: {}, "loss", ValueError, "at least one run or function, got none"),
        (lambda run: {"DDP": run}, "los", ValueError, "no run has logged 'los'; logged were: loss, samples"),
        (lambda run: {"DDP": run_of()}, "loss", ValueError, "logged were: nothing"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_found(two_ranks, runs, metric, error, said):
    with pytest.raises(error, match=said):
        labkit.compare(runs(two_ranks), metric)


# The table that people read


def a_run(*losses, **columns_of):
    return run_of(log(0, range(len(losses)), loss=losses, **columns_of), world_size=1)


def test_a_run_that_diverged_says_so_in_the_table_and_not_that_it_is_equal():
    compared = labkit.compare({"good": a_run(2.0, 1.0, 0.5), "bad": a_run(2.0, 1.0, math.nan)})
    frame, said = compared.frame(), compared.table().data
    assert math.isnan(frame.loc["bad", "loss off by"])
    assert said.loc["bad", "loss off by"] == "not finite (from step 2)"
    assert said.loc["bad", "final loss"] == "NaN"
    assert said.loc["good", "loss off by"] == "0"


def test_what_was_not_logged_is_left_empty_and_nan_is_not():
    silent = run_of(log(0, [1], other=[1.0]), world_size=1)
    rows = re.findall("<td[^>]*>(.*?)</td>", labkit.compare({"a": a_run(1.0), "silent": silent}).table().to_html())
    assert rows.count("") == 2, "its final loss, and how far that is off"
    assert "samples" not in "".join(rows)
    assert not any("nan" in row.lower() for row in rows)
    assert ">NaN</td>" in labkit.compare({"a": a_run(1.0), "b": a_run(1.0, accuracy=[math.nan])}).table().to_html()


def test_titles_and_errors_are_escaped_in_the_table():
    table = labkit.compare({"<b>bold</b>": a_run(1.0)}).table().to_html()
    assert "<b>" not in table
    assert "&lt;b&gt;bold" in table


def test_a_comparison_shows_itself_once_in_a_cell(two_ranks, monkeypatch):
    """`labkit.compare(…)` that has shown itself while it grew may be the last expression of its cell, too."""
    shown, executions = [], iter(["first cell", "first cell", "second cell"])
    monkeypatch.setattr(kernel, "display", shown.append)
    monkeypatch.setattr(kernel, "this_execution", lambda: next(executions))
    compared = labkit.compare({"DDP": two_ranks})
    counts = []
    for _ in range(3):
        compared._ipython_display_()
        counts.append(len(shown))
    assert counts == [2, 2, 4], "and in another cell again"
    figure, table, *_ = shown
    assert isinstance(figure, labkit.charts.Chart)
    assert isinstance(table, pd.io.formats.style.Styler)
    assert ">0.6<" in table.to_html()
