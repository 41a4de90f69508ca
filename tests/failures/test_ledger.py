"""The rank that waits is never blamed: from facts written by hand, then with real ranks over each transport."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import labkit
from labkit.failures.evidence import is_only_evidence, limit_s
from labkit.failures.facts import RankFacts
from labkit.failures.first_to_fail import diagnose
from labkit.failures.ledger import stuck
from labkit.failures.missed import SILENT, RankCalls
from labkit.failures.stacks import Frame, RankStack
from labkit.monitor.asking import Asking
from labkit.protocol.events import Answered, Attached, Failure, Stack, Started
from labkit.rank.recorder import NO_GROUP, RETURNED, Collectives
from tests.support import transports
from tests.support.hangs import is_recorded

TIMED_OUT = "RuntimeError: [/gloo/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
CLOSED = "RuntimeError: [/gloo/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:26010"
ALL = ("1", "undefined", (0, 1, 2))
WORLD, PAIR, SAME_PAIR = ("0", "default_pg", (0, 1, 2)), ("1", "undefined", (0, 1)), ("2", "undefined", (0, 1))


def failed(rank, summary=CLOSED, time_s=4.0, **facts):
    return RankFacts(rank, failure=Failure(rank, time_s, "running", summary, "Traceback"), exit_code=1, **facts)


def aborted(rank, number=2, group="0", description="default_pg", kind="ALLREDUCE"):
    said = transports.ABORTED.format(
        rank=rank, number=number, kind=kind, limit_ms=600_000, group=group, description=description
    )
    return RankFacts(rank, exit_code=-signal.SIGABRT, exit_s=600.0, output_end=said)


def running(rank, doing=None):
    stack = RankStack(rank, [Frame("/home/me/train.py", 9, "train")], {}) if doing else None
    return RankFacts(rank, stack=stack, ended_by_us=True, exit_code=-9)


def returned(rank, returned_s=1.0):
    return RankFacts(rank, returned=True, returned_s=returned_s, exit_code=0)


def left(rank, **facts):
    return RankFacts(rank, left="destroy_process_group at train.py, line 5", **facts)


def call(number, kind="barrier", done=True, group="0", began_s=0.0):
    return (group, number, kind, () if kind == "barrier" else ((4,),), "float32", done, began_s)


def said(rank, *calls, groups=(WORLD, PAIR), is_blocked=False, doing="waits in barrier at train.py, line 12", **rest):
    collectives = Collectives(rank, calls, groups, **rest)
    return RankCalls(rank, collectives, "train.py, line 12", doing, is_blocked)


def knowing(ranks, calls):
    """What is known of ranks, with the calls of those that have said them."""
    by_rank = {own.rank: own for own in calls}
    return [replace(rank, called=by_rank.get(rank.rank)) for rank in ranks]


# A failure that only says that somebody was not there

FAILED = {
    "a time limit passes in the others' barrier": (
        [running(0, "computes"), failed(1, TIMED_OUT), failed(2, TIMED_OUT)],
        [said(0, call(1)), said(1, call(1), call(2)), said(2, call(1), call(2))],
        0,
        r"rank 0 did not come to barrier #2 within 3 s, where rank 1 waited at train.py, line 12; rank 0 is .*",
    ),
    "it came, but too late": (
        [failed(0, CLOSED, 7.1), failed(1, TIMED_OUT), failed(2, TIMED_OUT)],
        [
            said(0, call(1), call(2, began_s=107.0)),
            said(1, call(1), call(2, began_s=101.0)),
            said(2, call(1), call(2, began_s=101.0)),
        ],
        0,
        r"rank 0 did not come to barrier #2 within 3 s, where rank 1 waited at .*; rank 0 came 6\.0 s after it",
    ),
    "a rank has left its group": (
        [left(0, ended_by_us=True, exit_code=-9), failed(1), failed(2)],
        [said(0, call(1)), said(1, call(1), call(2)), said(2, call(1), call(2))],
        0,
        r"rank 0 left the process group \(destroy_process_group at train.py, line 5\) while rank 1 was still in "
        r"barrier #2 with it: .*",
    ),
    "a rank has left after the call, which a third has missed": (
        [left(0, ended_by_us=True, exit_code=-9), failed(1, TIMED_OUT), running(2, "computes")],
        [said(0, call(1), call(2)), said(1, call(1), call(2)), said(2, call(1))],
        2,
        r"rank 2 did not come to barrier #2 within 3 s, .*",
    ),
    "ranks outside the subgroup have returned": (
        [returned(0), failed(1), returned(2)],
        [said(0), said(1, call(1, "all_reduce", group="1")), said(2)],
        0,
        r"rank 0 returned while rank 1 was still in all_reduce #1 \(float32 \[4\], group of ranks 0 and 1\) with it.*",
    ),
    "NCCL's watchdog aborts the ranks that waited for one that computes": (
        [running(0, "computes"), aborted(1), aborted(2)],
        [said(0, call(1, "all_reduce"))],
        0,
        r"rank 0 did not come to ALLREDUCE #2 within 600 s, where rank 1 waited; rank 0 is .*",
    ),
    "NCCL's watchdog, in a subgroup whose other member its launcher ended before it could say that it is one": (
        [returned(0), aborted(1, 7, "2", "undefined"), running(2)],
        [said(0, groups=(WORLD,), unknown=RETURNED)],
        2,
        r"rank 2 did not come to ALLREDUCE #7 \(group of ranks 1 and 2\) within 600 s, where rank 1 waited",
    ),
    "NCCL's watchdog, in a receive: one rank has done its part and returned, one computes": (
        [returned(0), aborted(1, 3, "1", "undefined", "RECV"), running(2, "computes")],
        [said(0, groups=(WORLD, ALL)), said(2, groups=(WORLD, ALL))],
        2,
        r"rank 2 did not come to RECV #3 \(group of ranks 0, 1 and 2\) within 600 s, where rank 1 waited; rank 2 is .*",
    ),
    "a rank that sends nothing": (
        [running(0, "computes"), failed(1, TIMED_OUT), running(2)],
        [said(0), said(1, transfer=("recv", 0, (4,), "float32")), said(2)],
        0,
        r"rank 0 did not come to recv \(float32 \[4\], from rank 0\) within 3 s, where rank 1 waited at .*",
    ),
    "one that was waited for waited for a third itself": (
        [failed(0, TIMED_OUT, 4.1), failed(1, TIMED_OUT, 4.0), running(2, "computes")],
        [said(0, call(1), transfer=("recv", 2, (4,), "float32")), said(1, call(1), call(2)), said(2, call(1))],
        2,
        r"rank 2 did not come to barrier #2 within 3 s, .*",
    ),
    "two groups of the same ranks in opposite orders": (
        [failed(0, TIMED_OUT, 4.1), failed(1, TIMED_OUT, 4.0)],
        [
            said(0, call(1, group="1"), groups=(WORLD, PAIR, SAME_PAIR)),
            said(1, call(1, group="2"), groups=(WORLD, PAIR, SAME_PAIR)),
        ],
        1,
        r"rank 1 has not entered barrier #1 \(group of ranks 0 and 1\); rank 0 waits in it at train.py, line 12; .*; "
        r"and rank 0 has not entered barrier #1 \(group of ranks 0 and 1\); rank 1 waits in it at train.py, line 12; .*"
        r"use groups in the same order on every rank",
    ),
    "all of the group were there: the network has failed, and who has returned is in another group": (
        [failed(0, CLOSED, 4.1), failed(1, CLOSED, 4.0), returned(2)],
        [said(0, call(2, group="1")), said(1, call(2, group="1")), said(2)],
        1,
        r"rank 1 failed: RuntimeError: Connection closed by peer .*",
    ),
}


@pytest.mark.parametrize(("ranks", "calls", "blamed", "headline"), FAILED.values(), ids=FAILED)
def test_the_rank_that_was_not_there_is_blamed(ranks, calls, blamed, headline):
    found = diagnose(knowing(ranks, calls))
    assert re.fullmatch(headline, found.headline), found.headline
    assert found.rank == blamed


@pytest.mark.parametrize(
    ("rank", "seconds"),
    [
        (failed(1, TIMED_OUT), 3.0),
        (failed(1, "torch.distributed.DistStoreError: wait timeout after 1500ms, keys: /a"), 1.5),
        (
            failed(1, "torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients. 1/2 joined."),
            11.0,
        ),
        (failed(1, "RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 500 ms"), 0.5),
        (aborted(1), 600.0),
        (failed(1, CLOSED), None),
    ],
)
def test_errors_that_name_another_rank_are_evidence_with_the_limit_that_passed(rank, seconds):
    assert is_only_evidence(rank)
    assert limit_s(rank) == seconds


@pytest.mark.parametrize(
    "rank",
    [
        failed(1, "ValueError: bad batch"),
        failed(1, "TimeoutError: timed out"),
        RankFacts(1, exit_code=-signal.SIGABRT, output_end="terminate called"),
        RankFacts(1, exit_code=-signal.SIGKILL, output_end=transports.ABORTED),
        returned(1),
    ],
)
def test_other_errors_are_no_evidence_about_others(rank):
    assert not is_only_evidence(rank)


# A run that goes on


def of_size(number, *shape):
    return ("0", number, "all_reduce", (shape,), "float32", True, 0.0)


@pytest.mark.parametrize(
    ("others", "headline"),
    [
        (
            of_size(2, 3),
            "ranks met in all_reduce with tensors of different sizes or types, call #2 of the default group: "
            "rank 0 is in all_reduce #2 (float32 [3]) at train.py, line 12; "
            "rank 1 is in all_reduce #2 (float32 [4]) at train.py, line 12",
        ),
        (of_size(2, 4), "rank 1 failed: RuntimeError: Connection closed by peer [127.0.0.1]:26010"),
    ],
)
def test_a_rank_that_lost_one_whose_tensor_was_smaller_is_told_so(others, headline):
    """gloo tells the other alone, which has what it needs, and returns."""
    calls = [said(0, call(1), others), said(1, call(1), of_size(2, 4))]
    found = diagnose(knowing([returned(0), failed(1)], calls))
    assert (found.rank, found.headline) == (1, headline)


def waiting(rank, *calls, **rest):
    return said(rank, *calls, is_blocked=True, **rest)


def alive(rank):
    return RankFacts(rank)


STUCK = {
    "one has returned": (
        [returned(0), alive(1), alive(2)],
        [said(0, call(1)), waiting(1, call(1), call(2, done=False)), waiting(2, call(1), call(2, done=False))],
        r"rank 0 returned while ranks 1 and 2 were still in barrier #2 with it: .*",
    ),
    "one has left": (
        [left(0), alive(1), alive(2)],
        [said(0, call(1)), waiting(1, call(1), call(2, done=False)), said(2, call(1))],
        r"rank 0 left the process group \(.*\) while rank 1 was still in barrier #2 with it: .*",
    ),
}


@pytest.mark.parametrize(("ranks", "calls", "headline"), STUCK.values(), ids=STUCK)
def test_ranks_that_wait_for_one_that_has_gone_are_seen_to(ranks, calls, headline):
    found = stuck(knowing(ranks, calls))
    assert re.fullmatch(headline, found.headline), found.headline
    assert (found.rank, found.page) == (0, "returned_early")


HEALTHY = {
    "it computes": ([returned(0), alive(1)], [said(0, call(1)), said(1, call(2, done=False))]),
    "who has returned had come to the call": (
        [returned(0), alive(1), alive(2)],
        [said(0, call(2)), waiting(1, call(2, done=False)), said(2, call(1))],
    ),
    "who has returned is in another group": (
        [alive(0), alive(1), returned(2)],
        [said(0), waiting(1, call(1, done=False, group="1")), said(2)],
    ),
    "who has returned has not said what it had called": (
        [returned(0), alive(1), alive(2)],
        [RankCalls(0, Collectives(0, unknown=SILENT)), waiting(1, call(1), call(2, done=False)), said(2, call(1))],
    ),
    "who waits has left itself, for a disk": ([returned(0), left(1)], [said(0), waiting(1, call(2, done=False))]),
}


@pytest.mark.parametrize(("ranks", "calls"), HEALTHY.values(), ids=HEALTHY)
def test_a_rank_that_may_go_on_is_left_alone(ranks, calls):
    assert stuck(knowing(ranks, calls)) is None


# With real ranks


@pytest.mark.spawns
@pytest.mark.skipif(not is_recorded(), reason="only PyTorch 2.15 or newer records calls of gloo")
def test_in_a_cell_too_a_rank_that_has_returned_early_is_named(monkeypatch):
    shown = []

    def interrupt(*words, **_):
        shown.extend(words)
        raise KeyboardInterrupt

    with labkit.Session(3) as ranks:
        ranks.run("dist.barrier()")
        monkeypatch.setattr("builtins.print", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ranks.run("dist.barrier()\nif rank != 0:\n    dist.barrier()")
    assert shown[0] == (
        "rank 0 returned while ranks 1 and 2 were still in barrier #3 with it: every rank must take part in the same "
        "collectives"
    )


# What ranks answer, and when


def says(collectives):
    return Attached(collectives.rank, "collectives", pickle.dumps(tuple(collectives)))


@pytest.mark.parametrize(
    "later",
    [Collectives(1, unknown=NO_GROUP), Collectives(1, (call(2),), (WORLD,))],
    ids=["it has left its group", "it is in no call any more"],
)
def test_what_a_rank_said_as_it_failed_stands_though_its_process_is_asked_later(later):
    asking = asked_of(2)
    as_it_failed = Collectives(1, (call(2),), (WORLD,), transfer=("recv", 0, (4,), "float32"), is_last=True)
    asking.take(says(as_it_failed))
    asking.take(Failure(1, 1.0, "running", TIMED_OUT, ""))
    asking.take(says(later))
    asking.ask()
    assert asking.last_said(1) == as_it_failed
    asking.take(Started(1, "cpu", ""))  # once more, in another attempt
    asking.take(says(later))
    assert asking.last_said(1) == later


def test_what_a_rank_said_as_it_returned_stands_though_its_process_has_left_the_group():
    asking, as_it_returned = asked_of(2), Collectives(1, (call(2),), (WORLD,))
    asking.run.states[1], asking.run.returned[1] = "finished", True
    for said_then in (Collectives(1, (call(1),), (WORLD,)), as_it_returned, Collectives(1, unknown=NO_GROUP)):
        asking.take(says(said_then))
    assert asking.last_said(1) == as_it_returned


def asked_of(count):
    """A question to so many ranks that run, whose answers come as the test says."""
    asking = Asking()
    asking.run = SimpleNamespace(
        states=["running"] * count,
        returned=[False] * count,
        pids=[os.getpid()] * count,
        devices=["cpu"] * count,
        cells={},
        over=threading.Event(),
        engine=SimpleNamespace(ask_for_stacks=lambda: list(range(count)), stacks_s=10.0),
    )
    asking.ask()
    return asking


def test_an_answer_that_is_on_its_way_when_the_ranks_are_asked_once_more_counts_whole():
    asking, said_then = asked_of(1), Collectives(0, (call(2),), (WORLD,))
    asking.take(says(said_then))
    asking.ask()
    assert asking.last_said(0) is None, "it may be old"
    asking.take(Answered(0))
    assert asking.last_said(0) == said_then


def test_a_rank_that_returns_once_it_was_asked_is_not_waited_for():
    asking = asked_of(2)
    asking.take(Stack(0, 'Stack (most recent call first):\n  File "/home/me/train.py", line 9 in <module>\n'))
    asking.take(Answered(0))
    assert not asking.have_come()
    asking.run.states[1] = "finished"
    assert asking.have_come()


@pytest.mark.parametrize(("later_s", "place"), [(0.1, "train.py, line 9"), (3600.0, "")])
def test_a_rank_that_was_ended_from_outside_is_where_it_wrote_as_it_ended(later_s, place, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    asking, ended = asked_of(1), running(0)
    asking.take(Stack(0, 'Stack (most recent call first):\n  File "/home/me/train.py", line 9 in <module>\n'))
    asking.ask()
    asking.take(Stack(0, "Stack (most recent call first):\n"))  # cut off
    now_s[0] += later_s
    asking.add_facts([ended])
    assert (ended.stack.place if ended.stack else "") == place, "it may have been anywhere since"
