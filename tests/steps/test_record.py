"""Arithmetic of times, collectives that ranks meet in, and what the profiler's events say. No process is started."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from labkit.steps import intervals, profiler
from labkit.steps.profiler import Event, calls_of, computing_of, merge
from labkit.steps.record import Call, StepRecord, expected_bytes, meetings, others_cores, times

MS = 1e-3


def record_of(rank, steps, step_of, start_s=100.0, **more):
    """Return a record of steps that begin together: `step_of(rank, number)` gives what is in one, from 0 s on."""
    phases, busy, calls, lengths = {}, [], [], []
    for number in range(steps):
        step = step_of(rank, number)

        def at(seconds, begin=start_s):
            return begin + seconds

        for part, a, b in step["phases"]:
            phases.setdefault(part, []).append((at(a), at(b)))
        busy += [(at(a), at(b)) for a, b in step["busy"]]
        for index, (kind, a, b) in enumerate(step["calls"]):
            calls.append(Call(kind, ("0", number * 100 + index), at(a), at(b), 4096))
        lengths.append((start_s, at(step["length"])))
        start_s = lengths[-1][1]
    size = more.pop("world_size", 2)
    return StepRecord(
        rank, size, steps=tuple(lengths), phases=phases, busy=busy, calls=tuple(calls), groups={"0": size}, **more
    )


def planted(world_size, late, part="data", delay_s=50 * MS, steps=5, transfer_s=3 * MS, noise=0.0, late_in=None):
    """Return the records of ranks of which `late` spends `delay_s` more of each step in a part of it."""
    rng = random.Random(world_size)
    jitter = [[rng.uniform(0, noise) for _ in range(world_size)] for _ in range(steps)]

    def work(rank, number):
        is_late = rank == (late if late_in is None else late_in(number))
        parts = {"data": 1 * MS, "other": 0.0, "forward": 2 * MS + jitter[number][rank], "backward": 4 * MS}
        parts[part] += delay_s if is_late else 0.0
        return parts

    def step_of(rank, number):
        full_s = max(sum(work(other, number).values()) for other in range(world_size))
        ends, at = {}, 0.0
        for name, length in work(rank, number).items():
            ends[name] = (at, at + length)
            at += length
        end_s = full_s + transfer_s
        return {
            "phases": [
                ("data", *ends["data"]),
                ("forward", *ends["forward"]),
                ("backward", ends["backward"][0], end_s),
                ("optimizer", end_s, end_s + MS),
            ],
            "busy": [ends["forward"], ends["backward"]],
            "calls": [("all_reduce", at, end_s)],
            "length": end_s + MS,
        }

    return [record_of(rank, steps, step_of, world_size=world_size) for rank in range(world_size)]


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


# Who came last


def test_calls_under_way_at_the_same_time_count_once_and_computing_is_not_waiting():
    """Two buckets, as DDP sends them: rank 0 computes on for 10 ms after the first; rank 1 is 50 ms late to both."""

    def step_of(rank, number):
        more = 50 * MS * rank
        return {
            "phases": [("backward", more, 73 * MS)],
            "busy": [(more, more + 20 * MS)],
            "calls": [("all_reduce", more + 10 * MS, 62 * MS), ("all_reduce", more + 20 * MS, 73 * MS)],
            "length": 74 * MS,
        }

    seconds = times([record_of(rank, 5, step_of) for rank in range(2)])[0].seconds
    assert seconds["waiting"] == pytest.approx(50 * MS)
    assert seconds["transfer"] == pytest.approx(3 * MS)
    assert sum(seconds.values()) == pytest.approx(74 * MS)


def test_ranks_whose_calls_nobody_numbered_meet_by_their_order_if_that_is_the_same():
    ranks = planted(2, late=1)
    bare = [r._replace(calls=tuple(call._replace(key=None) for call in r.calls)) for r in ranks]
    assert times(bare)[0].seconds["waiting"] == pytest.approx(50 * MS)
    other = bare[1]._replace(calls=(bare[1].calls[0]._replace(kind="barrier"), *bare[1].calls[1:]))
    assert meetings([bare[0], other]) == [], "nobody knows what met what"


def test_a_group_of_which_a_member_tells_nothing_is_left_out():
    assert meetings(planted(3, late=1)[:2]) == []


def test_clocks_of_machines_are_set_by_the_ends_of_all_reduces_and_unknown_ones_meet_nobody():
    ranks = planted(2, late=1)
    there = ranks[1].moved(-7.0)._replace(machine="there")
    found = times([ranks[0], there])
    assert found[0].seconds["waiting"] == pytest.approx(50 * MS)
    assert found[1].record.steps[0][0] == pytest.approx(ranks[1].steps[0][0])
    calls = tuple(call._replace(kind="broadcast") for call in ranks[1].calls)
    unknown = times([ranks[0]._replace(calls=calls), there._replace(calls=calls)])
    assert [time.met for time in unknown] == [{}, {}]


def test_who_receives_waits_and_who_sends_does_not():
    calls = (Call("recv", None, 1.0, 2.0, 8), Call("send", None, 2.0, 2.5, 8))
    (time,) = times([StepRecord(0, 2, steps=((0.0, 3.0),), calls=calls)])
    assert (time.waiting, time.transfer) == ([(1.0, 2.0)], [(2.0, 2.5)])


# Bytes


@pytest.mark.parametrize(
    ("kind", "ranks", "share"),
    [
        ("all_reduce", 2, 1),
        ("all_reduce", 4, 1.5),
        ("allreduce_coalesced", 4, 1.5),
        ("reduce_scatter", 4, 0.75),
        ("all_gather", 4, 3),
        ("allgather_into_tensor_coalesced", 4, 3),
        ("broadcast", 4, 0.75),
        ("scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("send", 4, 1),
        ("recv", 4, 0),
        ("barrier", 4, 0),
        ("all_reduce", 1, 0),
    ],
)
def test_bytes_by_the_formula(kind, ranks, share):
    assert expected_bytes(kind, 400, ranks) == 400 * share


def test_the_bytes_of_a_call_go_by_the_size_of_its_group():
    calls = tuple(Call("all_reduce", (group, 1), 0, 1, 400) for group in ("pair", "all"))
    record = StepRecord(0, 4, steps=((0, 1), (1, 2)), calls=calls, groups={"pair": 2, "all": 4})
    assert record.sent() == (400 + 600) / 2


def test_what_other_programs_used_is_the_machines_time_without_the_ranks():
    ranks = [StepRecord(rank, 2, load=(10, 2.0, 3.5, 1.0)) for rank in range(2)]
    assert others_cores(ranks) == pytest.approx(0.75)


# The profiler's record


def test_what_only_contains_others_or_may_wait_is_not_computing():
    def event(name, a, b, scope=0):
        return Event(name, a, b, 7, scope=scope)

    found = computing_of(
        [
            event("DistributedDataParallel.forward", 0, 10, profiler.USER_SCOPE),
            event("aten::linear", 1, 4),
            event("aten::mm", 2, 3),
            event("autograd::engine::evaluate_function: ToTheOthersBackward", 11, 20),
            event("ToTheOthersBackward", 12, 19),  # a Function that all-reduces, and waits, in its backward
            event("aten::mul", 13, 14),
            event("c10d::allreduce_", 15, 16),
        ]
    )
    assert [e.name for e in found] == ["aten::linear", "aten::mm", "aten::mul"]


def entry_of(name, number, size, at_s):
    entry = {"process_group": ["3", ""], "collective_seq_id": number, "time_created_ns": at_s * 1e9, "is_p2p": False}
    return {**entry, "profiling_name": name, "input_sizes": [[size]]}


def test_a_collective_is_entered_when_it_was_called_and_known_by_group_and_number():
    events = [
        Event("gloo:all_reduce", 10.2, 10.5, shapes=((8,),), size=64),
        Event("gloo:all_reduce", 10.3, 10.4, shapes=((2,),), size=16),
        Event("c10d::send", 10.9, 11.1),
        Event("gloo:send", 11, 11.1, shapes=((1,),), size=8),
        Event("gloo:recvAnySource", 12, 13),
    ]
    recorded = [entry_of("gloo:all_reduce", 41, 2, 9.9), entry_of("gloo:all_reduce", 42, 8, 10.0)]
    first, second, sent, received = calls_of(events, recorded)
    assert first == Call("all_reduce", ("3", 41), 9.9, 10.4, 16), "by its size: gloo's threads change the order"
    assert second == Call("all_reduce", ("3", 42), 10.0, 10.5, 64)
    assert sent == Call("send", None, 10.9, 11.1, 8), "and not from when all had been handed over"
    assert received.kind == "recv"


def test_a_call_of_nccl_lasts_as_long_as_its_kernel():
    events = [
        Event("nccl:all_reduce", 1.0, 1.1, shapes=((8,),), size=32),
        Event("nccl:all_reduce", 1.5, 1.9, on_device=True),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 1.5, 1.9, 20, on_device=True),
        Event("ampere_sgemm", 1.2, 1.4, 7, on_device=True),
        Event("aten::mm", 0.9, 1.0, 1),
    ]
    assert calls_of(events, []) == [Call("all_reduce", None, 1.5, 1.9, 32)]
    assert profiler.busy(events) == [(1.2, 1.4)], "kernels, and not what launches them"
    host, *kernels = calls_of([*events, events[2]], [])
    assert (host.size, host.end_s - host.start_s) == (32, 0.0), "bytes are the call's"
    assert [(k.kind, k.size) for k in kernels] == [("all_reduce", 0)] * 2, "times the kernels'"


def test_files_of_ranks_are_merged_with_a_process_each_on_one_clock():
    def file(base_ns):
        events = [
            {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 10.0, "dur": 2.0},
            {"ph": "s", "name": "fwdbwd", "id": 3, "pid": 77, "tid": 77, "ts": 11.0},
            {"ph": "X", "name": "gloo:all_reduce", "pid": 77, "tid": 78, "ts": 12.0, "dur": 5.0},
        ]
        return gzip.compress(json.dumps({"traceEvents": events, "baseTimeNanoseconds": base_ns}).encode())

    found = merge({0: file(5_000), 1: file(8_000)})
    events = found["traceEvents"]
    assert found["baseTimeNanoseconds"] == 5_000
    assert [e["args"] for e in events if e["name"] == "process_name"] == [{"name": "rank 0"}, {"name": "rank 1"}]
    assert [(e["pid"], e["ts"]) for e in events if e["name"] == "aten::mm"] == [(0, 10.0), (1, 13.0)]
    assert {e["id"] for e in events if e["name"] == "fwdbwd"} == {"0.3", "1.3"}
    travels = [(e["ph"], e["ts"]) for e in events if e["name"] == "gloo:all_reduce" and e["pid"] == 1]
    assert sorted(travels) == [("b", 15.0), ("e", 20.0)]
    assert len({(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}) == 2
