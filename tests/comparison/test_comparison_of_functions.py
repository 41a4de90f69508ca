"""`labkit.compare` of functions: what is measured of a plain training function, on which clock, and how it is shown."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from course.strategies.data_parallel import ThreadedDataParallel
from labkit.comparison import launching
from labkit.comparison import reading as comparing
from labkit.comparison.comparison import Comparison
from labkit.comparison.held import held
from labkit.comparison.measured import Measured
from labkit.comparison.measuring import Observer, Sent, Timed, measure
from labkit.comparison.program import Piece, Program, backend_for, expected_bytes
from labkit.comparison.replay import LAPTOP, NAMED, Devices
from labkit.comparison.view import View
from labkit.rank.staying import collect_garbage
from labkit.trace.profiling import Mark
from labkit.ui import kernel
from labkit.ui.charts import PLOTLY
from tests.conftest import shared_session
from tests.ui.test_explore import Output

SIZES = (30, 40, 5)
WEIGHTS = sum(a * b + b for a, b in zip(SIZES, SIZES[1:], strict=False))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))


def train(worker, steps, wrap=lambda model: model, share=True):
    whole = network()
    model = wrap(whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(16, 30, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        mine = inputs.chunk(worker.world_size)[worker.rank] if share else inputs
        optimizer.zero_grad()
        loss = model(mine).square().mean()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss.item())
    return whole.state_dict()


def ddp(worker, steps):
    return train(worker, steps, DistributedDataParallel)


def by_itself(worker, steps):
    """Each rank trains on its part, and none hears of the others'."""
    return train(worker, steps)


def fails(worker, steps):
    raise ValueError("no data")


# On the ranks


@pytest.mark.spawns
def test_functions_are_launched_and_held_against_the_first(capsys):
    with shared_session(2) as ranks:
        one_rank = {"one": 1}
        compared = labkit.compare(one=train, ddp=ddp, alone=by_itself, world_size={**one_rank}, on=ranks, steps=14)
        before = dict(compared.runs)
        compared.add(mine=fails)
        failed = compared.frame()
        assert compared.runs["one"] is before["one"], "only the function given was launched"
        compared.add(mine=ddp)
        assert list(compared.runs) == ["one", "ddp", "alone", "mine"]
        assert compared.frame().loc["mine", "difference"] <= 1e-6, "the earlier one is replaced"
        replaced = compared.runs["mine"]
        recorded = [[rank.program.pieces for rank in compared.runs[title].results] for title in ("ddp", "mine")]
        assert recorded[0] == recorded[1], "the same, whatever else the machine did: a step on ideal devices is, too"
        compared.add(mine=train, world_size=1, steps=3)
        assert compared.runs["mine"] is not replaced
        assert compared.runs["mine"].world_size == 1
        compared.runs, compared.titles = before, list(before)
    assert failed.loc["mine", "status"] == "failed"
    assert "no data" in failed.loc["mine", "error"]
    assert failed.loc["ddp", "error"] == ""
    table = compared.frame()
    assert list(table.index) == ["one", "ddp", "alone"]
    assert table["ranks"].tolist() == [1, 2, 2]
    assert table.loc["ddp", "difference"] <= 1e-6
    assert table.loc["alone", "difference"] > 1e-4, "some rank has other weights"
    assert table.loc["ddp", "loss off by"] <= 1e-6
    assert table.loc["ddp", "sent KiB"] * 1024 == 4 * WEIGHTS, "2 (n − 1) / n of the gradients"
    assert table.loc["ddp", "wire KiB"] * 1024 == pytest.approx(4 * WEIGHTS, rel=0.2), "and gloo's headers"
    assert table.loc["alone", "sent KiB"] == 0
    assert table.loc["ddp", "device busy ms"] == pytest.approx(table.loc["one", "device busy ms"] / 2)
    (mark,) = [mark for mark in compared.runs["ddp"].results[0].marks if mark.what == "communication"]
    assert mark.end_s > mark.start_s
    lanes = compared.lanes()
    assert {row for trace in lanes.data for row in trace.y} == {
        "one · 0",
        "ddp · 0",
        "ddp · 1",
        "alone · 0",
        "alone · 1",
    }
    assert "ideal devices (30 GFLOP/s, 2 GB/s)" in lanes.layout.xaxis.title.text
    assert compared.lanes(here=True).layout.xaxis.title.text == "ms, this machine's clock"
    words = compared.table().data["weights, compared with one"]
    assert words["one"] == "equal"
    assert words["ddp"].startswith("equal")
    assert words["alone"].startswith("off by")
    assert "ddp: finished" in capsys.readouterr().out
    the_picker_draws_what_is_ticked(compared)


def the_picker_draws_what_is_ticked(compared):
    """Of the runs above: launching others would take as long again."""
    with pytest.MonkeyPatch.context() as patch:
        outputs, shown = [], []
        patch.setattr(kernel, "is_interactive", lambda: True)
        patch.setattr(kernel, "display", lambda thing, **options: shown.append(thing) or Output())
        patch.setattr(kernel, "reserve", lambda: outputs.append(Output()) or outputs[-1])
        view = View(compared)
        view.run()

        def drawn():
            last = [output.shown[-1] for output in outputs if output.shown]
            charts = [bundle[PLOTLY] for bundle in last if isinstance(bundle, dict) and PLOTLY in bundle]
            return sorted(charts, key=lambda chart: chart["layout"]["title"]["text"])

        def rows(chart):
            return {row for trace in chart["data"] for row in trace["y"]}

        loss, memory, lanes, sent = drawn()
        assert [trace["name"] for trace in loss["data"]] == ["one", "ddp", "alone"]
        assert rows(memory) == rows(lanes) == {"one · 0", "ddp · 0", "ddp · 1", "alone · 0", "alone · 1"}
        assert rows(sent) == {"one", "ddp", "alone"}
        row, clocks, *_ = shown[0].children
        clock, speeds = clocks.children
        boxes = {box.description: box for box in row.children}
        colors = {trace["name"]: trace["line"]["color"] for trace in loss["data"]}
        boxes["one"].value = False
        loss, memory, lanes, sent = drawn()
        assert {trace["name"]: trace["line"]["color"] for trace in loss["data"]} == {
            title: color for title, color in colors.items() if title != "one"
        }, "what stays keeps its colour"
        assert rows(lanes) == {"ddp · 0", "ddp · 1", "alone · 0", "alone · 1"}
        assert list(outputs[-1].shown[-1].data.index) == ["ddp", "alone"], "the table, too"
        clock.value = "this machine's clock"
        assert any("this machine's clock" in chart["layout"]["title"]["text"] for chart in drawn())
        clock.value = "ideal devices"
        named, gflops, link, note = speeds.children
        step_ms = compared.frame().loc["ddp", "device step ms"]
        gflops.value = 300.0
        assert named.value == "your own"
        assert compared.frame().loc["ddp", "device step ms"] < step_ms, "sliders change the devices"
        assert any(
            "300 GFLOP/s" in chart["layout"].get("xaxis", {}).get("title", {}).get("text", "") for chart in drawn()
        )
        named.value = NAMED[1].name
        assert (gflops.value, compared.devices) == (NAMED[1].gflops, NAMED[1])
        assert "data sheet" in note.value, "and a real one's source is said"
        for box in boxes.values():
            box.value = False
        assert drawn() == []


# Without ranks


def watched(function, plan=None):
    """Call a function in this process, as a rank of its own would."""
    logged = []
    worker = SimpleNamespace(rank=0, world_size=1, log=lambda **values: logged.append(values))
    observer = Observer(torch.device("cpu"), plan)
    with observer.watching():
        returned = function(worker)
    return observer.measured(returned), logged


def test_a_plain_function_is_measured_and_left_as_it_was():
    backward, hooks = torch.autograd.backward, dict(torch.nn.modules.module._global_forward_hooks)
    wait = dist.Work.wait
    # 30 × 40 + 40 × 5 multiplications for each of 16 samples, and twice as many backward, but for the inputs'.
    forward, back = 2 * 16 * (1200 + 200), 2 * 16 * (1200 + 2 * 200)
    collect_garbage()
    before = held(None)  # by other tests of this process
    found, logged = watched(functools.partial(train, steps=13))
    assert torch.autograd.backward is backward
    assert dist.Work.wait is wait
    assert dict(torch.nn.modules.module._global_forward_hooks) == hooks
    plain = train(SimpleNamespace(rank=0, world_size=1, log=lambda **_: None), 13)
    assert all(torch.equal(plain[name], found.weights[name]) for name in plain), "watching changes no number"
    assert len(logged) == 13
    assert (len(found.timed.steps), len(found.steps_s)) == (3, 5)
    assert [(piece.what, piece.flops) for piece in found.program.pieces] == [("forward", forward), ("backward", back)]
    own = {kind: size - before[kind] for kind, size in found.most_held.items()}
    assert own.pop("other") < 100_000
    assert {kind: size for kind, size in own.items() if size} == {
        "parameters": 4 * WEIGHTS,
        "gradients": 4 * WEIGHTS,
        "optimizer state": 4 * WEIGHTS,
        "activations": 4 * 16 * (30 + 40 + 5),
    }
    assert found.bytes_sent == 0


def test_who_watches_keeps_no_copy_of_the_network_alive():
    def replicated(worker):
        model = ThreadedDataParallel(torch.nn.Linear(300, 400))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            model(torch.ones(4, 300)).square().mean().backward()
            optimizer.step()

    collect_garbage()
    before = held(None)
    found, _ = watched(replicated)
    assert found.most_held["parameters"] - before["parameters"] == 4 * 400 * 301
    assert found.most_held["other"] - before["other"] < 100_000, "and not the replicas of the first step"


def test_a_function_of_few_steps_is_measured_as_far_as_it_goes():
    found, _ = watched(functools.partial(train, steps=2))
    assert found.marks == []
    assert found.program == Program()
    run = Output()
    run.results, run.name = [found], "short"
    assert math.isnan(comparing.columns(run, LAPTOP)["device step ms"]), "and not 0"
    assert Measured.columns([found], [found])["difference"] == 0


def test_what_gloo_records_late_does_not_reach_into_the_next_step():
    observer = Observer(torch.device("cpu"))
    observer._steps = [Mark("step", 0, 3), Mark("step", 3, 7)]
    observer._marks = [Mark("optimizer", 2.5, 3), Mark("optimizer", 6.5, 7)]
    late, in_time, kernel = Sent("all_reduce", 1, 3.5), Sent("all_reduce", 5, 6), Sent("on the device", 2, 3.2)
    marks = observer._timed(slice(0, 2), [late, in_time, kernel]).marks
    sent_s = [(mark.start_s, mark.end_s) for mark in marks if mark.what == "communication"]
    assert sent_s == [(1, 2.5), (5, 6), (2, 3.2)]


def test_what_fails_leaves_no_hook_behind():
    backward = torch.autograd.backward
    with pytest.raises(ValueError, match="no data"):
        measure(SimpleNamespace(device=torch.device("cpu")), fails, {"steps": 1})
    assert torch.autograd.backward is backward
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize(
    ("kind", "ranks", "share"),
    [
        ("all_reduce", 2, 1),
        ("all_reduce", 4, 1.5),
        ("reduce_scatter", 4, 0.75),
        ("all_gather", 4, 3),
        ("send", 4, 1),
        ("recv", 4, 0),
        ("all_reduce", 1, 0),
    ],
)
def test_bytes_by_the_formula(kind, ranks, share):
    assert expected_bytes(kind, 400, ranks) == 400 * share


def test_what_is_not_known_is_no_number():
    assert math.isnan(expected_bytes("a_new_collective", 400, 2))


def measured_run(*programs):
    """A run of one rank a program, of which nothing but that is known."""

    class Rank(Measured):
        pass

    run = Output()
    run.name, run.recorded = "a run", SimpleNamespace(names=())
    run.results = [
        Rank({}, Timed(), (0.01, 0.02, 0.03), program, math.nan, {"parameters": 1}, ({"parameters": 1},))
        for program in programs
    ]
    return run


def test_what_ideal_devices_leave_out_is_said():
    compared = Comparison({})
    one = Program((Piece("forward", flops=3e9),), {"aten.fft": 0.4, "aten.relu": 0.1, "all": 0.5})
    half = Program(
        (
            Piece("forward", flops=1.5e9),
            Piece("all_reduce", size=10**9, ranks=(0, 1), number=0),
            Piece("wait", number=0),
        )
    )
    compared.titles, compared.runs = ["one", "two"], {"one": measured_run(one), "two": measured_run(half, half)}
    compared.devices = Devices(1.0, 1.0, 0.0)
    (said,) = compared.notes()
    assert said.endswith("and the greatest: one 50% (aten.fft 40%).")
    assert compared.notes(["two"]) == [], "only of the chosen"


@pytest.mark.parametrize(
    ("config", "device", "carries"),
    [
        ("cpu:gloo", "cpu", "gloo"),
        ("cuda:nccl", "cuda", "nccl"),
        ("cuda:nccl", "cpu", ""),
        ("cpu:gloo,cuda:gloo", "cuda", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
    ],
)
def test_a_reduce_scatter_counts_as_an_all_reduce_only_where_gloo_carries_it(config, device, carries):
    assert backend_for([SimpleNamespace(is_cuda=device == "cuda")], config) == carries


def test_data_parallel_without_a_second_gpu_is_said_to_be_one_process():
    worker = SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=1, log=lambda **_: None)
    compared = Comparison({})
    for title, wrap in (("one", lambda model: model), ("DataParallel", nn.DataParallel)):
        run = measured_run(Program())
        run.results = [measure(worker, train, {"steps": 2, "wrap": wrap})]
        compared.titles, compared.runs = [*compared.titles, title], {**compared.runs, title: run}
    assert [run.results[0].is_one_replica for run in compared.runs.values()] == [False, True]
    said = "DataParallel: nn.DataParallel has no second GPU here, and calls the network as it is in one process."
    assert compared.notes() == [said]
    assert compared.notes(["one"]) == []


def test_columns_name_their_clock_and_how_much_steps_differ():
    row = comparing.columns(measured_run(Program((Piece("forward", flops=3e9),))), Devices(1.0, 1.0, 0.0))
    assert row["device step ms"] == pytest.approx(3000)
    assert row["device forward ms"] == pytest.approx(3000)
    assert (row["step ms"], row["step ms, 10th percentile"]) == (pytest.approx(20), pytest.approx(12))
    assert row["sent KiB"] == 0
    assert math.isnan(row["wire KiB"])


def test_samples_per_second_are_those_of_steps_that_nothing_slowed():
    run = measured_run(Program((Piece("forward", flops=1.0),)))
    rows = [{"rank": 0, "time_s": float(step), "samples": 64} for step in range(5)]
    run.history = pd.DataFrame(rows)
    assert comparing.samples_per_s(run) == pytest.approx(64 / 0.02), "and not 64 a second, as they were logged"


def test_a_lane_shows_waiting_only_where_nothing_is_computed():
    marks = [
        Mark("waiting", 1.0, 5.0),
        Mark("forward", 3.0, 4.0),
        Mark("communication", 0.0, 2.5),
        Mark("backward", 7.0, 12.0),
    ]
    assert comparing.exclusive(marks, Mark("step", 2.0, 10.0)) == [
        ("waiting", 2.0, 3.0),
        ("waiting", 4.0, 5.0),
        ("forward", 3.0, 4.0),
        ("communication", 2.0, 2.5),
        ("backward", 7.0, 10.0),
    ]


def test_a_step_is_shown_in_the_window_of_rank_0():
    steps = [Mark("step", 10.0, 11.0), Mark("step", 11.0, 12.0)]
    first = Timed(steps, [Mark("forward", 10.2, 10.5), Mark("forward", 11.2, 11.5)])
    second = Timed([Mark("step", 9.5, 10.4)], [Mark("backward", 9.6, 10.1), Mark("forward", 10.4, 10.8)])
    lanes = comparing.one_step([[first], [second]])
    assert [[(what, round(a, 3), round(b, 3)) for what, a, b in lane] for (lane,) in lanes] == [
        [("forward", 0.2, 0.5)],
        [("backward", 0.0, 0.1), ("forward", 0.4, 0.8)],
    ]


def takes_a_metric(worker, metric):
    """It has a parameter that compare() keeps for itself."""


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"ddp": ddp}, TypeError, r"ddp: ddp\(worker, steps\) cannot be called as ddp\(worker\).*'steps'"),
        ({"ddp": ddp, "steps": 3, "lr": 1}, TypeError, "ddp.*unexpected keyword argument 'lr'"),
        ({"ddp": ddp, "steps": 3, "world_size": {"dpp": 2}}, ValueError, "ranks for dpp; functions are: ddp"),
        ({"ddp": ddp, "steps": 3, "world_size": 0}, ValueError, "world_size must be at least 1"),
        (
            {"ddp": ddp, "mine": takes_a_metric, "metric": "accuracy"},
            ValueError,
            "mine has a parameter called 'metric'",
        ),
        ({"steps": 3}, ValueError, "at least one run or function, got none"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(given, error, said):
    with pytest.raises(error, match=said):
        labkit.compare(**given)


def test_classes_are_passed_on_and_functions_are_launched(monkeypatch):
    launched = []
    monkeypatch.setattr(launching, "grow", lambda comparison, launches, live: launched.extend(launches))

    def takes_a_class(worker, optimizer):
        pass

    on = SimpleNamespace(close=None)
    compared = labkit.compare({"a title": takes_a_class}, b=takes_a_class, on=on, optimizer=torch.optim.SGD)
    assert launched == ["a title", "b"] == compared.titles


def test_each_cell_that_shows_a_comparison_shows_all_of_its_pictures(monkeypatch):
    displayed, early = [], Output()
    executions = iter(("first cell", "second cell"))
    monkeypatch.setattr(kernel, "is_interactive", lambda: False)
    monkeypatch.setattr(kernel, "this_execution", lambda: next(executions))
    monkeypatch.setattr(kernel, "display", lambda thing, **options: displayed.append(thing))
    compared = Comparison({})
    loss = SimpleNamespace(update_shown=lambda handle: handle.update("loss"))
    monkeypatch.setattr(Comparison, "pictures", lambda self: [loss, "lanes"])
    monkeypatch.setattr(Comparison, "table", lambda self: "table")
    compared._first_picture = early
    compared._ipython_display_()
    assert (len(early.shown), displayed) == (1, ["lanes", "table"]), "the curves were there early"
    compared._ipython_display_()
    assert len(early.shown) == 1, "and stay as they are in that cell"
    assert len(displayed) == 5


def test_a_comparison_to_come_is_not_over():
    assert not Comparison({}, to_come=["ddp"]).is_over
    assert not dist.is_initialized(), "and no test here has made a group"
