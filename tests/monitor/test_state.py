"""What is known of a run: events in, state out."""

from __future__ import annotations

from array import array

import pytest

from labkit.failures.facts import Diagnosis
from labkit.launchers.job_events import Absent, JobEnded, Notice, Restarted
from labkit.monitor.state import RETURN_GRACE_S, RunState
from labkit.protocol.events import (
    Exit,
    Expect,
    Failure,
    Log,
    Memory,
    Output,
    Result,
    Stack,
    Started,
    Stopped,
)
from labkit.protocol.packing import pack_result

FAILURE = Failure(1, 1.0, "running", "ValueError: bad batch", "Traceback")


def log(rank, *steps):
    return Log(rank, ("loss",), array("q", steps), array("d", [0.1 * s for s in steps]), array("d", [1.0] * len(steps)))


def result(rank, value="well"):
    return Result(rank, pack_result(value))


def after(*events, world_size=2, now_s=10.0, stop_asked=False, ended_by_us=()):
    """The state after these events, which come all at once."""
    state = RunState(world_size, failure_grace_s=0.4, now_s=0.0)
    state.stop_asked = stop_asked
    for event in events:
        state.take(event, now_s, since_launch_s=3.0, ended_by_us=event.rank in ended_by_us)
    return state


@pytest.mark.parametrize(
    ("events", "phases"),
    {
        "nothing yet": ([], ["starting", "starting"]),
        "queued": ([Notice(-1, "waits", queued=True)], ["queued", "queued"]),
        "queued or not": (
            [Started(0), Started(1), Notice(-1, "squeue does not answer", queued=None)],
            ["running", "running"],
        ),
        "no longer queued": ([Notice(-1, "waits", queued=True), Notice(-1, "on node1")], ["starting", "starting"]),
        "one has begun": ([Started(0)], ["running", "starting"]),
        "one has returned": ([Started(0), Started(1), result(0)], ["finished", "running"]),
        "one was stopped": ([Started(0), Stopped(0)], ["stopped", "starting"]),
        "one has failed": ([Started(1), FAILURE], ["starting", "failed"]),
        "one has no part": ([Absent(1)], ["starting", "idle"]),
        "one died": ([Started(0), Exit(0, -9)], ["failed", "starting"]),
        "one ended well": ([Started(0), result(0), Exit(0, 0)], ["finished", "starting"]),
        "all begin again": ([Started(0), result(0), Restarted(-1, 1)], ["starting", "starting"]),
    }.values(),
)
def test_the_phase_of_each_rank_follows_from_what_came(events, phases):
    assert [rank.phase for rank in after(*events).ranks] == phases


def test_a_rank_that_the_run_ended_has_not_failed():
    state = after(Started(0), Started(1), Exit(0, -9), ended_by_us={0})
    assert (state.ranks[0].phase, state.has_failed, state.end_by_s) == ("ended", False, float("inf"))


def test_a_rank_that_failed_as_a_stopped_run_ended_it_has_ended_too():
    state = after(Started(0), Started(1), FAILURE, Exit(1, -9), stop_asked=True, ended_by_us={1})
    assert (state.ranks[1].phase, state.has_failed) == ("ended", False)
    state = after(Started(0), Started(1), FAILURE, Exit(1, -9), ended_by_us={1})
    assert (state.ranks[1].phase, state.has_failed) == ("failed", True), "of itself, before the run ended it"


def test_who_fails_as_silent_ranks_are_ended_was_not_to_blame():
    state = after(Started(0), Started(1))
    state.end_for(Diagnosis(0, "rank 0 stood apart", "", [], "hang"), now_s=11.0)
    for event in (FAILURE, Exit(0, -9), Exit(1, 1)):
        state.take(event, 11.0, since_launch_s=4.0)
    assert [rank.phase for rank in state.ranks] == ["failed", "ended"]


@pytest.mark.parametrize("failed", [FAILURE, Exit(1, 3)])
def test_after_the_first_failure_the_others_have_a_moment_to_report(failed):
    state = after(Started(0), Started(1), failed)
    assert state.has_failed
    assert state.end_by_s == pytest.approx(10.4)


def test_who_fails_after_the_run_was_asked_to_stop_is_no_failure_of_the_run():
    state = after(Started(1), FAILURE, stop_asked=True)
    assert (state.ranks[1].phase, state.has_failed) == ("failed", False)


def test_once_all_have_returned_their_processes_have_a_while_to_end():
    assert after(result(0)).end_by_s == float("inf")
    state = after(result(0), result(1, [1, 2]))
    assert state.end_by_s == 10.0 + RETURN_GRACE_S
    assert [rank.result for rank in state.ranks] == ["well", [1, 2]]


def test_ranks_that_begin_again_keep_what_they_logged_until_they_log_an_earlier_step():
    state = after(log(0, 0, 1, 2), log(1, 0, 1), FAILURE, Restarted(-1, 1))
    assert (state.attempt, state.has_failed, state.ranks[1].failure) == (1, False, None)
    state.take(log(0, 1), 11.0, 4.0)
    frame = state.recorded.frame()
    assert frame[frame["rank"] == 0]["step"].tolist() == [0, 1]
    assert frame[frame["rank"] == 1]["step"].tolist() == [0, 1], "it has not come so far yet"


def test_a_run_is_over_when_every_rank_has_ended_or_has_no_part():
    assert not after(Exit(0, 0)).is_over
    assert after(Exit(0, 0), Absent(1)).is_over


@pytest.mark.parametrize("event", [log(0, 0), Started(0), result(0), Notice(-1, "on node1")])
def test_progress_is_noted_when_something_comes_of_a_rank(event):
    assert after(event).progress_s == 10.0


def test_what_a_rank_prints_is_a_sign_of_life_once_its_function_runs():
    """A script that prints its loss and never calls `worker.log` is no hang."""
    state = after(Started(0), Started(1))
    state.take(Output(1, "step 3\n"), 20.0, since_launch_s=12.0, ended_by_us=False)
    assert state.progress_s == 20.0
    assert [rank.printed_s for rank in state.ranks] == [0.0, 12.0]
    assert after(Output(0, "importing")).progress_s == 0.0, "a library may say again and again that it waits for others"


@pytest.mark.parametrize("event", [Output(0, "text"), Expect(0, 5), Memory(0, 1, 2), Stack(0, "text")])
def test_what_says_nothing_of_progress_is_none(event):
    assert after(event).progress_s == 0.0


def test_that_the_job_was_ended_is_kept_for_the_diagnosis():
    ended = after(JobEnded(-1, "the time limit", "Ask for more.", "slurm")).ended
    assert (ended.rank, ended.headline, ended.cause, ended.page) == (None, "the time limit", "Ask for more.", "slurm")
