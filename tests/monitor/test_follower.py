"""How a run is followed: its deadlines, and errors that are no rank's. No process is started."""

from __future__ import annotations

import pickle
import re
import threading
import time
from array import array

import pytest

from labkit import run as monitor_run
from labkit.launchers import job_events
from labkit.monitor import active_runs as going_runs
from labkit.monitor import asking as question
from labkit.protocol import events
from labkit.rank.report_collectives import KIND
from labkit.run import Run, WorkerFailed
from tests.conftest import LONG_S, wait_until
from tests.support.fake_engine import FakeEngine, a_job


def going(engine, **options):
    """A run whose ranks have begun."""
    run = Run(engine, engine.world_size, "train", **options)
    for rank in range(engine.world_size):
        engine.arrived.put(events.Started(rank))
    run.start(a_job())
    wait_until(lambda: run.states == ["running"] * engine.world_size, LONG_S)
    return run


def logged(rank, step=0):
    return events.Log(rank, ("loss",), array("q", [step]), array("d", [0.1]), array("d", [1.0]))


def test_an_error_of_labkits_own_is_the_runs_error_and_what_had_come_is_kept():
    engine = FakeEngine()
    run = going(engine)
    engine.arrived.put(logged(0))
    engine.arrived.put(OSError(28, "No space left on device"))
    with pytest.raises(WorkerFailed) as failure:
        run.wait(LONG_S)
    assert (run.status, failure.value.rank) == ("failed", None)
    assert str(failure.value).startswith("labkit lost track of the ranks: OSError: [Errno 28] No space left on device")
    assert "The ranks were ended, because nobody follows them any more" in failure.value.cause
    assert "poll" in failure.value.cause, "with the lines that raised it"
    assert engine.calls[-2:] == ["kill", "close"]
    assert run.recorded.progress(0).last_step == 0


def test_ranks_that_go_on_without_the_notebook_are_left_alone_and_can_be_found_again():
    engine = FakeEngine()
    engine.outlives_notebook, engine.folder = True, "/runs/5"
    run = going(engine)
    engine.arrived.put(PermissionError("node-0.out"))
    with pytest.raises(WorkerFailed, match="PermissionError: node-0.out") as failure:
        run.wait(LONG_S)
    assert "labkit.attach('/runs/5') follows them again" in failure.value.cause
    assert "kill" not in engine.calls


STACK = 'Current thread 0x01 (most recent call first):\n  File "/tmp/cell.py", line {line} in <module>\n'


def test_ranks_that_went_on_after_they_were_asked_where_they_stand_are_asked_anew():
    """The answer to the first question is of a place that they have left since."""
    engine = FakeEngine()
    run = going(engine, stall_s=0.3)
    run._state.progress_s = time.monotonic()
    wait_until(lambda: "ask_for_stacks" in engine.calls, LONG_S)
    engine.arrived.put(events.Stack(0, STACK.format(line=1)))
    for rank in range(2):
        engine.arrived.put(logged(rank))
    wait_until(lambda: engine.calls.count("ask_for_stacks") == 2, LONG_S)
    for rank in range(2):
        engine.arrived.put(events.Stack(rank, STACK.format(line=7)))
    with pytest.raises(WorkerFailed) as failure:
        run.wait(LONG_S)
    assert "line 7" in str(failure.value)
    assert "line 1" not in str(failure.value)


def answers(rank, line=7):
    """What a rank says that is asked where it stands: first the signal's handler, then a thread that needs the lock."""
    return [events.Stack(rank, STACK.format(line=line)), events.Answered(rank)]


def give_up(asking):
    """Have the time be up that ranks have for their answers."""
    asking._asked_s -= 10 * LONG_S
    asking._answered_s -= 10 * LONG_S


def answered(run, events):
    """Bring events, and wait until the follower has taken them."""
    taken, take = threading.Event(), run._follower.take

    def and_say_so(event):
        take(event)
        if event is events[-1]:
            taken.set()

    run._follower.take = and_say_so
    for event in events:
        run.engine.arrived.put(event)
    assert taken.wait(LONG_S)
    run._follower.take = take


SLOW = {
    "a stack comes in pieces": (
        [*answers(0), answers(1)[1], events.Stack(1, STACK.format(line=7)[:60])],
        [events.Stack(1, STACK.format(line=7)[60:])],
    ),
    "one says nothing at all, and will not": (answers(0), []),
}
"""What comes soon, and what is waited for; nothing more: the time is up."""


@pytest.mark.parametrize("how", SLOW)
def test_an_answer_is_waited_for_until_it_comes_or_is_known_not_to(how):
    soon, late = SLOW[how]
    engine = FakeEngine()
    engine.stacks_s = LONG_S
    asking = question.Asking()
    run = going(engine, observers=[asking])
    asking.ask()
    assert not asking.have_come()
    answered(run, soon)
    assert not asking.have_come(), "however long this takes"
    if late:
        answered(run, late)
    else:
        give_up(asking)
    assert asking.have_come()
    says = ["did not answer" if how.endswith("and will not") else "is at cell.py, line 7"]
    assert [stack.in_words for stack in asking.stacks()] == ["is at cell.py, line 7", *says]
    assert engine.calls.count("ask_for_stacks") == 1
    run.stop(0)


def waiting(rank, *calls, done=False, line=7, is_last=False):
    """What a rank says that waits in the last of its calls or, `done`, does something else."""
    told = tuple(("0", n, kind, ((1,),), "float32", done or n < len(calls)) for n, kind in enumerate(calls, 1))
    group = ("0", "default_pg", (0, 1))
    said = events.Attached(rank, KIND, pickle.dumps((rank, told, (group,), None, "", is_last)))
    return [events.Stack(rank, STACK.format(line=line)), said, events.Answered(rank)]


def test_a_rank_that_is_ended_after_another_has_failed_is_said_to_be_where_it_said_it_was(monkeypatch):
    monkeypatch.setattr(question, "FAILED_S", 0.01)
    engine = FakeEngine()
    engine.failure_grace_s = 0.5
    run = going(engine)
    at = (("/tmp/cell.py", 3, "<module>"),)
    engine.arrived.put(events.Failure(0, 1.0, "running", "RuntimeError: op.preamble.length <= op.nbytes", "trace", at))
    wait_until(lambda: "ask_for_stacks" in engine.calls, LONG_S)
    for event in waiting(0, "all_reduce")[1:2] + waiting(1, "barrier"):
        engine.arrived.put(event)
    with pytest.raises(WorkerFailed) as failure:
        run.wait(LONG_S)
    assert run.states == ["failed", "ended"]
    assert "rank 0 is in all_reduce #1 (float32 [1]) at cell.py, line 3" in failure.value.diagnosis.headline
    assert "rank 1 is in barrier #1 (float32 [1]) at cell.py, line 7" in failure.value.diagnosis.headline


AGAIN = {
    "is in a loop, at another line now": ([("all_reduce",), ("all_reduce", "all_reduce")], 1, True),
    "has come since": ([("all_reduce", "all_reduce"), ("all_reduce", "all_reduce")], 1, False),
}
"""What ranks have called when they are asked again, the line at which rank 0 stands, and whether it is still missed."""


@pytest.mark.parametrize("what", AGAIN)
def test_ranks_have_missed_each_other_if_the_second_answer_tells_of_the_same_call_wherever_they_stand(what):
    calls, line, missed = AGAIN[what]
    engine = FakeEngine()
    engine.stacks_s = LONG_S
    run = going(engine)
    run._asking.ask()
    answered(run, waiting(0, "all_reduce", done=True) + waiting(1, "all_reduce", "all_reduce"))
    assert not run._asking.have_come()
    answered(run, waiting(0, *calls[0], done=missed, line=line) + waiting(1, *calls[1]))
    if not missed:
        assert not run._asking.have_come(), "they may all wait for the network: once more"
        answered(run, waiting(0, *calls[0], done=True) + waiting(1, *calls[1], done=True))
    assert run._asking.have_come()
    text = run._asking.stacks().missed
    if missed:
        assert text.startswith("rank 0 has not entered all_reduce #2 (float32 [1]); rank 1 waits in it at ")
        assert text.endswith(f"rank 0 is at cell.py, line {line} (last entered: all_reduce #1)")
    else:
        assert text == "", "it went on"
    run.stop(0)


@pytest.mark.parametrize("is_last", [False, True])
def test_what_ranks_said_before_they_were_asked_anew_counts_if_it_was_their_last(is_last):
    asking = question.Asking()
    run = going(FakeEngine(), observers=[asking])
    answered(run, waiting(0, "all_reduce", is_last=is_last))
    assert asking.last_said(0).calls[-1][2] == "all_reduce"
    asking.ask()
    assert (asking.last_said(0) is not None) == is_last
    run.stop(0)


IN_TORCH = '  File "/lib/site-packages/torch/distributed/distributed_c10d.py", line 3 in all_reduce\n'


@pytest.mark.parametrize(("deeper", "may"), [(IN_TORCH, True), ("", False)])
def test_who_is_at_work_may_wait_for_a_rank_that_has_no_part(deeper, may):
    """It has died, say, and not every transport tells those who wait for it."""
    head, frame = STACK.splitlines(keepends=True)
    said = [events.Stack(0, head + deeper + frame.format(line=7)), *waiting(0, "all_reduce")[1:]]
    engine = FakeEngine()
    engine.stacks_s = LONG_S
    run = going(engine)
    ask = engine.ask_for_stacks
    engine.ask_for_stacks = lambda: [*map(engine.arrived.put, said)] and ask()
    answered(run, [job_events.Absent(1)])
    assert run.all_may_wait_for(1) == may
    run.stop(0)


def test_a_failure_that_comes_while_silent_ranks_are_asked_is_why_the_run_has_failed():
    engine = FakeEngine()
    engine.failure_grace_s = engine.stacks_s = LONG_S
    run = going(engine, stall_s=0.3)
    wait_until(lambda: "ask_for_stacks" in engine.calls, LONG_S)
    engine.arrived.put(events.Failure(0, 0.5, "running", "ValueError: bad batch", "its traceback"))
    for event in [answers(0)[0], *answers(1), events.Exit(0, 1)]:
        engine.arrived.put(event)
    engine.arrived.put(events.Failure(1, 0.6, "running", "RuntimeError: Connection closed by peer", "another"))
    engine.arrived.put(events.Exit(1, 1))
    with pytest.raises(WorkerFailed, match="rank 0 failed: ValueError: bad batch"):
        run.wait(LONG_S)


def test_a_rank_that_fails_as_a_hang_is_ended_changes_nothing_of_the_report():
    """On a cluster one rank is gone before the other, which then loses its connection; who is to end them ends both."""
    engine = FakeEngine(immortal=True)
    engine.failure_grace_s = float("inf")
    run = going(engine, stall_s=0.3)
    wait_until(lambda: "ask_for_stacks" in engine.calls, LONG_S)
    for event in answers(0, 1) + answers(1, 7):
        engine.arrived.put(event)
    wait_until(lambda: "kill" in engine.calls, LONG_S)
    engine._killed = {1}
    engine.arrived.put(events.Exit(1, -9))
    engine.arrived.put(events.Failure(0, 0.6, "running", "RuntimeError: Connection closed by peer", "its traceback"))
    wait_until(lambda: engine.calls.count("kill") == 2, LONG_S)
    engine._killed = {0, 1}
    engine.arrived.put(events.Exit(0, -9))
    with pytest.raises(WorkerFailed, match=re.escape("for 0.3 s (stall_s): rank 0 is at cell.py, line 1")):
        run.wait(LONG_S)


def test_what_was_started_is_ended_if_nobody_came_to_follow_it(monkeypatch):
    engine = FakeEngine()
    run = Run(engine, 2, "train")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run._follower, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.start(a_job())
    assert engine.calls == ["start", "kill", "close"]
    assert run not in going_runs.active_runs


def test_a_stop_that_nobody_answers_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(monitor_run, "END_S", 0.2)
    engine = FakeEngine(immortal=True)
    run = going(engine)
    engine.arrived.put(job_events.Notice(-1, "SLURM job 5: squeue does not answer"))
    wait_until(lambda: run.notice, LONG_S)
    with pytest.raises(TimeoutError, match=r"not known to be gone \(SLURM job 5: squeue does not answer\)"):
        run.stop(0)
    assert run.status == "running", "and followed on"
    for rank in range(2):
        engine.arrived.put(events.Exit(rank, -9))
    assert run.stop().status == "stopped"
