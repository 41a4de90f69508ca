"""More ranks than can be drawn one by one: the band against NumPy, who stands apart, the table's choice, the search."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

import labkit
from labkit.failures.grouping import rank_list
from labkit.failures.stacks import RankStack, Stacks
from labkit.monitor import band
from labkit.monitor import large_world as many_history
from labkit.monitor.history import FEW
from labkit.monitor.output import RankOutput, search
from labkit.monitor.state import RunState
from labkit.protocol.events import Exit, Failure, Output, Started
from labkit.run import Run
from labkit.ui import charts, kernel, live, summary
from labkit.ui import listing as many
from labkit.ui.pictures import picture
from labkit.ui.widgets import close
from tests.support.fake_engine import FakeEngine
from tests.support.logs import log

RANKS, STEPS = 64, 50


def new_history(world_size):
    return RunState(world_size, 0.0, 0.0).recorded


def losses(ranks=RANKS, steps=STEPS, seed=0):
    """(ranks, steps): noise around a curve that falls."""
    rng = np.random.default_rng(seed)
    return 1 / (1 + np.arange(steps)) + 0.1 * rng.normal(size=(ranks, steps))


def history_of(values, name="loss", every=1):
    """What ranks log that take their steps by turns, a few at a time."""
    history = new_history(len(values))
    for start in range(0, values.shape[1], 7):
        for rank, row in enumerate(values):
            steps = range(start, min(start + 7, len(row)))
            history.add(log(rank, [step * every for step in steps], **{name: row[start : start + 7]}))
    return history


def a_run(values=None, ranks=RANKS):
    run = Run(FakeEngine(ranks), ranks, "train")
    for rank in range(ranks):
        run._follower.take(Started(rank))
        if values is not None:
            run._follower.take(log(rank, range(values.shape[1]), loss=values[rank]))
    return run


# The band


@pytest.mark.parametrize("ranks", [FEW + 1, RANKS])
def test_the_band_has_numpys_quantiles_at_every_step(ranks):
    values = losses(ranks)
    found = history_of(values).band("loss")
    assert found.steps.tolist() == list(range(STEPS))
    assert found.least.tolist() == values.min(axis=0).tolist()
    assert found.greatest.tolist() == values.max(axis=0).tolist()
    assert found.mean == pytest.approx(values.mean(axis=0))
    lower, upper = np.quantile(values, [0.25, 0.75], axis=0)
    assert found.lower == pytest.approx(lower)
    assert found.upper == pytest.approx(upper)


def test_nan_and_inf_count_as_no_value():
    values = losses()
    values[3, 10:20], values[5, 15], values[6, 15] = np.nan, np.inf, -np.inf
    found = history_of(values).band("loss")
    finite = np.where(np.isfinite(values), values, np.nan)
    assert found.least.tolist() == np.nanmin(finite, axis=0).tolist()
    assert found.greatest.tolist() == np.nanmax(finite, axis=0).tolist()
    assert found.mean == pytest.approx(np.nanmean(finite, axis=0))
    assert found.lower == pytest.approx(np.nanquantile(finite, 0.25, axis=0))
    assert found.upper == pytest.approx(np.nanquantile(finite, 0.75, axis=0))


@pytest.mark.parametrize(("steps", "every"), [(5_000, 1), (1_000, 30), (band.BUCKETS, 1), (band.BUCKETS + 1, 1)])
def test_a_long_band_has_few_points_and_keeps_its_extremes(steps, every):
    values = losses(20, steps)
    values[7, steps // 3], values[8, steps // 2] = 50, -50
    found = history_of(values, every=every).band("loss")
    assert band.BUCKETS / 2 <= len(found.steps) <= band.BUCKETS
    assert (np.diff(found.steps) > 0).all()
    assert found.steps[-1] == (steps - 1) * every
    assert (found.greatest.max(), found.least.min()) == (50, -50)
    # The rest is of the ranks' newest values up to the step that is drawn.
    at = found.steps // every
    assert found.mean == pytest.approx(values[:, at].mean(axis=0))
    assert found.upper == pytest.approx(np.quantile(values[:, at], 0.75, axis=0))


def test_the_band_does_not_depend_on_the_order_in_which_ranks_are_heard():
    values = losses(20, 3_000)
    one, other = history_of(values), new_history(20)
    for rank in reversed(range(20)):
        other.add(log(rank, range(3_000), loss=values[rank]))
        assert other.names == ["loss"], "taken in at once"
    for a, b in zip(one.band("loss"), other.band("loss"), strict=True):
        assert a == pytest.approx(b)


def test_steps_may_be_any_numbers_in_any_order():
    history = new_history(20)
    for steps in ([5, 6], [-900, -899], [10**12], [7]):
        for rank in range(20):
            history.add(log(rank, steps, loss=[rank] * len(steps)))
        found = history.band("loss")
    assert found.steps.tolist() == [-899, 7, 10**12], "those below zero, those from there on, and the one far away"
    assert set(found.least) == {0.0}
    assert set(found.greatest) == {19.0}


def test_the_band_is_where_most_of_those_have_a_value_that_log():
    history = new_history(40)
    for rank in range(10):  # a pipeline: the last stages know the loss
        history.add(log(rank, range(20 if rank < 6 else 10 if rank else 5), loss=[rank] * (20 if rank < 6 else 10)))
    history.add(log(0, [20], loss=[99.0]))  # one rank alone is ahead
    assert history.band("loss").steps.tolist() == list(range(20))


def test_ranks_that_go_back_take_their_steps_again_and_the_others_keep_theirs():
    values = losses(20, 30)
    history = history_of(values)
    for rank in range(18):
        history.go_back(rank, 10)
        history.add(log(rank, [10], loss=[7.0]))
    frame = history.frame()
    assert frame.groupby("rank").size().tolist() == [11] * 18 + [30] * 2
    assert frame["loss"][frame["rank"] == 3].tolist() == [*values[3, :10].tolist(), 7.0]
    assert history.band("loss").greatest[10] == 7.0
    assert history.progress(3).last_step == 10


# Who stands apart


@pytest.mark.parametrize("seed", range(5))
def test_of_ranks_that_differ_by_chance_none_stands_apart(seed):
    assert history_of(losses(1024, 30, seed)).apart() == {}


def test_ranks_that_stand_apart_are_found_the_farthest_first():
    values = losses(256)
    values[17] += 3
    values[200] -= 9
    values[40, -5:] += 5  # only lately
    values[90, 20] += 50  # once
    assert list(history_of(values).apart()) == [200, 40, 17]


def test_ranks_whose_last_value_is_not_finite_stand_apart_farther_than_any():
    values = losses(256)
    values[17] += 3
    values[99, 40:] = np.nan
    assert list(history_of(values).apart()) == [99, 17]
    values[:, 40:] = np.nan
    assert list(history_of(values).apart()) == [17], "not where all are so"


def test_equal_values_do_not_stand_apart_for_their_last_bit():
    values = np.full((64, 30), 0.1)
    values[5] = np.nextafter(0.1, 1)
    assert history_of(values).apart() == {}
    values[5] = 0.2
    assert history_of(values).apart() == {5: "loss"}


# The chart


def parts(figure, name="loss"):
    return {trace.meta[1]: trace for trace in figure.data if trace.meta[0] == name}


def test_the_chart_of_many_is_the_band_the_mean_and_the_ranks_that_stand_apart():
    values = losses()
    values[17] += 3
    figure = charts.logged(history_of(values), ranks=[3])
    assert [trace.name for trace in figure.data if trace.showlegend] == [
        "least to greatest",
        "middle half",
        "mean",
        "rank 17",
        "rank 3",
    ]
    found = parts(figure)
    assert np.asarray(found["greatest"].y) == pytest.approx(values.max(axis=0))
    assert np.asarray(found["upper"].y) == pytest.approx(np.quantile(values, 0.75, axis=0), rel=1e-5)
    assert np.asarray(found["slot 0"].y) == pytest.approx(values[17])
    assert [key for key, trace in found.items() if trace.fill] == ["greatest", "upper"]


def test_at_sixteen_ranks_every_rank_has_its_curve_and_at_seventeen_there_is_a_band():
    assert len(charts.logged(history_of(losses(FEW))).data) == FEW + 1
    assert set(parts(charts.logged(history_of(losses(FEW + 1))))) == {
        *many_history.EDGES,
        "mean",
        *(f"slot {slot}" for slot in range(many_history.APART)),
    }


def test_a_live_chart_of_many_stays_the_same_figure_when_another_rank_comes_to_stand_apart():
    values = losses()
    history = history_of(values[:, :20])
    figure = charts.logged(history)
    traces = list(figure.data)
    values[9, 20:] += 5
    for rank in range(RANKS):
        history.add(log(rank, range(20, STEPS), loss=values[rank, 20:]))
    assert charts.refresh(figure, history) is True
    assert all(trace is before for trace, before in zip(figure.data, traces, strict=True))
    assert [trace.name for trace in figure.data if trace.showlegend][-1] == "rank 9"
    assert json.loads(figure.to_json())["data"] == json.loads(charts.logged(history).to_json())["data"]
    assert charts.refresh(figure, history, [3]) is False, "one that is asked for needs a curve more"


def test_a_saved_chart_of_1024_ranks_is_small():
    history = new_history(1024)
    values = losses(1024, 600)
    for rank, row in enumerate(values):
        history.add(log(rank, range(600), loss=row, accuracy=row, lr=row))
    assert len(json.dumps(charts.logged(history).bundle()[charts.PLOTLY])) < 300_000


def test_the_picture_has_the_band_in_two_shades():
    blob = picture(charts.logged(history_of(losses())))
    colors = {color for _, color in Image.open(io.BytesIO(blob)).convert("RGB").getcolors(10_000)}
    greys = sorted(color[0] for color in colors if max(color) - min(color) < 8 and 130 < color[0] < 250)
    assert greys[-1] - greys[0] > 30, "light where all are, darker where half are"
    assert len(blob) < 40_000


# The table


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", []),
        ("3", [3]),
        ("7, 3 5", [3, 5, 7]),
        ("40-43", [40, 41, 42, 43]),
        ("60 – 99999999999", [60, 61, 62, 63]),
        ("64, 1000", []),
        ("rank 3!", [3]),
        ("0-63", list(range(many.ASKED))),
    ],
)
def test_ranks_are_asked_for_by_number(text, ranks):
    assert many.read_ranks(text, RANKS) == ranks


def test_the_table_has_who_is_asked_for_who_failed_who_stands_apart_and_the_slowest():
    values = losses()
    values[17] += 3
    history = history_of(values)
    for rank in range(RANKS):
        if rank != 50:  # it has fallen behind
            steps = range(STEPS, STEPS + 20)
            history.add(log(rank, steps, loss=[values[rank, -1]] * 20, step_s=0.2 if rank == 51 else 0.1))
    states = ["running"] * RANKS
    states[2] = "failed"
    assert history.listed(states, [17, 30]) == {
        17: "asked for, apart in loss",
        30: "asked for",
        2: "failed",
        50: "slowest",
        51: "slowest",
    }


def test_ranks_that_have_ended_are_not_the_slowest_while_others_are_at_work():
    history = new_history(20)
    for rank in range(20):
        history.add(log(rank, range(5 + rank), loss=[1.0] * (5 + rank)))
    states = ["finished"] * 10 + ["running"] * 10
    assert list(history.listed(states)) == [10, 11]


def test_of_ranks_that_go_on_together_none_is_the_slowest():
    history = new_history(20)
    for rank in range(20):
        history.add(log(rank, range(30), step_s=0.1 + 0.0001 * (7 * rank % 20), loss=[1.0] * 30))
    history.add(log(12, [30], loss=[1.0]))  # it is heard of first
    assert history.listed(["running"] * 20) == {}


def test_before_anything_is_logged_only_who_is_asked_for_is_listed():
    assert new_history(20).listed(["starting"] * 20, [4]) == {4: "asked for"}


def test_the_states_table_of_many_has_a_head_and_few_rows():
    run = a_run(losses())
    run._follower.take(Failure(9, 1.0, "running", "ValueError: bad", "ValueError: bad"))
    shown = live.states_html(run, [3])
    assert "64 ranks: 63 running, 1 failed · logged 50 times · 10 steps/s" in shown
    assert re.findall(r"<b>rank (\d+)</b> (\w+)", shown)[:2] == [("3", "running"), ("9", "failed")]
    assert shown.count("<tr>") == 2, "nobody is slow"


# The output


def output_of(text):
    found = RankOutput()
    found.add(text)
    return found


def test_a_search_puts_equal_lines_together_and_those_of_the_fewest_ranks_first():
    outputs = [output_of(f"epoch 1\nloss of rank {rank % 2}\nerror: peer\n") for rank in range(6)]
    outputs[4].add("CUDA Error\nepoch")
    assert search(outputs, "error") == [
        ("CUDA Error", [4]),
        ("error: peer", [0, 1, 2, 3, 4, 5]),
    ]
    assert search(outputs, "rank 1") == [("loss of rank 1", [1, 3, 5])]
    assert [found.line for found in search(outputs, "EPOCH")] == ["epoch", "epoch 1"]
    assert search(outputs, "nothing") == []


def test_a_run_is_searched_and_the_view_says_what_it_found():
    run = a_run(losses())
    for rank in range(RANKS):
        run._follower.take(Output(rank, f"begin\n{'<bad>' if rank == 5 else 'good'} batch\n"))
    assert [found.ranks for found in run.search_output("bad")] == [[5]]
    assert many.output_lines(run, "batch") == ["[rank 5] <bad> batch", "[63 ranks (0–4, 6–63)] good batch"]
    assert many.output_lines(run, "none") == ["no rank's output has 'none' in it"]
    assert many.output_lines(run, "", [7])[:4] == [
        "[rank 0] begin",
        "[rank 0] good batch",
        "[rank 7] begin",
        "[rank 7] good batch",
    ]


def test_a_search_that_finds_much_says_how_to_have_all_of_it():
    run = a_run()
    run._follower.take(Output(3, "".join(f"line {number}\n" for number in range(many.FOUND + 5))))
    lines = many.output_lines(run, "line")
    assert len(lines) == many.FOUND + 1
    assert lines[-1] == "… and 5 more lines: run.search_output('line')"


def test_the_summary_of_many_has_the_output_of_few():
    run = a_run(losses())
    for rank in range(RANKS):
        run._follower.take(Output(rank, f"this is rank {rank}\n"))
    page = summary.as_html(run)
    shown = {0, *run.recorded.listed(run.states)}
    assert {int(rank) for rank in re.findall("<summary>output of rank (\\d+)</summary>", page)} == shown
    assert f"output of {RANKS - len(shown)} more ranks" in page


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (range(16), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 15"),
        (range(20), "20 ranks (0–19)"),
        ([*range(1023), 1025], "1,024 ranks (0–1022, 1025)"),
        (range(0, 40, 2), "20 ranks (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, …)"),
    ],
)
def test_many_ranks_are_said_in_spans(ranks, words):
    assert rank_list(list(ranks)) == words


def test_stacks_of_many_are_shown_together():
    stacks = Stacks(RankStack(rank, [], {}, "has returned" if rank == 9 else "did not answer") for rank in range(100))
    assert stacks.in_words == "rank 9 has returned; 99 ranks (0–8, 10–99) did not answer"
    assert stacks._repr_html_().count("<details") == 2


# The live view


def test_the_live_view_of_many_has_no_tab_for_each_and_answers_its_boxes(monkeypatch):
    shown = []
    monkeypatch.setattr(kernel, "display", lambda thing, **_: shown.append(thing))
    run = a_run(losses())
    for rank in range(RANKS):
        run._follower.take(Output(rank, f"this is rank {rank}\n"))
    view = live.LiveView(run)
    assert not isinstance(view._output, live.Tabs)
    ranks, words = view._output.boxes
    assert {view._output.row, view._output.output} <= set(view._box.children)
    view._draw()
    assert "[rank 0] this is rank 0" in view._output.output.value
    ranks.value, words.value = "33", "RANK 44"
    view._draw()
    assert "<b>rank 33</b>" in view._states.value
    assert "[rank 44] this is rank 44" in view._output.output.value
    assert "rank 0" not in view._output.output.value
    close([view._box])
    assert all(widget.comm is None for widget in (view._title, ranks, words, view._output.output))


# A failure


def test_what_became_of_many_is_told_in_few_lines():
    run = a_run(losses())
    run._follower.take(Failure(9, 1.0, "running", "ValueError: bad", "ValueError: bad"))
    run.engine._killed = set(range(RANKS)) - {9}
    for rank in range(RANKS):
        run._follower.take(Exit(rank, 1 if rank == 9 else -9))
    run._follower.settle()
    assert run.error.diagnosis.others == [
        f"63 ranks (0–8, 10–63): was still running and was ended after logging step {STEPS - 1}"
    ]
    assert "what became of the other 63 ranks" in summary.as_html(run)


# With ranks


def meet(worker):
    """Log a loss that stands apart on one rank, and add up all ranks."""
    for step in range(3):
        worker.log(loss=100.0 if worker.rank == 5 else step + worker.rank / 100)
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


@pytest.mark.spawns
def test_more_ranks_than_can_be_drawn_one_by_one_train_on_one_machine():
    run = labkit.launch(meet, world_size=20, live=False)
    assert run.results == [20] * 20
    assert {trace.name for trace in run.figure().data} >= {"least to greatest", "middle half", "mean", "rank 5"}
