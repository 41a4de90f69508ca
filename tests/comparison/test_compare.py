"""Functions side by side on the one instrument: the columns, what is counted, what is doubted, and who fails."""

from __future__ import annotations

import contextlib
import math
import re

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit import Comparison, compare
from labkit.comparison.picker import Picker
from labkit.steps.record import StepRecord
from labkit.ui import kernel
from labkit.ui.charts import PLOTLY
from labkit.ui.view import RunWidget
from tests.comparison.test_comparison import log, run_of
from tests.conftest import LONG_S, shared_session, wait_until
from tests.steps.test_watch import WEIGHTS, network, train
from tests.ui.test_explore import Output

OPERATIONS = 2 * 16 * (1200 + 200) + 2 * 16 * (1200 + 2 * 200)
MIB = 2**20


def ddp(worker, steps):
    return train(worker, steps, DistributedDataParallel)


def by_itself(worker, steps):
    """Each rank trains on its part, and none hears of the others'."""
    return train(worker, steps)


def fsdp(worker, steps):
    from torch.distributed.fsdp import fully_shard

    return train(worker, steps, fully_shard)


def with_buffers(worker, steps):
    state = train(worker, steps, DistributedDataParallel, nn.BatchNorm1d(5))
    return state | {"mask": torch.ones(4, 4).tril().bool()}


def diverges(worker, steps):
    state = ddp(worker, steps)
    state["0.bias"][-1] = math.nan
    return state


def fails(worker, steps):
    raise ValueError("no data")


def takes_few(worker, steps):
    return ddp(worker, 3)


def without_steps(worker, steps):
    worker.log(loss=1.0)
    return network().state_dict()


@pytest.mark.spawns
def test_functions_are_launched_and_held_against_the_first(tmp_path, capsys):
    functions = {"one": train, "ddp": ddp, "fsdp": fsdp, "alone": by_itself, "nan": diverges}
    with shared_session(2) as ranks:
        compared = compare(functions, world_size={"one": 1}, on=ranks, steps=20)
        before = compared.runs["one"]
        again = compare(functions, world_size={"one": 1}, on=ranks, steps=20, live=False)
        compared.add(mine=fails, empty=without_steps, few=takes_few, live=False)
        assert compared.runs["one"] is before, "only the functions given were launched"
        assert compared.runs["mine"].world_size == 2
        failed = compared.frame().loc[["mine", "empty", "few"]]
        assert compared.table().data.loc["mine"].iloc[-1].startswith("failed: "), "its row says why"
        assert any(note.startswith("few: rank 0 took 3 steps of the 12 that are watched") for note in compared.notes())
        compared.add(mine=ddp, live=False)
        assert list(compared.runs) == [*functions, "mine", "empty", "few"], "the earlier one is replaced"
        traced = labkit.launch(ddp, 20, on=ranks, world_size=2, trace=2, live=False)
    assert failed["status"].tolist() == ["failed", "finished", "finished"]
    assert "no data" in failed.loc["mine", "error"]
    assert failed.loc[["mine", "empty"], "GFLOP"].isna().all()
    assert failed["step ms"].isna().all()
    assert failed.loc["few", "GFLOP"] == pytest.approx(OPERATIONS / 2e9), "the third step is counted"
    table = compared.frame().drop("few")
    assert table["ranks"].tolist() == [1, 2, 2, 2, 2, 2, 2]
    assert table.loc[["ddp", "fsdp", "mine"], "difference"].max() <= 1e-6, "shards are put together"
    assert table.loc["alone", "difference"] > 1e-4
    assert math.isnan(table.loc["nan", "difference"])
    assert table.loc["nan", "weights"].startswith("not finite (0.bias)")
    assert table.loc["ddp", "loss off by"] <= 1e-6
    assert table.loc["one", "GFLOP"] == OPERATIONS / 1e9
    assert table.loc["ddp", "GFLOP"] == pytest.approx(OPERATIONS / 2e9)
    assert table.loc["ddp", "sent MiB"] * MIB == 4 * WEIGHTS, "2 (n − 1) / n of the gradients"
    assert table.loc["fsdp", "sent MiB"] * MIB == pytest.approx(6 * WEIGHTS, rel=0.05)
    assert table.loc["alone", "sent MiB"] == 0
    for kind, share in {"parameters": 1, "gradients": 1, "optimizer": 1, "buckets": 1}.items():
        assert table.loc["ddp", f"{kind} MiB"] * MIB == pytest.approx(share * 4 * WEIGHTS, rel=0.02)
    assert table.loc["fsdp", "parameters MiB"] < 0.55 * table.loc["ddp", "parameters MiB"]
    assert (table["computed ms"].drop("empty") > 0).all()
    assert (table["step ms low"] <= table["step ms high"]).drop("empty").all()
    counted = [
        "GFLOP",
        "sent MiB",
        *(f"{kind} MiB" for kind in ("parameters", "gradients", "optimizer", "activations")),
    ]
    assert table.loc[list(functions), counted].equals(again.frame()[counted]), "whatever else the machine does"
    threads = {record.threads for title in functions for record in compared.records(title)}
    assert len(threads) == 1, "one process computes on as many as a rank of two"
    assert table["speed-up"].isna().all() or not compared.doubts()
    lanes = compared.lanes(["one", "ddp"])
    assert set(lanes.layout.yaxis.categoryarray) == {
        f"{title} · {row}"
        for title, count in (("one", 1), ("ddp", 2))
        for rank in range(count)
        for row in (f"rank {rank}", f"{rank}: collectives")
        if (title, row) != ("one", "0: collectives")  # one process has no collectives
    }
    assert compared.runs["ddp"].trace.steps == 2
    beside = compare({"ddp": compared.runs["ddp"], "traced": traced}).frame()
    assert beside.loc["traced", counted].equals(beside.loc["ddp", counted]), "a traced run is compared like a function"
    page = compared.save(tmp_path / "page.html").read_text()
    assert page.count("Plotly.newPlot") == 4
    assert "Memory leaves out what FSDP2 gathers" in page
    assert len(compared.table().data.columns) <= 9
    assert "ddp: finished" in capsys.readouterr().out, "where there is no notebook the table is printed"
    the_picker_draws_what_is_ticked(compared)


def the_picker_draws_what_is_ticked(compared):
    """Of the runs above: launching others would take as long again."""
    with pytest.MonkeyPatch.context() as patch:
        outputs, shown, live = [], [], []
        patch.setattr(kernel, "is_interactive", lambda: True)
        patch.setattr(kernel, "display", lambda thing, **options: shown.append(thing) or Output())
        patch.setattr(kernel, "reserve", lambda: outputs.append(Output()) or outputs[-1])
        patch.setattr(RunWidget, "show", lambda self, shown: live.append(shown["name"]))
        picker = Picker(compared)

        def drawn():
            last = [output.shown[-1] for output in outputs if output.shown]
            charts = [bundle[PLOTLY] for bundle in last if isinstance(bundle, dict) and PLOTLY in bundle]
            return {chart["layout"]["title"]["text"]: chart for chart in charts}

        def colors():
            return {t["name"]: t["line"]["color"] for t in drawn()["loss: mean over ranks"]["data"]}

        with picker.showing(compared.runs["one"]):
            wait_until(lambda: live[-1:] == ["one"], LONG_S)
        assert live[-1] == "", "taken away again"
        picker.draw()
        before = colors()
        assert len(drawn()) == 4
        picker.boxes["one"].value = False
        assert colors() == {title: color for title, color in before.items() if title != "one"}, "what stays keeps its"
        (table,) = [output.shown[-1]["text/html"] for output in outputs if "text/html" in (output.shown or [{}])[-1]]
        rows = re.findall(r'<th [^>]*class="row_heading[^>]*>(.*?)</th>', table)
        assert rows == [title for title in compared.runs if title != "one"]
        for box in picker.boxes.values():
            box.value = False
        assert drawn() == {}


@pytest.mark.spawns
def test_buffers_are_told_apart_and_masks_compared():
    with shared_session(2) as ranks:
        table = compare(bn=with_buffers, again=with_buffers, one=train, on=ranks, steps=14, live=False).frame()
    assert table.loc["bn", "weights"].startswith("equal; buffers differ by rank, off by"), (
        "DDP leaves each its statistics"
    )
    assert table.loc["again", "weights"] == table.loc["bn", "weights"]
    assert table.loc["again", "difference"] == 0
    assert table.loc["one", "weights"].startswith("other names: only in the first run")


# Without ranks


def compared_with(monkeypatch, **records):
    """Return a comparison of runs that have these records."""
    compared = Comparison()
    compared.titles = list(records)
    compared.runs = {title: run_of(log(0, [1], loss=[1.0]), world_size=1) for title in records}
    monkeypatch.setattr(Comparison, "records", lambda self, title: records[title])
    return compared


def timed(rank=0, world_size=1, ms=10.0, others=0.0, threads=1, device="cpu"):
    load = (20, 1.0, 0.5 * world_size + others, 0.5)
    return StepRecord(
        rank, world_size, device, timed_s=(ms / 1000,) * 20, computed_s=0.005, load=load, threads=threads, flops=1e9
    )


def test_there_is_a_speed_up_only_where_nothing_is_doubted(monkeypatch):
    cores = 8
    monkeypatch.setattr("labkit.comparison.compare.host.cores", lambda: cores)
    for records, said in (
        ([timed(ms=5.0)], []),
        ([timed(ms=5.0, others=1.1)], []),
        ([timed(ms=5.0, others=1.3)], ["b: other programs used 1.3 of 8 cores meanwhile."]),
        ([timed(ms=5.0, threads=2)], ["Ranks computed on other numbers of threads: a on 1, b on 2."]),
        ([timed(rank, 9, 5.0) for rank in range(9)], ["b: 9 ranks share 8 cores."]),
        ([timed(ms=5.0)._replace(load=(0, 0.0, 0.0, 0.0))], ["b: steps were timed for too short a while"]),
        ([timed(ms=5.0, device="cuda")], ["Some computed on GPUs, some on the CPU."]),
    ):
        compared = compared_with(monkeypatch, a=[timed()], b=records)
        doubts = compared.doubts()
        assert len(doubts) == len(said)
        assert all(found.startswith(expected) for found, expected in zip(doubts, said, strict=True))
        frame = compared.frame()
        assert frame.loc["b", "speed-up"] == pytest.approx(math.nan if said else 2.0, nan_ok=True)
        assert frame["computed ms"].tolist() == [5.0, 5.0], "always"
        assert bool(said) == any("No speed-up: " in note for note in compared.notes())
    assert compared.doubts(["a"]) == []
    gpu = timed(others=9.0, device="cuda")
    assert compared_with(monkeypatch, a=[gpu], b=[gpu]).frame()["speed-up"].tolist() == [1.0, 1.0]


def test_a_rank_of_which_nothing_has_come_leaves_no_number(monkeypatch):
    compared = compared_with(monkeypatch, a=[timed()], b=[timed()])
    compared.runs["b"] = run_of(log(0, [1], loss=[1.0]), world_size=2)
    assert math.isnan(compared.frame().loc["b", "GFLOP"])


def test_no_pictures_are_drawn_while_a_function_runs(monkeypatch):
    """They would be another program beside the steps that are timed."""
    order = []
    monkeypatch.setattr(kernel, "is_interactive", lambda: True)

    class Told:
        def __init__(self, comparison):
            self.draw = lambda: order.append("draws")

        @contextlib.contextmanager
        def showing(self, run):
            order.append("shows")
            yield

    def launched(function, **options):
        run = run_of(log(0, [1], loss=[1.0]), world_size=1)
        run.wait = lambda: order.append("runs")
        return run

    monkeypatch.setattr("labkit.comparison.compare.Picker", Told)
    monkeypatch.setattr("labkit.comparison.compare.launch", launched)
    Comparison(on=object()).add(one=ddp, two=ddp, steps=3, world_size=1)
    assert order == ["shows", "runs", "draws"] * 2


def test_what_cannot_be_launched_is_not_to_come(monkeypatch):
    def refuses(*args, **kwargs):
        raise TypeError("an open file")

    monkeypatch.setattr("labkit.comparison.compare.launch", refuses)
    compared = Comparison(on=object())
    with pytest.raises(TypeError, match="an open file"):
        compared.add(mine=ddp, steps=3, live=False)
    assert compared.titles == []


def takes_a_metric(worker, metric):
    """It has a parameter that compare() keeps for itself."""


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"ddp": ddp}, TypeError, r"ddp: ddp\(worker, steps\) cannot be called as ddp\(worker\).*'steps'"),
        ({"ddp": ddp, "steps": 3, "lr": 1}, TypeError, "ddp.*unexpected keyword argument 'lr'"),
        ({"ddp": ddp, "steps": 3, "world_size": {"dpp": 2}}, ValueError, "ranks for dpp; functions are: ddp"),
        ({"ddp": ddp, "steps": 3, "world_size": 0}, ValueError, "world_size must be at least 1"),
        ({"mine": takes_a_metric, "metric": "accuracy"}, ValueError, "mine has a parameter called 'metric'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(given, error, said):
    with pytest.raises(error, match=said):
        compare(**given)
