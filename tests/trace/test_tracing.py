"""`launch(…, trace=5)`, `run.trace`: planted stragglers are found, waiting is no transfer, the file is right."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
import threading
import time
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import labkit
from labkit.protocol import events
from labkit.rank.worker import Worker
from labkit.trace import clocks, intervals, reading, recording
from labkit.trace.findings import by_line, steps_of
from labkit.trace.lines import LineClock
from labkit.trace.meeting import RankTime
from labkit.trace.profiling import Event
from labkit.trace.reading import Places
from labkit.trace.records import MAIN, Call, Held, Phase, RankTrace, Span, pack, unpack
from labkit.trace.trace import Trace
from tests.conftest import shared_session

MS = 1e-3
LOAD, STEP_BEGINS, LOSS = ("train.py", 3), ("train.py", 4), ("train.py", 9)


def trace_of(ranks):
    return Trace(ranks, len(ranks))


def rank_trace(rank, steps, step_of, **more):
    """Return a record of steps that begin together: `step_of(rank, number)` gives what is in one, from 0 s on."""
    phases, spans, calls, lines, lengths = [], [], [], [], []
    start_s = 100.0
    for number in range(steps):
        step = step_of(rank, number)

        def at(seconds, begin=start_s):
            return begin + seconds

        phases += [Phase(part, at(a), at(b), place) for part, a, b, place in step["phases"]]
        spans += [Span("aten::mm", part, MAIN, at(a), at(b), 0, ((4, 4),), 64, LOSS) for part, a, b in step["spans"]]
        for index, (kind, a, b) in enumerate(step["calls"]):
            key = ("0", number * 100 + index)
            calls.append(Call(kind, key, at(a), at(b), ((1024,),), 4096, LOSS))
        lines += [(at(when), place) for when, place in step["lines"]]
        lengths.append((start_s, at(step["length"])))
        start_s = lengths[-1][1]
    members = tuple(range(more.pop("world_size", 2)))
    record = RankTrace(rank, "here", 0, tuple(lengths), tuple(phases), tuple(spans), tuple(calls), tuple(lines))
    return record._replace(groups=(("0", members),), **more)


def planted(world_size, late, part="data", delay_s=50 * MS, steps=5, transfer_s=3 * MS, noise=0.0):
    """Return the records of ranks of which `late` spends `delay_s` more of each step in a part of it."""
    rng = random.Random(world_size)
    jitter = [[rng.uniform(0, noise) for _ in range(world_size)] for _ in range(steps)]

    def work(rank, number):
        more = delay_s if rank == late else 0.0
        extra = jitter[number][rank]
        parts = {"data": 1 * MS, "other": 0.0, "forward": 2 * MS + extra, "backward": 4 * MS}
        parts[part] += more
        return parts

    def step_of(rank, number):
        mine = work(rank, number)
        full_s = max(sum(work(other, number).values()) for other in range(world_size))
        ends, at = {}, 0.0
        for name, length in mine.items():
            ends[name] = (at, at + length)
            at += length
        end_s = full_s + transfer_s
        backward = (ends["backward"][0], end_s)
        return {
            "phases": [
                ("data", *ends["data"], LOAD),
                ("forward", *ends["forward"], LOSS),
                ("backward", *backward, LOSS),
                ("optimizer", end_s, end_s + MS, LOSS),
            ],
            "spans": [("forward", *ends["forward"]), ("backward", *ends["backward"])],
            "calls": [("all_reduce", at, end_s)],
            "lines": [(0.0, LOAD), (ends["data"][1], STEP_BEGINS), (ends["forward"][0], LOSS)],
            "length": end_s + MS,
        }

    return [rank_trace(rank, steps, step_of, world_size=world_size) for rank in range(world_size)]


# Intervals


def test_intervals_are_those_of_sets_of_instants():
    rng = random.Random(1)
    for _ in range(50):
        pairs = [[(a, a + rng.randint(0, 6)) for a in (rng.randint(0, 30) for _ in range(5))] for _ in range(2)]
        one, other = map(intervals.union, pairs)
        sets = [{i for a, b in each for i in range(a, b)} for each in pairs]
        for found, expected in (
            (one, sets[0]),
            (intervals.intersect(one, other), sets[0] & sets[1]),
            (intervals.subtract(one, other), sets[0] - sets[1]),
        ):
            assert {i for a, b in found for i in range(a, b)} == expected
            assert intervals.length(found) == len(expected)
            assert all(a[1] <= b[0] for a, b in zip(found, found[1:], strict=False))


# Who is late


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("data", "its time goes into DataLoader (train.py, line 3)"),
        ("forward", "its time goes into forward (train.py, line 9)"),
        ("other", "its time goes into train.py, line 4"),
    ],
)
def test_a_planted_straggler_is_found_with_its_lateness_and_where_its_time_goes(world_size, part, said):
    trace = trace_of(planted(world_size, late=world_size - 1, part=part, noise=2 * MS))
    late = trace.straggler
    assert (late.rank, late.part, late.kind, late.is_every) == (world_size - 1, part, "all_reduce", True)
    assert late.late_s == pytest.approx(50 * MS, abs=2 * MS)
    assert late.text.startswith(f"rank {world_size - 1} is ")
    assert "late to every all_reduce" in late.text
    assert late.text.endswith(said)
    assert str(late) in str(trace)


def test_ranks_that_are_late_in_turns_or_once_are_no_stragglers():
    even = planted(3, late=None, steps=6)
    assert trace_of(even).straggler is None
    assert "no rank is late in every step" in str(trace_of(even))
    turns = [planted(3, late=number, steps=6) for number in range(3)]

    def mixed(rank):
        """Step k as in the records in which rank k % 3 is late."""
        found = turns[0][rank]
        keep = {k: turns[k % 3][rank] for k in range(6)}
        steps = tuple(keep[k].steps[k] for k in range(6))
        inside = [(keep[k], keep[k].steps[k]) for k in range(6)]
        return found._replace(
            steps=steps,
            **{
                field: tuple(each for one, (a, b) in inside for each in getattr(one, field) if a <= each.start_s < b)
                for field in ("phases", "spans", "calls")
            },
            lines=(),
        )

    assert trace_of([mixed(rank) for rank in range(3)]).straggler is None


def test_calls_under_way_at_the_same_time_count_once_and_computing_is_not_waiting():
    """Two buckets, as DDP sends them: rank 0 computes on for 10 ms after the first; rank 1 is 50 ms late to both."""

    def step_of(rank, number):
        more = 50 * MS * rank
        return {
            "phases": [("backward", more, 73 * MS, LOSS)],
            "spans": [("backward", more, more + 20 * MS)],
            "calls": [("all_reduce", more + 10 * MS, 62 * MS), ("all_reduce", more + 20 * MS, 73 * MS)],
            "lines": [(0.0, STEP_BEGINS), (more, LOSS)],
            "length": 74 * MS,
        }

    trace = trace_of([rank_trace(rank, 5, step_of) for rank in range(2)])
    assert trace.straggler.late_s == pytest.approx(50 * MS)
    seconds = trace.times[0].seconds(trace.ranks[0].steps[0])
    assert seconds["waiting"] == pytest.approx(50 * MS)
    assert seconds["transfer"] == pytest.approx(3 * MS)
    assert sum(seconds.values()) == pytest.approx(74 * MS)


def test_delays_before_many_collectives_of_a_step_add_up():
    def step_of(rank, number):
        calls = [("all_reduce", 11 * MS * k + (10 * MS if rank else 0), 11 * MS * (k + 1)) for k in range(5)]
        none = {"phases": [], "spans": [], "lines": [(0.0, LOSS)]}
        return {**none, "calls": calls, "length": 56 * MS}

    late = trace_of([rank_trace(rank, 5, step_of) for rank in range(2)]).straggler
    assert (late.rank, late.part) == (1, "other")
    assert late.late_s == pytest.approx(50 * MS)
    assert "keeps the others waiting 50 ms a step in all_reduce" in late.text


def test_waiting_in_a_collective_is_until_the_last_has_entered_and_the_rest_is_transfer():
    trace = trace_of(planted(3, late=1))
    table = trace.frame()
    assert table["waiting"].tolist() == pytest.approx([50, 0, 50])
    assert table["transfer"].tolist() == pytest.approx([3, 3, 3])
    assert table["data"].tolist() == pytest.approx([1, 51, 1])
    assert table.sum(axis=1).tolist() == pytest.approx([1000 * trace.step_s] * 3)


def test_ranks_whose_calls_nobody_numbered_meet_by_their_order_if_that_is_the_same():
    ranks = planted(2, late=1)
    bare = [r._replace(calls=tuple(call._replace(key=None) for call in r.calls)) for r in ranks]
    assert trace_of(bare).straggler.late_s == pytest.approx(50 * MS)
    other = bare[1]._replace(calls=(bare[1].calls[0]._replace(kind="barrier"), *bare[1].calls[1:]))
    assert trace_of([bare[0], other]).straggler is None, "nobody knows what met what"


def test_a_group_of_which_a_member_tells_nothing_is_left_out():
    ranks = planted(3, late=1)
    assert trace_of(ranks[:2]).meetings == []


def test_a_line_gets_its_own_time_and_no_waiting():
    time_of = trace_of(planted(2, late=1)).times[0]
    found = by_line(time_of, time_of.rank.steps[0])
    assert found[LOAD] == pytest.approx(1 * MS)
    assert found[LOSS] == pytest.approx(7 * MS), "forward, backward and the optimizer's step, without 50 ms of waiting"


# What else costs time


def test_a_loop_is_input_bound_if_every_rank_loads_for_most_of_the_step():
    def loading(rank, number):
        return {
            "phases": [("data", 0, 14 * MS, LOAD), ("backward", 15 * MS, 19 * MS, LOSS)],
            "spans": [("backward", 15 * MS, 19 * MS)],
            "calls": [("all_reduce", 19 * MS, 19.5 * MS)],
            "lines": [],
            "length": 20 * MS,
        }

    (found,) = trace_of([rank_trace(rank, 5, loading) for rank in range(2)]).findings
    assert (found.kind, found.share) == ("input-bound", pytest.approx(0.7))
    assert "every rank spends 70% of a step in DataLoader" in found.text
    assert [one.kind for one in trace_of(planted(2, late=1)).findings] == ["straggler"], "one rank alone loads"


@pytest.mark.parametrize(
    ("sent", "is_said"),
    [
        ([(20, 28)], True),  # after the last gradient
        ([(8, 16), (16, 21)], False),  # in buckets, while the backward pass goes on
        ([(20, 20.5)], False),  # it would not pay
    ],
)
def test_gradients_that_travel_beside_nothing_are_told(sent, is_said):
    def step_of(rank, number):
        return {
            "phases": [("forward", 0, 5 * MS, LOSS), ("backward", 5 * MS, 20 * MS, LOSS)],
            "spans": [("forward", 0, 5 * MS), ("backward", 5 * MS, 20 * MS)],
            "calls": [("all_reduce", a * MS, b * MS) for a, b in sent],
            "lines": [],
            "length": 30 * MS,
        }

    found = trace_of([rank_trace(rank, 5, step_of) for rank in range(2)]).findings
    assert [one.kind for one in found] == (["no overlap"] if is_said else [])
    if is_said:
        assert "all_reduce (train.py, line 9) does not overlap with backward: for 27% of a step" in found[0].text


# The profiler's record


def test_what_only_contains_others_or_may_wait_is_not_computing():
    def event(name, a, b, scope=0):
        return Event(name, a, b, 7, scope=scope)

    found = reading.nested(
        [
            event("DistributedDataParallel.forward", 0, 10, reading.USER_SCOPE),
            event("aten::linear", 1, 4),
            event("aten::mm", 2, 3),
            event("autograd::engine::evaluate_function: ToTheOthersBackward", 11, 20),
            event("ToTheOthersBackward", 12, 19),  # a Function that all-reduces, and waits, in its backward
            event("aten::mul", 13, 14),
            event("c10d::allreduce_", 15, 16),
        ]
    )
    assert [(e.name, depth) for e, depth in found] == [("aten::linear", 0), ("aten::mm", 1), ("aten::mul", 0)]


def test_a_collective_is_entered_when_it_was_called_and_known_by_group_and_number():
    events = [Event("gloo:all_reduce", 10.2, 10.5, shapes=((8,),), dtypes=("double",)), Event("gloo:send", 11, 11.1)]
    entry = {"process_group": ["3", ""], "collective_seq_id": 41, "time_created_ns": 10e9, "is_p2p": False}
    recorded = [{**entry, "profiling_name": "gloo:all_reduce"}]
    called, sent = reading.calls(events, recorded, Places([(9.0, LOAD), (10.1, LOSS)]))
    assert called[:4] == ("all_reduce", ("3", 41), 10.0, 10.5)
    assert (called.size, called.place) == (64, LOAD)
    assert (sent.kind, sent.key, sent.start_s) == ("send", None, 11)


def test_a_call_of_nccl_lasts_as_long_as_its_kernel():
    events = [
        Event("nccl:all_reduce", 1.0, 1.1),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 1.5, 1.9, 20, on_device=True),
        Event("ampere_sgemm", 1.2, 1.4, 7, on_device=True, link=5),
        Event("aten::mm", 0.9, 1.0, 1, link=5),
    ]
    (call,) = reading.calls(events, [], Places([]))
    assert (call.kind, call.start_s, call.end_s, call.lane) == ("all_reduce", 1.5, 1.9, "stream 20")
    found = reading.spans(events, [Phase("backward", 0.8, 1.05)], Places([]))
    assert [(s.name, s.part, s.lane[:6]) for s in found] == [
        ("aten::mm", "backward", "thread"),
        ("ampere_sgemm", "backward", "stream"),
    ]
    (_, kernel) = reading.calls([events[1], events[1]], [], Places([]))
    assert kernel.kind == "all_reduce", "more kernels than calls: by the kernel's own name"


def test_only_the_longest_spans_are_kept_nested_ones_first_to_go():
    spans = [Span("a", "other", MAIN, t, t + length, depth) for t, length, depth in ((0, 5, 1), (1, 1, 0), (2, 2, 0))]
    assert recording.longest(spans, 3) == (spans, 0)
    assert recording.longest(spans, 2) == ([spans[1], spans[2]], 1)
    assert recording.longest(spans, 1) == ([spans[2]], 2)


# On a rank


def helper():
    time.sleep(0.01)
    return 1


def test_lines_of_the_readers_code_are_noted_and_nothing_stays_on():
    with LineClock() as clock:
        helper()
        json.dumps({"a": 1})
    assert sys.gettrace() is None
    assert sys._getframe().f_trace is None
    first = helper.__code__.co_firstlineno
    noted = [line for _, (file, line) in clock.lines() if file == __file__]
    assert [first + 1, first + 2] == [line for line in noted if first <= line <= first + 2]
    assert {file for _, (file, _) in clock.lines()} == {__file__}, "none of the libraries'"
    at = next(when for when, (_, line) in clock.lines() if line == first + 1)
    assert Places(clock.lines()).at(at + 0.005) == (__file__, first + 1)
    after = clock.lines()[[line for _, (_, line) in clock.lines()].index(first + 2) + 1]
    assert after[1][1] > first + 2, "back in the caller's line"


def test_a_debugger_is_left_alone():
    def debugger(*_):
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        with LineClock() as clock:
            helper()
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert clock.lines() == ()


class Slow(Dataset):
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index % 4 == 0 and self.seconds:
            time.sleep(self.seconds)
        return torch.full((8,), float(index))


def steps(worker, count, fail=False):
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _, batch in zip(range(count), DataLoader(Slow(), batch_size=4), strict=False):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        worker.log(steps=1.0)
    if fail:
        raise ValueError("no more")
    return len(torch.nn.modules.module._global_forward_pre_hooks), sys.gettrace()


def by_hand(worker, count):
    """No optimizer: steps are what it logs."""
    for _ in range(count):
        torch.ones(8).sum()
        worker.log(steps=1.0)


def recorded(function, *args, trace=3):
    """Return what a function returns, and its record, made in this process."""
    sent, logged = [], []
    channel = SimpleNamespace(send=sent.append, store=None, stop_asked_s=None, hooks=())
    log = SimpleNamespace(add=lambda *each: logged.append(each))
    worker = Worker(SimpleNamespace(rank=0, local_rank=0, world_size=1), torch.device("cpu"), log, channel)
    returned = None
    try:
        returned = recording.record(worker, cloudpickle.dumps((function, args, {})), trace)
    except ValueError as error:
        returned = error
    assert "log" not in vars(worker)
    (event,) = [each for each in sent if isinstance(each, events.Attached)]
    assert (event.rank, event.kind) == (0, "trace")
    return returned, unpack(event.blob), len(logged)


def test_some_steps_are_recorded_and_no_hook_outlives_them():
    backward, hooks = torch.autograd.backward, len(torch.nn.modules.module._global_forward_pre_hooks)
    (hooks_within, tracing), found, logged = recorded(steps, 9)
    assert (hooks_within, tracing, logged) == (hooks, None, 9), "gone while the function goes on"
    assert torch.autograd.backward is backward
    assert len(found.steps) == 3
    parts = [p.part for p in sorted(found.phases, key=lambda p: p.start_s)]
    assert parts == ["data", "forward", "backward", "optimizer"] * 3
    assert {s.part for s in found.spans if not s.depth} >= {"data", "forward", "backward", "optimizer"}
    linear = next(s for s in found.spans if s.name == "aten::linear")
    assert (linear.shapes[0], linear.size, linear.lane) == ((4, 8), 4 * (32 + 16 + 2), MAIN)
    assert linear.place[0] == __file__
    assert "model(batch)" in open(__file__).read().splitlines()[linear.place[1] - 1]  # noqa: SIM115
    assert steps_of([found]) == 3
    seconds = RankTime(found, []).seconds(found.steps[0])
    assert sum(seconds.values()) == pytest.approx(found.steps[0][1] - found.steps[0][0])


def test_what_a_function_does_that_ends_early_or_fails_is_recorded_as_far_as_it_goes():
    _, found, _ = recorded(steps, 5)
    assert len(found.steps) == 2
    error, found, _ = recorded(steps, 5, True)
    assert (str(error), len(found.steps)) == ("no more", 2)
    _, found, _ = recorded(steps, 2)
    assert found.steps == ()
    assert "rank 0 took 2 steps, of which the first 3 are not traced" in found.unknown
    assert "rank 0 took 2 steps" in str(trace_of([found]))
    _, found, _ = recorded(by_hand, 8)
    assert len(found.steps) == 3, "without an optimizer a step ends where the function logs"
    assert torch.nn.modules.module._global_forward_pre_hooks == {}


def profiled(worker, count, from_step):
    """Steps, from one of which on the reader's own profiler is on."""
    from torch.profiler import ProfilerActivity, profile

    with contextlib.ExitStack() as stack:
        for step in range(count):
            if step == from_step:
                own = stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
            torch.ones(8).sum()
            worker.log(steps=1.0)
    return len([event for event in own.events() if event.name == "aten::sum"])


@pytest.mark.parametrize("from_step", [0, 1, 2, 3, 4])
def test_beside_the_readers_own_profiler_nothing_is_recorded_and_theirs_has_everything(from_step):
    counted, found, logged = recorded(profiled, 9, from_step)
    assert (counted, logged) == (9 - from_step, 9)
    assert found.steps == ()
    assert "rank 0 recorded nothing: the function has a profiler of its own on (torch.profiler)" in found.unknown
    assert "Launch without trace=" in str(trace_of([found]))
    counted, found, _ = recorded(profiled, 9, 7)
    assert (counted, len(found.steps)) == (2, 3), "once the trace is over, theirs is nothing to it"


def test_memory_by_part_is_followed_over_a_step():
    _, found, _ = recorded(steps, 9)
    weights = 4 * (8 * 2 + 2)
    held = [each.bytes for each in found.memory]
    assert {each["parameters"] for each in held} == {weights}
    assert {each["optimizer state"] for each in held} == {0}, "plain SGD has none"
    gradients = [each["gradients"] for each in held]
    assert (gradients[0], min(gradients), gradients[-1]) == (weights, 0, weights), "zero_grad lets go of them"
    kept = [each["activations"] for each in held]
    assert (kept[0], kept[-1]) == (0, 0)
    assert max(kept) >= 4 * 4 * 8, "the batch, at least"
    assert found.memory[-1].at_s <= found.steps[0][0]
    chart = trace_of([found]).memory()
    assert [line.name for line in chart.data] == ["parameters", "gradients", "optimizer state", "activations"]
    assert max(chart.data[-1].y) == max(map(sum, (each.values() for each in held)))
    with pytest.raises(ValueError, match="no memory of rank 3 was counted"):
        trace_of([found]).memory(3)


# Clocks


def test_the_quickest_exchange_says_how_far_clocks_are_apart():
    exchanges = [(10.0, 35.9, 10.5), (11.0, 36.01, 11.02), (12.0, 37.5, 12.9)]
    offset_s, uncertain_s = clocks.estimate(exchanges)
    assert offset_s == pytest.approx(25.0)
    assert uncertain_s == pytest.approx(0.01)


def test_ranks_of_other_machines_ask_rank_0_and_those_of_its_own_do_not():
    store = dist.HashStore()
    apart_s = {0: 0.0, 1: 0.0, 2: -5.0}
    found = {}

    def ask(rank):
        worker = SimpleNamespace(rank=rank, world_size=3, _channel=SimpleNamespace(store=store))
        found[rank] = clocks.compare(worker, "ab"[rank == 2], lambda: time.time() + apart_s[rank])

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0][1:] == found[1][1:] == (0.0, 0.0)
    assert abs(found[2].offset_s - 5.0) <= found[2].uncertain_s + 1e-6
    assert found[2].uncertain_s > 0


def test_records_are_put_on_one_clock_and_the_uncertainty_is_printed():
    ranks = planted(2, late=1)
    held = Held(ranks[1].steps[0][0], {"parameters": 8})
    away = ranks[1]._replace(machine="there", memory=(held,), offset_s=-7.0).on_clock_of_rank_0()
    away = away._replace(offset_s=7.0, uncertain_s=2e-4)
    assert away.steps[0][0] == pytest.approx(ranks[1].steps[0][0] - 7)
    trace = trace_of([ranks[0], unpack(pack(away))])
    assert trace.straggler.late_s == pytest.approx(50 * MS)
    assert trace.records[1].memory[0].at_s == pytest.approx(held.at_s)
    assert "clocks of 2 machines compared when the run began" in str(trace)
    assert "right within 0.2 ms" in str(trace)
    assert "clocks" not in str(trace_of(ranks))
    later = ranks[1].on_clock_of_rank_0(int(3e9))
    assert later.steps[0][0] == pytest.approx(ranks[1].steps[0][0] - 3)
    assert trace_of([ranks[0], later]).straggler.late_s == pytest.approx(50 * MS), "each counts from a zero of its own"


# The chart and the file


def test_the_timeline_has_a_row_for_each_rank_and_its_collectives_and_says_what_lies_there():
    trace = trace_of(planted(3, late=2))
    chart = trace.figure()
    assert list(chart.layout.yaxis.categoryarray) == [
        row for rank in range(3) for row in (f"rank {rank}", f"{rank}: collectives")
    ]
    by_part = {each.name: each for each in chart.data if each.name}
    waits = by_part["waiting"]
    assert {*waits.y} == {"0: collectives", "1: collectives"}
    assert list(waits.x) == pytest.approx([50] * 10)
    assert "all_reduce #0: waits for rank 2<br>50 ms<br>[1024]<br>4 KiB<br>train.py, line 9" in waits.hovertext
    assert any("aten::mm" in text and "[4, 4]" in text and "64 bytes" in text for text in by_part["forward"].hovertext)
    loads = [(y, round(x)) for y, x in zip(by_part["data"].y, by_part["data"].x, strict=True)]
    assert loads == [("rank 0", 1)] * 5 + [("rank 1", 1)] * 5 + [("rank 2", 51)] * 5
    assert {*trace.figure(ranks=[1], steps=1).layout.yaxis.categoryarray} == {"rank 1", "1: collectives"}
    with pytest.raises(ValueError, match=r"no steps of rank \[7\] are recorded; of these there are: 0, 1, 2"):
        trace.figure(ranks=[7])


def test_time_in_python_is_drawn_with_the_line_in_which_it_went():
    chart = trace_of(planted(2, late=1, part="other")).figure()
    (other,) = [each for each in chart.data if each.name == "other"]
    assert any(text == "other: Python<br>50 ms<br>train.py, line 4" for text in other.hovertext)


def test_many_spans_and_many_ranks_make_no_large_chart():
    def step_of(rank, number):
        spans = [("forward", k * 1e-5, k * 1e-5 + 8e-6) for k in range(4000)]
        return {"phases": [("forward", 0, 0.04, LOSS)], "spans": spans, "calls": [], "lines": [], "length": 0.05}

    trace = trace_of([rank_trace(rank, 2, step_of, world_size=20) for rank in range(20)])
    chart = trace.figure()
    assert len(chart.layout.yaxis.categoryarray) == 8
    assert sum(len(each.x) for each in chart.data) <= 4500
    assert len(json.dumps(chart.to_plotly_json_small())) < 1_000_000


NUMBERS, TEXT = (int, float), (str,)
FIELDS = {  # of Chrome's trace event format, by phase: what must be there, and of which type
    "X": {"name": TEXT, "cat": TEXT, "ph": TEXT, "ts": NUMBERS, "dur": NUMBERS, "pid": (int,), "tid": (int,)},
    "M": {"name": TEXT, "ph": TEXT, "pid": (int,), "tid": (int,), "args": (dict,)},
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
METADATA |= {"thread_sort_index": "sort_index"}


def check_trace_events(path):
    """Hold a file against the trace event format, and what Perfetto's importer makes of it; return all, and slices."""
    document = json.loads(path.read_text(), parse_constant=pytest.fail)  # viewers know no NaN
    assert {"traceEvents"} <= set(document) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    slices, named = {}, set()
    for event in document["traceEvents"]:
        for field, types in FIELDS[event["ph"]].items():
            assert type(event[field]) in types, (field, event)
        assert set(event) <= {*FIELDS[event["ph"]], "args", "ts"}, event
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            ((field, value),) = event["args"].items()
            assert field == METADATA[event["name"]]
            assert type(value) is (int if field == "sort_index" else str)
            assert (event["pid"], event["tid"], event["name"]) not in named, "named once, before it is used"
            assert (event["pid"], event["tid"]) not in slices
            named.add((event["pid"], event["tid"], event["name"]))
            continue
        assert (event["pid"], event["tid"], "thread_name") in named
        assert any((pid, what) == (event["pid"], "process_name") for pid, _, what in named)
        assert event["ts"] >= 0, "Perfetto drops what begins before"
        assert event["dur"] >= 0
        start, length = int(1000 * event["ts"]), int(1000 * event["dur"])  # as Perfetto reads them
        slices.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    assert len({tid for _, tid in slices}) == len(slices)
    assert all(tid not in (0, pid) for pid, tid in slices), "Perfetto mixes lanes up by these"
    for thread, found in slices.items():
        open_until = []
        for start, end in sorted(found, key=lambda each: each[0]):  # what begins together, in the file's order
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"slices of {thread} overlap and do not nest"
            open_until.append(end)
    return document, slices


def test_the_saved_file_is_in_the_trace_event_format_with_a_process_per_rank(tmp_path):
    def step_of(rank, number):  # two collectives under way at a time
        return {
            "phases": [("optimizer", -1 * MS, 0.5 * MS, LOSS), ("backward", 0.5 * MS, 30 * MS, LOSS)],
            "spans": [("backward", 0.5 * MS, 20 * MS)],
            "calls": [("all_reduce", (5 + rank) * MS, 25 * MS), ("all_reduce", 12 * MS, 30 * MS)],
            "lines": [],
            "length": 31 * MS,
        }

    trace = trace_of([rank_trace(rank, 2, step_of, world_size=3) for rank in range(3)])
    document, slices = check_trace_events(trace.save(tmp_path / "trace.json"))
    assert {pid for pid, _ in slices} == {0, 1, 2}
    found = [event for event in document["traceEvents"] if event["pid"] == 0]
    names = {event["args"]["name"] for event in found if event["name"] in ("process_name", "thread_name")}
    assert names == {
        "rank 0 (here)",
        "steps",
        "parts of a step",
        "main thread",
        "collectives",
        "collectives 2",
    }
    first = next(event for event in found if event["name"] == "all_reduce")
    assert first["args"] == {
        "shapes": "[[1024]]",
        "bytes": 4096,
        "line": "train.py, line 9",
        "group": "0",
        "number": 0,
    }
    assert (first["ts"], first["dur"]) == pytest.approx((6000, 20000))
    waits = next(event for event in found if event["name"] == "waiting")
    assert (waits["ts"], waits["dur"], waits["args"]) == (6000, pytest.approx(2000), {"for rank": 2})


# With ranks


def late_by_its_own_clock(worker, late, delay_s, where):
    """Train, and return when this rank entered the all-reduce of each step."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mine = worker.rank == late
    batches = iter(DataLoader(Slow(delay_s if mine and where == "data" else 0.0), batch_size=4))
    entered = []
    for _ in range(9):
        batch = next(batches)
        if mine and where == "other":
            time.sleep(delay_s)
        model(batch).square().mean().backward()
        entered.append(time.time())
        dist.all_reduce(model.weight.grad)
        optimizer.step()
    return entered, sys.gettrace() is None, len(torch.nn.modules.module._global_forward_pre_hooks)


@pytest.mark.spawns
def test_a_planted_straggler_of_50_ms_is_found_within_5_on_2_3_and_4_ranks(tmp_path):
    with shared_session(4) as ranks:
        for world_size, where in ((2, "data"), (3, "other"), (4, "data")):
            late = world_size - 1
            options = {"late": late, "delay_s": 0.05, "where": where, "trace": 5, "live": False}
            run = labkit.launch(late_by_its_own_clock, on=ranks, world_size=world_size, **options)
            entered = [result[0] for result in run.results]
            assert all(result[1:] == (True, 0) for result in run.results), "nothing stays on"
            assert run.output == [""] * world_size, "what a profiler says of itself is left away"
            truth_s = statistics.median(
                at[late] - statistics.median(at[:late]) for at in list(zip(*entered, strict=True))[3:8]
            )
            found = run.trace.straggler
            assert (found.rank, found.part, found.kind) == (late, where, "all_reduce"), run.trace
            assert found.late_s == pytest.approx(truth_s, abs=5 * MS)
            assert "test_tracing.py, line" in found.text
        check_trace_events(run.trace.save(tmp_path / "trace.json"))
        assert len(run.trace.ranks) == 4
        plain = labkit.launch(late_by_its_own_clock, 0, 0.0, "", on=ranks, world_size=2, live=False)
        with pytest.raises(ValueError, match=r"has no trace: it was launched without trace=…"):
            plain.trace  # noqa: B018


def test_launch_says_what_trace_takes():
    for wrong in (0, True, 2.5, "all"):
        with pytest.raises(ValueError, match="trace is a number of steps, at least 1"):
            labkit.launch(steps, 3, trace=wrong)
    with pytest.raises(ValueError, match="cannot be sent to the ranks: .*lock"):
        labkit.launch(steps, threading.Lock(), trace=3)
