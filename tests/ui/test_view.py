"""What a person sees of a run, drawn from a `Run` that no rank ever fed: no process, no kernel, no browser."""

from __future__ import annotations

import base64
import json
import re
import time

import numpy as np
import plotly.graph_objects as go
import pytest
from ipywidgets.widgets import widget as widget_module

from labkit.launchers.job_events import Notice, Restarted
from labkit.monitor.output import LINES_KEPT
from labkit.protocol.events import Exit, Expect, Failure, Output, Result, Started, Stopped
from labkit.protocol.packing import pack_result
from labkit.run import Run
from labkit.ui import charts, formatting, kernel, present, prewarm, summary, view
from labkit.ui.lines import Lines
from labkit.ui.tables import STATE_COLORS
from labkit.ui.view import state_of
from tests.conftest import LONG_S, wait_until
from tests.support import logs
from tests.support.fake_engine import FakeEngine

open_widgets = widget_module._instances if hasattr(widget_module, "_instances") else widget_module.Widget.widgets
"""By id; ipywidgets before 8 has the second name."""


def started(world_size=2, name="train", steps=0):
    """A run whose ranks have all begun; rank r has logged loss 1 / (1 + step) + r and 64 samples at each step."""
    run = Run(FakeEngine(world_size), world_size, name)
    for rank in range(world_size):
        run._follower.take(Started(rank))
        if steps:
            log(run, rank, range(steps), loss=1 / (1 + np.arange(steps)) + rank, samples=[64] * steps)
    return run


def log(run, rank, steps, **columns):
    """What arrives when a rank has logged these columns, ten steps a second."""
    run._follower.take(logs.log(rank, steps, **columns))


def finish(run):
    for rank in range(run.world_size):
        run._follower.take(Result(rank, pack_result(rank)))
        run._follower.take(Exit(rank, 0))
    run._follower.settle()
    return run


def fail(run, rank=1, summary="ValueError: bad batch", cause="Cell In[3], line 2, in train\nValueError: bad batch"):
    """The rank reports an error; the others are ended."""
    run._follower.take(Failure(rank, 1.5, "running", summary, cause))
    run.engine._killed = set(range(run.world_size)) - {rank}
    for each in range(run.world_size):
        run._follower.take(Exit(each, 1 if each == rank else -9))
    run._follower.settle()
    return run


class Shown:
    """Something on display: what it showed first, and what has replaced that since."""

    def __init__(self, thing):
        self.things = [thing]

    def update(self, thing, **_):
        self.things.append(thing)


@pytest.fixture
def page(monkeypatch):
    """Stands for the cell's output area: all that is displayed, in order."""
    shown = []

    def display(thing, **_):
        shown.append(Shown(thing))
        return shown[-1]

    monkeypatch.setattr(kernel, "display", display)
    return shown


def numbers(bundle, curve=0):
    """The y values of a curve of a chart that is shown; Plotly packs them from 6 on."""
    y = bundle[charts.PLOTLY]["data"][curve]["y"]
    return y if isinstance(y, list) else np.frombuffer(base64.b64decode(y["bdata"]), y["dtype"]).tolist()


@pytest.fixture(scope="module", autouse=True)
def slow_imports_are_paid():
    """The first chart imports for a second; live views here are timed."""
    prewarm.begin().join()


def drawn(live):
    """What the widget has a page draw."""
    return json.loads(live._widget._carrier.value)


def curves(shown, name="loss"):
    """The curves of a panel: label → (steps, values)."""
    (panel,) = [panel for panel in shown["panels"] if panel["name"] == name]
    return {curve["label"]: (panel["steps"][curve["steps"]], curve["y"]) for curve in panel["curves"]}


def end(run, live):
    """Finish the run and return its live view once that has drawn the end."""
    finish(run)
    live.join(LONG_S)
    assert not live.is_alive()
    return live


@pytest.fixture
def printed(capsys):
    """Gives all lines printed so far."""
    text = ""

    def lines():
        nonlocal text
        text += capsys.readouterr().out
        return text.splitlines()

    return lines


# One line


def test_the_line_says_name_phase_step_values_rate_and_seconds():
    run = Run(FakeEngine(), 2, "train")
    run.start_s -= 12
    assert re.fullmatch(r"train: starting · 2 ranks · 12\.\d s", summary.line(run))
    run._follower.take(Started(0))
    assert "train: starting" in summary.line(run), "one rank is still on its way"
    run._follower.take(Started(1))
    log(run, 0, range(21), loss=np.linspace(2, 1, 21), samples=[64] * 21)
    log(run, 1, range(11), loss=np.linspace(4, 3, 11), samples=[64] * 11)
    # The step that all have reached, the mean over ranks, and samples per second of all ranks together.
    assert re.fullmatch(r"train: running · 2 ranks · step 10 · loss 2 · 1,280 samples/s · 12\.\d s", summary.line(run))


@pytest.mark.parametrize(
    "losses",
    [
        [1, 2, float("inf")],
        [1, float("-inf"), 2],
        [float("inf")] * 3,
        [1, float("nan"), 2],
        [float("nan")] * 3,
        [3, 3, 3],
        [1, 1e39, 2],  # more than float32 holds
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_loss_that_explodes_is_shown_like_any_other(losses, page):
    run = started()
    for rank in range(2):
        log(run, rank, range(3), loss=losses)
    finish(run)
    Lines(run, in_notebook=True, wait=True).run()
    said, chart = (place.things[-1] for place in page)
    assert "train: finished" in said["text/plain"]
    assert chart[charts.PLOTLY]["data"]
    shown = state_of(run)
    assert curves(shown)["rank 0"][1] == [y if np.isfinite(y) else None for y in losses], "a gap"
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


# What stays


def test_what_ranks_print_and_name_is_escaped():
    run = started(name="<i>mine</i>")
    run._follower.take(Output(1, "<script>alert('from a rank')</script> & more\n"))
    log(run, 0, [0], **{"<img>": [1.0]})
    fail(run, summary="ValueError: <b>bad</b>", cause="Cell In[3]\nValueError: <b>bad</b>")
    shown = summary.as_html(run)  # the rest, `view.js` sets as text
    for raw in ("<script", "<i>mine", "<img", "<b>bad"):
        assert raw not in shown
    assert "&lt;script&gt;alert(&#x27;from a rank&#x27;)&lt;/script&gt; &amp; more" in shown
    assert "ValueError: &lt;b&gt;bad&lt;/b&gt;" in shown


def test_what_a_cluster_says_is_shown_and_a_line_to_type_can_be_copied():
    run = started()
    run._follower.take(Notice(-1, "waits for <2> nodes:\npython -m x", queued=True))
    shown = state_of(run)
    assert (shown["notice"], shown["to_copy"]) == ("waits for <2> nodes:", "python -m x")
    assert {row["state"] for row in shown["rows"]} == {"queued"}
    run._follower.take(Notice(-1, ""))
    assert (state_of(run)["notice"], state_of(run)["to_copy"]) == ("", "")


def test_a_summary_of_a_failure_has_headline_cause_and_folded_others():
    run = started(3, steps=5)
    run._follower.take(Output(0, "before the end\n"))
    shown = summary.bundle(fail(run))
    headline = "rank 1 failed: ValueError: bad batch (after logging step 4)"
    assert shown["text/plain"].splitlines()[0].startswith("train: failed · 3 ranks · step 4")
    assert shown["text/plain"].splitlines()[-1] == headline
    page = shown["text/html"]
    assert f"<b>{headline}</b>" in page
    assert ">Cell In[3], line 2, in train\nValueError: bad batch</pre>" in page
    others = re.search("<details><summary>what became of the other 2 ranks</summary>(.*?)</details>", page).group(1)
    assert re.findall("<li>(.*?)</li>", others) == [
        "rank 0 was still running and was ended after logging step 4",
        "rank 2 was still running and was ended after logging step 4",
    ]
    assert "<details><summary>output of rank 0</summary><pre>before the end</pre></details>" in page
    assert "output of rank 1" not in page, "it printed nothing"
    assert not re.search("<script|<link|<style|class=|src=|href=|http", page), "it needs no network"


def test_a_summary_stays_small_however_much_is_printed_and_however_long_the_lines_are():
    run = started()
    for rank in range(2):
        for line in range(LINES_KEPT + 5):
            run._follower.take(Output(rank, f"line {line:05d}\n"))
    long = started()
    long._follower.take(Output(0, "".join("x" * 5000 + f" {line}\n" for line in range(300))))
    assert len(summary.as_html(finish(long))) < 50_000, "one rank's tail, in a saved notebook"
    assert len(run.output[0].splitlines()) == LINES_KEPT + 1, "the last lines, and one that says how many were dropped"
    page = summary.as_html(finish(run))
    listed = re.findall(r"line (\d{5})", page)
    assert listed == [f"{line:05d}" for line in range(LINES_KEPT + 5 - summary.TAIL_LINES, LINES_KEPT + 5)] * 2
    assert len(page) < 20_000


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (["10%\r20%\r", "30%\n", "done\n"], "30%\ndone"),  # a bar that ends its line
        (["\r 10%", "\r 20%"], " 20%"),  # tqdm's, still on its way
        (["10%\r", "20%\r"], "20%"),
        (["one\r\ntwo\r\n"], "one\ntwo"),  # no bar at all
        (["a", "b", "\n", "c"], "ab\nc"),
    ],
)
def test_a_progress_bar_collapses_to_its_last_state(printed, shown):
    run = started(1)
    for text in printed:
        run._follower.take(Output(0, text))
    assert run.output_tail(10) == [shown]
    assert f"<pre>{shown}</pre>" in summary.as_html(run)


# The state that the page draws


def test_the_state_has_a_row_for_every_state():
    run = Run(FakeEngine(6), 6, "train")
    for rank in range(1, 6):
        run._follower.take(Started(rank))
    run._follower.take(Result(2, pack_result(None)))
    run._follower.take(Failure(3, 1.0, "running", "ValueError: bad", "ValueError: bad"))
    run._follower.take(Stopped(4))
    run.engine._killed = {5}
    run._follower.take(Exit(5, -9))
    states = ["starting", "running", "finished", "failed", "stopped", "ended"]
    rows = state_of(run)["rows"]
    assert [(row["rank"], row["state"], row["color"]) for row in rows] == [
        (rank, state, STATE_COLORS[state]) for rank, state in enumerate(states)
    ]


def test_the_state_says_how_far_and_how_fast_each_rank_is():
    run = started(steps=21)
    run._follower.take(Expect(0, 40))
    first, second = state_of(run)["rows"]
    assert first["cells"] == ["step 20 of 40", "10 steps/s", "640 samples/s", "loss 0.04762"]
    assert first["share"] == 21 / 40
    assert second["cells"][0] == "step 20"
    assert second["share"] is None, "no bar for a rank that has not said what it expects"


def test_what_is_expected_counts_from_the_first_logged_step_after_a_resume_and_of_a_job_that_was_started_again():
    run = started()
    log(run, 0, range(1000, 1235), loss=[1.0] * 235)
    run._follower.take(Expect(0, 500))
    first, _ = state_of(run)["rows"]
    assert (first["cells"][0], first["share"]) == ("step 1,234 (235 of 500)", 235 / 500)
    run = started()
    log(run, 0, range(300), loss=[1.0] * 300)
    run._follower.take(Restarted(-1, 1))
    run._follower.take(Expect(0, 500))
    log(run, 0, range(200, 300), loss=[1.0] * 100)
    first, _ = state_of(run)["rows"]
    assert (first["cells"][0], first["share"]) == ("step 299 (100 of 500)", 0.2)


def test_the_title_tells_the_time_that_is_left():
    run = started(steps=21)
    assert "left" not in state_of(run)["title"]
    run._follower.take(Expect(0, 71))
    assert "about 5 s left" in state_of(run)["title"]
    assert "left" not in state_of(finish(run))["title"]


def test_the_state_has_a_panel_per_name_whose_curves_share_their_steps():
    run = started(steps=20)
    log(run, 1, [20], loss=[7.0], accuracy=[0.5])
    shown = state_of(run)
    assert [panel["name"] for panel in shown["panels"]] == ["loss", "accuracy"]
    assert list(curves(shown)) == ["rank 0", "rank 1", "mean"]
    assert curves(shown)["rank 0"] == (list(range(20)), pytest.approx(1 / (1 + np.arange(20)), rel=1e-4))
    assert curves(shown)["rank 1"][0] == list(range(21))
    assert len(shown["panels"][0]["steps"]) == 2, "those of rank 0 and of the mean are the same"
    assert curves(shown, "accuracy") == {"rank 1": ([20], [0.5])}
    assert len({curve["color"] for curve in shown["panels"][0]["curves"]}) == 3


def test_the_state_stays_small_however_much_is_logged():
    run = started(4)
    for rank in range(4):
        log(run, rank, range(10_000), **{name: np.random.rand(10_000) for name in ("loss", "accuracy", "norm")})
    began = time.perf_counter()
    said = json.dumps(state_of(run))
    assert len(said) < 200_000
    assert time.perf_counter() - began < 1
    run = started()
    for rank in range(2):
        log(run, rank, range(500), **{f"loss_{number:03}": np.random.rand(500) for number in range(90)})
    count = len(state_of(run)["panels"])
    assert 10 < count < 40, "of very many names the first"
    assert state_of(run)["notice"] == f"the first {count} of 90 names are drawn"
    run._follower.take(Output(0, "x" * 1_000_000 + "\n" * 3))
    assert len(json.dumps(state_of(run))) < 1_000_000


def test_the_state_has_the_end_of_what_each_rank_printed():
    run = started()
    run._follower.take(Output(1, "".join(f"<line {line}>\n" for line in range(1000))))
    run._follower.take(Output(1, "10%\r20%\r"))
    ((rank, text),) = state_of(run)["output"]
    assert rank == 1
    last = range(1000 - formatting.TAIL_LINES, 1000)
    assert text.splitlines() == [*(f"<line {line}>" for line in last), "20%"]


def test_the_button_says_what_a_click_does():
    run = started()
    assert (state_of(run)["button"], state_of(run)["hint"][:11]) == ("Stop", "End the run")
    deaf = state_of(run, is_heard=False)
    assert deaf["button"] == "use kernel ■"
    assert "ipykernel 7 or newer, and a front end that uses them" in deaf["hint"]
    run.ask_to_stop()
    assert state_of(run)["button"] == "End now"
    assert "stopping after this step" in state_of(run)["title"]
    assert state_of(finish(run))["button"] == ""


# show()


def test_a_plotly_figure_becomes_data(page):
    present.show(go.Figure(go.Scatter(y=[1, 2, 3])))
    bundle = page[0].things[0]._repr_mimebundle_()
    assert set(bundle) == {charts.PLOTLY, "text/plain"}
    assert bundle[charts.PLOTLY]["data"][0]["y"] == [1, 2, 3]


def test_a_run_is_shown_as_text_where_there_is_no_notebook(capsys, page):
    present.show(fail(started(steps=20)))
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("train: failed · 2 ranks · step 19 · loss 0.55")
    assert last.startswith("rank 1 failed: ValueError: bad batch")
    assert page == []


# Lines, where nobody watches


def test_lines_are_labelled_and_end_with_a_summary(printed):
    run = started(steps=20)
    lines = Lines(run, in_notebook=False, wait=True)
    lines.start()
    run._follower.take(Output(0, "hello\nun"))
    run._follower.take(Output(1, "hi\n"))
    wait_until(lambda: len(printed()) == 3)
    early = printed()
    assert sorted(early[:2]) == ["[rank 0] hello", "[rank 1] hi"], "printed at once, whole lines only"
    assert re.fullmatch(r"train: running · 2 ranks · step 19 .* \d+\.\d s", early[2]), "then where the run stands"
    run._follower.take(Output(0, "finished"))
    finish(run)
    lines.join(LONG_S)
    *more, output, line = printed()[3:]
    assert all(re.fullmatch("train: running .*", progress) for progress in more), "on a slow machine"
    assert output == "[rank 0] unfinished", "what came without a newline is not lost"
    assert line.startswith("train: finished · 2 ranks · step 19 · loss 0.55")


def test_a_background_run_prints_what_its_ranks_do_but_no_progress(printed):
    run, waited_for = started(steps=20), started(name="another", steps=20)
    lines = Lines(run, in_notebook=False, wait=False)
    lines.start()
    others = Lines(waited_for, in_notebook=False, wait=True)
    others.start()
    run._follower.take(Output(1, "hi\n"))
    wait_until(lambda: sum(line.startswith("another: running") for line in printed()) == 2)  # the first after a second
    assert [line for line in printed() if not line.startswith("another")] == ["[rank 1] hi"]
    finish(run)
    lines.join(LONG_S)
    assert printed()[-1].startswith("train: finished")
    finish(waited_for)
    others.join(LONG_S)  # or the next test has its summary


@pytest.mark.parametrize("way", [view.LiveView, lambda run: Lines(run, in_notebook=True, wait=True)])
def test_a_run_that_logged_nothing_leaves_no_chart(way, page):
    run = started()
    watcher = way(run)
    watcher.start()
    finish(run)
    watcher.join(LONG_S)
    first, chart = (place.things for place in page)
    assert "train: finished" in first[-1]["text/plain"]
    assert chart[-1] == {"text/plain": ""}


# The live view


def watch(run):
    live = view.LiveView(run)
    live.start()
    return live


def click(live, word):
    live._widget._handle_custom_msg({"clicked": word}, [])


@pytest.mark.parametrize("how", ["finished", "failed", "stopped"])
def test_the_widgets_own_last_state_is_what_stays(page, how):
    """For a page that was reloaded, and for Output and Tab, where an output does not change any more."""
    run = started(steps=20)
    live = watch(run)
    if how == "failed":
        fail(run)
    elif how == "stopped":
        run.ask_to_stop()
    end(run, live) if how != "failed" else live.join(LONG_S)
    shown = drawn(live)
    assert f"train: {how}" in shown["html"]
    assert ("rank 1 failed: ValueError: bad batch" in shown["html"]) == (how == "failed")
    assert curves(shown)["rank 0"][0] == list(range(20)), "all points"
    assert (shown["rows"], shown["button"], shown["title"]) == ([], "", ""), "nothing of it ends with the kernel"


def test_a_run_that_stands_still_is_sent_once_a_second_for_its_seconds(page, sent):
    run = started(steps=60)
    live = watch(run)
    wait_until(lambda: len(sent) >= 3)
    assert min(np.diff(sent[1:])) > 0.9 * view.STILL_S
    assert curves(drawn(live))["rank 0"][0] == list(range(60)), "whole, for a page that joins later"
    end(run, live)


def test_plotly_is_imported_while_ranks_start_and_else_not_before_the_end(page, monkeypatch):
    """Its import holds up the kernel's other threads, a stop among them: its time is when there is nothing to stop."""
    begun = []
    monkeypatch.setattr(kernel, "has_kernel", lambda: True)
    monkeypatch.setattr(prewarm, "begin", lambda: begun.append(True))
    for run, expected in ((Run(FakeEngine(), 2, "train"), [True]), (started(), [])):
        begun.clear()
        live = present.watch(run, live=True, wait=False)
        run.over.wait(3 * view.REDRAW_S)
        assert begun == expected
        end(run, live)


def test_the_stop_button_asks_the_run_to_stop_and_ends_it_when_it_is_pressed_again(page):
    run = started(steps=20)
    live = view.LiveView(run)
    click(live, "Stop")
    assert "ask_to_stop" in run.engine.calls
    assert drawn(live)["button"] == "End now", "at once"
    click(live, "Stop")  # a double click
    run._follower.enforce_deadlines()
    assert "kill" not in run.engine.calls, "there is time"
    click(live, "End now")
    run._follower.enforce_deadlines()
    assert "kill" in run.engine.calls
    assert run.stop_outcome == "late"
    live.start()
    end(run, live)
    assert run.status == "stopped"


def test_a_run_whose_live_view_cannot_be_made_is_shown_in_lines(page, monkeypatch, caplog):
    def broken(*_):
        raise OSError("no comm")

    monkeypatch.setattr(view, "RunWidget", broken)
    monkeypatch.setattr(kernel, "has_kernel", lambda: True)
    run = started(steps=3)
    shows = present.watch(run, live=True, wait=True)
    end(run, shows)
    assert isinstance(shows, Lines)
    assert "no live view" in caplog.text
    assert "train: finished" in page[0].things[-1]["text/plain"]


@pytest.fixture
def sent(monkeypatch):
    """When something was sent to the page."""
    times_s = []
    show = view.RunWidget.show

    def counted(*arguments):
        times_s.append(time.monotonic())
        return show(*arguments)

    monkeypatch.setattr(view.RunWidget, "show", counted)
    return times_s


def feed(run, updates, seconds):
    """So many log calls of each rank, evenly spread; give the seconds that it really took."""
    first = run.progress(0)[0].steps
    start = time.monotonic()
    for update in range(updates):
        for rank in range(run.world_size):
            log(run, rank, [first + update], loss=[1 / (1 + update)])
        time.sleep(max(0.0, start + seconds * (update + 1) / updates - time.monotonic()))
    return time.monotonic() - start


def test_two_thousand_updates_a_second_are_sent_five_times(sent, page):
    run = started(steps=2)
    live = watch(run)
    sent.clear()
    took_s = feed(run, 1000, seconds=1)  # of each of two ranks
    while len(sent) < 2:  # a slow machine
        took_s += feed(run, 1000, seconds=1)
    assert len(sent) <= 1 + took_s / view.REDRAW_S
    end(run, live)
    assert numbers(page[1].things[-1])[-1] == pytest.approx(1 / 1000), "the end is always drawn"
