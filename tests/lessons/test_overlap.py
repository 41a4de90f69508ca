"""The share of sending that overlaps with computing, from records that are known."""

from __future__ import annotations

import math

import pytest

from course.overlap import share_computing
from labkit.steps.record import Call, StepRecord
from labkit.trace.trace import Trace


def record(rank, calls, computes):
    """Return a record of one step, whose forward pass takes 10 s and whose backward pass takes 10 s."""
    numbered = tuple(Call(kind, ("0", i), a, b) for i, (kind, a, b) in enumerate(calls))
    phases = {"forward": [(0, 10)], "backward": [(10, 20)]}
    return StepRecord(rank, 2, steps=((0, 21),), phases=phases, busy=computes, calls=numbered, groups={"0": 2})


def test_sending_overlaps_as_far_as_the_rank_computes_meanwhile():
    calls = [("send", 0, 4), ("send", 10, 14)]
    trace = Trace([record(0, calls, [(1, 3), (10, 11), (15, 20)]), record(1, calls, [])])
    assert share_computing(trace, "send") == pytest.approx(3 / 16)
    assert share_computing(trace, "send", "forward") == pytest.approx(2 / 8)
    assert share_computing(trace, "send", "backward") == pytest.approx(1 / 8)
    assert math.isnan(share_computing(trace, "all_reduce"))


def test_waiting_for_the_last_rank_is_not_sending():
    """Rank 0 computes while it waits: that hides nothing of the transfer."""
    trace = Trace([record(0, [("all_reduce", 0, 8)], [(0, 6)]), record(1, [("all_reduce", 6, 8)], [(7, 8)])])
    assert share_computing(trace, "all_reduce") == pytest.approx(1 / 4)
