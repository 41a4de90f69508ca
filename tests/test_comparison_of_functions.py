"""`labkit.compare` of functions: what is measured of a plain training function, on which clock, and how it is shown."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from course.recorded import Recorded, add
from course.strategies.data_parallel import ThreadedDataParallel
from labkit.comparison import launching
from labkit.comparison import reading as comparing
from labkit.comparison.accelerator import VirtualDevices, multiplications
from labkit.comparison.comparison import Comparison
from labkit.comparison.held import held
from labkit.comparison.measuring import Measured, Observer, Plan, Sent, Timed, expected_bytes, measure
from labkit.comparison.view import View
from labkit.profiling import Mark
from labkit.ui import kernel
from labkit.ui.charts import PLOTLY
from tests.benchmarks import gpus
from tests.conftest import shared_session
from tests.test_explore import Output

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
        with pytest.raises(labkit.WorkerFailed, match="no data"):
            labkit.compare(one=train, bad=fails, world_size=one_rank, on=ranks, steps=2)
    table = compared.frame()
    assert list(table.index) == ["one", "ddp", "alone"]
    assert table["ranks"].tolist() == [1, 2, 2]
    assert table.loc["ddp", "difference"] <= 1e-6
    assert table.loc["alone", "difference"] > 1e-4, "some rank has other weights"
    assert table.loc["ddp", "loss off by"] <= 1e-6
    assert table.loc["ddp", "formula KiB"] * 1024 == 4 * WEIGHTS, "2 (n − 1) / n of the gradients"
    assert table.loc["alone", "formula KiB"] == 0
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
    assert "simulated devices (5 GFLOP/s)" in lanes.layout.xaxis.title.text
    assert compared.lanes(here=True).layout.xaxis.title.text == "ms, this machine's clock"
    words = compared.table().data["weights beside one"]
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
        patch.setattr(kernel, "display", lambda thing, **options: shown.append(thing))
        patch.setattr(kernel, "reserve", lambda: outputs.append(Output()) or outputs[-1])
        view = View(
            lambda: compared.titles, lambda: compared.runs, lambda: compared.is_over, compared.pictures, compared.table
        )
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
        row, clock, _ = shown[0].children
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
        for box in boxes.values():
            box.value = False
        assert drawn() == []


# Without ranks


def watched(function, plan=None, gflops=5.0):
    """Call a function in this process, as a rank of its own would."""
    logged = []
    worker = SimpleNamespace(rank=0, world_size=1, log=lambda **values: logged.append(values))
    observer = Observer(torch.device("cpu"), gflops, plan)
    with observer.watching():
        returned = function(worker)
    return observer.measured(returned), logged


@contextlib.contextmanager
def clock():
    """Time stands still but for who sleeps: no other program takes any."""
    now_s = [1000.0]

    def sleep(seconds):
        now_s[0] += seconds

    with pytest.MonkeyPatch.context() as patch:
        for name in ("time", "perf_counter"):
            patch.setattr(time, name, lambda: now_s[0])
        patch.setattr(time, "thread_time", lambda: 0.0)
        patch.setattr(time, "sleep", sleep)
        yield sleep


def test_a_plain_function_is_measured_and_left_as_it_was():
    backward, hooks = torch.autograd.backward, dict(torch.nn.modules.module._global_forward_hooks)
    # 30 × 40 + 40 × 5 multiplications for each of 16 samples, and twice as many backward, but for the inputs'.
    forward, back = 2 * 16 * (1200 + 200), 2 * 16 * (1200 + 2 * 200)
    device_s, loading_s = 0.02, 0.001
    before = held(None)  # by other tests of this process
    with clock() as sleep:

        def slowed(worker):
            return train(SimpleNamespace(**vars(worker) | {"log": lambda **v: (sleep(loading_s), worker.log(**v))}), 8)

        found, logged = watched(slowed, Plan(1, 2, 4, 8), (forward + back) / device_s / 1e9)
    assert torch.autograd.backward is backward
    assert dict(torch.nn.modules.module._global_forward_hooks) == hooks
    plain = train(SimpleNamespace(rank=0, world_size=1, log=lambda **_: None), 8)
    assert all(torch.equal(plain[name], found.weights[name]) for name in plain), "watching changes no number"
    assert len(logged) == 8
    assert (len(found.timed.steps), len(found.simulated.steps)) == (2, 3)
    assert found.timed.step_s == pytest.approx(loading_s), "calculating takes no time by this clock"
    assert found.busy_s == pytest.approx(device_s)
    parts_s = found.simulated.parts_s()
    assert found.simulated.step_s == pytest.approx(device_s)
    assert parts_s["backward"] == pytest.approx(device_s * back / (forward + back))
    assert parts_s["data"] == pytest.approx(loading_s)
    made_up_s = device_s * forward / (forward + back) - loading_s
    assert parts_s["forward"] == pytest.approx(made_up_s), "what took too long before is made up for"
    own = {kind: size - before[kind] for kind, size in found.memory.items()}
    assert own.pop("other") < 100_000
    assert {kind: size for kind, size in own.items() if size} == {
        "parameters": 4 * WEIGHTS,
        "gradients": 4 * WEIGHTS,
        "optimizer state": 4 * WEIGHTS,
        "activations": 4 * 16 * (30 + 40 + 5),
    }
    assert (found.bytes_sent, found.bytes_expected) == (0, 0)


def test_who_watches_keeps_no_copy_of_the_network_alive():
    def replicated(worker):
        model = ThreadedDataParallel(torch.nn.Linear(300, 400))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            model(torch.ones(4, 300)).square().mean().backward()
            optimizer.step()

    before = held(None)
    found, _ = watched(replicated)
    assert found.memory["parameters"] - before["parameters"] == 4 * 400 * 301
    assert found.memory["other"] - before["other"] < 100_000, "and not the replicas of the first step"


def test_a_function_of_few_steps_is_measured_as_far_as_it_goes():
    found, _ = watched(functools.partial(train, steps=2))
    assert found.marks == []
    assert math.isnan(found.simulated.step_s)
    assert Measured.columns([found], [found])["difference"] == 0


def test_what_gloo_records_late_does_not_reach_into_the_next_step():
    observer = Observer(torch.device("cpu"), 5.0)
    observer._steps = [Mark("step", 0, 3), Mark("step", 3, 7)]
    observer._marks = [Mark("optimizer", 2.5, 3), Mark("optimizer", 6.5, 7)]
    late, in_time, kernel = Sent("all_reduce", 1, 1, 3.5), Sent("all_reduce", 1, 5, 6), Sent("on the device", 0, 2, 3.2)
    marks = observer._timed(slice(0, 2), [late, in_time, kernel]).marks
    sent_s = [(mark.start_s, mark.end_s) for mark in marks if mark.what == "communication"]
    assert sent_s == [(1, 2.5), (5, 6), (2, 3.2)]


def test_what_fails_leaves_no_hook_behind():
    backward = torch.autograd.backward
    with pytest.raises(ValueError, match="no data"):
        measure(SimpleNamespace(device=torch.device("cpu")), fails, {"steps": 1}, 5.0)
    assert torch.autograd.backward is backward
    assert not torch.nn.modules.module._global_forward_hooks


def test_devices_of_threads_compute_at_the_same_time():
    model, inputs = ThreadedDataParallel(network()), torch.randn(16, 30)
    share = 2 * 8 * (1200 + 200)  # of each of two devices, forward
    with VirtualDevices(share / 0.05 / 1e9):
        began_s = time.perf_counter()
        loss = model(inputs).square().mean()
        forward_s = time.perf_counter() - began_s
        loss.backward()
        whole_s = time.perf_counter() - began_s
    assert forward_s >= 0.05
    assert whole_s - forward_s >= 0.05 * (1200 + 400) / 1400
    alone = network()
    alone(inputs).square().mean().backward()
    both = zip(alone.parameters(), model.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-7) for a, b in both), "the stand-in computes the same"


@pytest.mark.parametrize(
    ("layer", "inputs", "counted"),
    [
        (nn.Linear(30, 40), (16, 30), 16 * 30 * 40),
        (nn.Linear(30, 40), (4, 7, 30), 28 * 30 * 40),
        (nn.Conv2d(3, 8, 5), (2, 3, 12, 12), 2 * 8 * 8 * (3 * 8 * 25)),
        (nn.LayerNorm(30), (16, 30), 0),
        (nn.ReLU(), (16, 30), 0),
    ],
)
def test_multiplications_of_a_layer(layer, inputs, counted):
    assert multiplications(layer, layer(torch.randn(inputs))) == counted


def test_looking_up_rows_multiplies_nothing():
    layer = nn.Embedding(10, 4)
    assert multiplications(layer, layer(torch.tensor([[1, 2]]))) == 0


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


def test_a_lane_shows_waiting_only_where_nothing_is_computed():
    marks = [
        Mark("waiting", 1.0, 5.0),
        Mark("forward", 3.0, 4.0),
        Mark("communication", 0.0, 2.5),
        Mark("backward", 7.0, 12.0),
    ]
    assert comparing.exclusive(marks, Mark("step", 2.0, 10.0)) == [
        ("waiting", 2.0, 2.5),
        ("waiting", 2.5, 3.0),
        ("waiting", 4.0, 5.0),
        ("forward", 3.0, 4.0),
        ("communication", 2.0, 2.5),
        ("backward", 7.0, 10.0),
    ]


def test_a_step_is_shown_in_the_window_of_rank_0():
    steps = [Mark("step", 10.0, 11.0), Mark("step", 11.0, 12.0)]
    first = Timed(steps, [Mark("forward", 10.2, 10.5), Mark("forward", 11.2, 11.5)])
    second = Timed([Mark("step", 9.5, 10.4)], [Mark("backward", 9.6, 10.1), Mark("forward", 10.4, 10.8)])
    ranks = [SimpleNamespace(on_devices=timed, timed=timed) for timed in (first, second)]
    lanes = comparing.one_step(ranks)
    assert [[(what, round(a, 3), round(b, 3)) for what, a, b in lane] for lane in lanes] == [
        [("forward", 0.2, 0.5)],
        [("backward", 0.0, 0.1), ("forward", 0.4, 0.8)],
    ]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"ddp": ddp}, TypeError, r"ddp: ddp\(worker, steps\) cannot be called as ddp\(worker\).*'steps'"),
        ({"ddp": ddp, "steps": 3, "lr": 1}, TypeError, "ddp.*unexpected keyword argument 'lr'"),
        ({"ddp": ddp, "steps": 3, "world_size": {"dpp": 2}}, ValueError, "ranks for dpp; functions are: ddp"),
        ({"ddp": ddp, "steps": 3, "world_size": 0}, ValueError, "world_size must be at least 1"),
        ({"steps": 3}, ValueError, "at least one run or function, got none"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(given, error, said):
    with pytest.raises(error, match=said):
        labkit.compare(**given)


def test_classes_are_passed_on_and_functions_are_launched(monkeypatch):
    launched = []
    monkeypatch.setattr(launching, "grow", lambda comparison, launches: launched.extend(launches))

    def takes_a_class(worker, optimizer):
        pass

    on = SimpleNamespace(close=None)
    compared = labkit.compare({"a title": takes_a_class}, b=takes_a_class, on=on, optimizer=torch.optim.SGD)
    assert launched == ["a title", "b"] == compared.titles


def test_nothing_was_recorded_before_the_program_has_run(tmp_path):
    nothing = Recorded(tmp_path / "none.json")
    assert "none recorded yet" in repr(nothing)
    assert "none recorded yet" in nothing._repr_html_()
    assert gpus.FILE.exists()


def test_a_measurement_is_kept_with_how_it_came_about(tmp_path):
    file = tmp_path / "recorded" / "compare.json"
    how = {"hardware": "2 × A", "versions": "torch 1", "command": "python -m it", "recorded": "2026-01-01"}
    add(file, {**how, "rows": {"DDP": {"device step ms": 9.0}}})
    add(file, {**how, "hardware": "8 × B", "rows": {"DDP": {"device step ms": 3.0}}})
    add(file, {**how, "recorded": "2026-02-02", "rows": {"DDP": {"device step ms": 8.0}}})
    shown = Recorded(file)._repr_html_()
    assert "2 × A · torch 1 · python -m it · 2026-02-02" in shown
    assert "8 × B" in shown
    assert "2026-01-01 </div>" not in shown
    assert len(Recorded(file).measurements) == 2, "the same command on the same hardware has one"
    file.write_text(json.dumps({"measurements": [{"hardware": "2 × A"}]}))
    with pytest.raises(ValueError, match="measurement 0 lacks versions, command, recorded, rows"):
        Recorded(file)


def test_the_program_that_records_takes_the_lessons_own_cells(monkeypatch, capsys):
    parts = gpus.cells({"width": 8192})
    assert "width = 8192" in parts
    assert parts[-1].startswith("comparison = labkit.compare(")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("sys.argv", ["gpus"])
    assert gpus.main() == 1
    assert "found 1 GPUs" in capsys.readouterr().out


def test_a_comparison_to_come_is_not_over():
    assert not Comparison({}, to_come=["ddp"]).is_over
    assert not dist.is_initialized(), "and no test here has made a group"
