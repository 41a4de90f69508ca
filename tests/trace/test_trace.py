"""`launch(…, trace=5)`, `run.trace`: planted stragglers are found, waiting is no transfer, the file is right."""

from __future__ import annotations

import json
import statistics
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import labkit
from labkit.trace.trace import Trace
from tests.conftest import shared_session
from tests.steps.test_record import MS, planted, record_of
from tests.steps.test_watch import Rows

# Who is late


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("part", "said"),
    [("data", "DataLoader"), ("forward", "forward"), ("other", "Python, outside of PyTorch")],
)
def test_a_planted_straggler_is_found_with_its_lateness_and_where_its_time_goes(world_size, part, said):
    trace = Trace(planted(world_size, late=world_size - 1, part=part, noise=2 * MS))
    late = trace.straggler
    assert (late.rank, late.part, late.kind, late.is_every) == (world_size - 1, part, "all_reduce", True)
    assert late.late_s == pytest.approx(50 * MS, abs=2 * MS)
    assert str(late).startswith(f"rank {world_size - 1} is ")
    assert str(late).endswith(f"late to every all_reduce: its time goes into {said}")
    assert str(late) in str(trace)


def test_ranks_that_are_late_in_turns_or_once_are_no_stragglers():
    even = Trace(planted(3, late=None, steps=6))
    assert even.straggler is None
    assert "no rank is late in every step" in str(even)
    assert Trace(planted(3, late=None, steps=6, late_in=lambda number: number % 3)).straggler is None
    assert Trace(planted(3, late=None, steps=6, late_in=lambda number: {2: 1}.get(number))).straggler is None


def test_delays_before_many_collectives_of_a_step_add_up():
    def step_of(rank, number):
        calls = [("all_reduce", 11 * MS * k + (10 * MS if rank else 0), 11 * MS * (k + 1)) for k in range(5)]
        return {"phases": [], "busy": [], "calls": calls, "length": 56 * MS}

    late = Trace([record_of(rank, 5, step_of) for rank in range(2)]).straggler
    assert (late.rank, late.part) == (1, "other")
    assert late.late_s == pytest.approx(50 * MS)
    assert "keeps the others waiting 50 ms a step in all_reduce" in str(late)


def test_the_table_has_the_parts_of_a_step_which_add_up():
    trace = Trace(planted(3, late=1))
    table = trace.frame()
    assert table["waiting"].tolist() == pytest.approx([50, 0, 50])
    assert table["transfer"].tolist() == pytest.approx([3, 3, 3])
    assert table["data"].tolist() == pytest.approx([1, 51, 1])
    assert table.sum(axis=1).tolist() == pytest.approx([1000 * trace.step_s] * 3)


# What else costs time


def test_a_loop_is_input_bound_if_every_rank_loads_for_most_of_the_step():
    def loading(rank, number):
        return {
            "phases": [("data", 0, 14 * MS), ("backward", 15 * MS, 19 * MS)],
            "busy": [(15 * MS, 19 * MS)],
            "calls": [("all_reduce", 19 * MS, 19.5 * MS)],
            "length": 20 * MS,
        }

    found = Trace([record_of(rank, 5, loading) for rank in range(2)]).findings
    assert list(found) == ["input-bound"]
    assert "every rank spends 70% of a step in DataLoader" in found["input-bound"]
    assert list(Trace(planted(2, late=1)).findings) == ["straggler"], "one rank alone loads"


@pytest.mark.parametrize(
    ("sent", "overlap", "is_said"),
    [
        ([(20, 28)], 0.0, True),  # after the last gradient
        ([(8, 16), (16, 21)], 12 / 13, False),  # in buckets, while the backward pass goes on
        ([(20, 20.5)], 0.0, False),  # it would not pay
    ],
)
def test_gradients_that_travel_beside_nothing_are_told(sent, overlap, is_said):
    def step_of(rank, number):
        return {
            "phases": [("forward", 0, 5 * MS), ("backward", 5 * MS, 20 * MS)],
            "busy": [(0, 5 * MS), (5 * MS, 20 * MS)],
            "calls": [("all_reduce", a * MS, b * MS) for a, b in sent],
            "length": 30 * MS,
        }

    trace = Trace([record_of(rank, 5, step_of) for rank in range(2)])
    assert trace.overlap == pytest.approx(overlap, abs=1e-6)
    assert list(trace.findings) == (["no overlap"] if is_said else [])
    if is_said:
        assert "all_reduce does not overlap with backward: for 27% of a step" in trace.findings["no overlap"]


def test_what_is_missing_and_whose_clocks_are_apart_is_said():
    ranks = planted(3, late=1)
    assert Trace(ranks).notes == []
    assert Trace(ranks[:2]).notes == ["nothing has come of rank 2"]
    there = ranks[2].moved(5.0)._replace(machine="there")
    assert "set by the ends of all-reduces" in str(Trace([*ranks[:2], there]))
    none = [r._replace(calls=()) for r in (*ranks[:2], there)]
    assert "those of there are not known" in str(Trace(none))
    assert "no steps" in str(Trace([ranks[0]._replace(steps=())]))


# The chart and the file


def test_the_timeline_has_a_row_for_each_rank_and_one_for_its_collectives():
    trace = Trace(planted(3, late=2))
    chart = trace.figure()
    rows = [row for rank in range(3) for row in (f"rank {rank}", f"{rank}: collectives")]
    assert list(chart.layout.yaxis.categoryarray) == rows == list(trace.lanes())
    by_part = {each.name: each for each in chart.data}
    assert {*by_part["waiting"].y} == {"0: collectives", "1: collectives"}
    assert list(by_part["waiting"].x) == pytest.approx([50] * 10)
    loads = [(y, round(x)) for y, x in zip(by_part["data"].y, by_part["data"].x, strict=True)]
    assert loads == [("rank 0", 1)] * 5 + [("rank 1", 1)] * 5 + [("rank 2", 51)] * 5
    assert {*trace.figure(ranks=[1], steps=1).layout.yaxis.categoryarray} == {"rank 1", "1: collectives"}
    with pytest.raises(ValueError, match=r"no steps of rank \[7\] are recorded; of these there are: 0, 1, 2"):
        trace.figure(ranks=[7])


def test_of_many_ranks_eight_are_drawn_the_straggler_among_them():
    rows = Trace(planted(20, late=19)).figure().layout.yaxis.categoryarray
    assert len(rows) == 16
    assert "rank 19" in rows


def test_without_steps_there_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="no rank has recorded steps. rank 0 took 2"):
        Trace([planted(1, None)[0]._replace(unknown="rank 0 took 2 steps")]).save(tmp_path / "trace.json")


def check_trace_events(path, world_size):
    """Hold a file against the trace event format, as Perfetto's importer reads it."""
    document = json.loads(path.read_text(), parse_constant=pytest.fail)  # viewers know no NaN
    found = document["traceEvents"]
    assert {event["pid"] for event in found} == set(range(world_size))
    named = {(e["pid"], e["args"]["name"]) for e in found if e["name"] == "process_name"}
    assert named == {(rank, f"rank {rank}") for rank in range(world_size)}
    threads = {(e["pid"], e["tid"]) for e in found if e["ph"] == "X"}
    assert len({tid for _, tid in threads}) == len(threads), "Perfetto takes equal numbers for one thread"
    opened = sorted(e["id"] for e in found if e["ph"] == "b")
    assert opened == sorted(e["id"] for e in found if e["ph"] == "e")
    names = [e["name"] for e in found if e["ph"] in "Xb"]
    assert sum(name.startswith("gloo:all_reduce") for name in names) >= world_size
    assert any(name.startswith("aten::") for name in names)


# With ranks


class Slow(Rows):
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __getitem__(self, index):
        if index % 4 == 0 and self.seconds:
            time.sleep(self.seconds)
        return super().__getitem__(index)


def late_by_its_own_clock(worker, late, delay_s, where):
    """Train, and return when this rank entered the all-reduce of each step."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mine = worker.rank == late
    batches = iter(DataLoader(Slow(delay_s if mine and where == "data" else 0.0), batch_size=4))
    entered = []
    for _ in range(10):
        batch = next(batches)
        if mine and where == "other":
            time.sleep(delay_s)
        model(batch).square().mean().backward()
        entered.append(time.time())
        dist.all_reduce(model.weight.grad)
        optimizer.step()
    return entered, len(torch.nn.modules.module._global_forward_pre_hooks)


@pytest.mark.spawns
def test_a_planted_straggler_of_50_ms_is_found_within_5_on_2_3_and_4_ranks(tmp_path):
    with shared_session(4) as ranks:
        for world_size, where in ((2, "data"), (3, "other"), (4, "data")):
            late = world_size - 1
            options = {"late": late, "delay_s": 0.05, "where": where, "trace": 5, "live": False}
            run = labkit.launch(late_by_its_own_clock, on=ranks, world_size=world_size, **options)
            entered = [result[0] for result in run.results]
            assert all(hooks == 0 for _, hooks in run.results), "nothing stays on"
            assert run.output == [""] * world_size, "what a profiler says of itself is omitted"
            truth_s = statistics.median(
                at[late] - statistics.median(at[:late]) for at in list(zip(*entered, strict=True))[4:9]
            )
            found = run.trace.straggler
            assert (found.rank, found.part, found.kind) == (late, where, "all_reduce"), run.trace
            assert found.late_s == pytest.approx(truth_s, abs=5 * MS)
        check_trace_events(run.trace.save(tmp_path / "trace.json"), 4)
        assert len(run.trace.times) == 4
        plain = labkit.launch(late_by_its_own_clock, 0, 0.0, "", on=ranks, world_size=2, live=False)
        with pytest.raises(ValueError, match=r"has no trace: it was launched without trace=…"):
            plain.trace  # noqa: B018


def test_launch_says_what_trace_takes():
    for wrong in (0, True, 2.5, "all"):
        with pytest.raises(ValueError, match="trace is a number of steps, at least 1"):
            labkit.launch(planted, 3, trace=wrong)
    with pytest.raises(ValueError, match="cannot be sent to the ranks: .*lock"):
        labkit.launch(planted, threading.Lock(), trace=3)
