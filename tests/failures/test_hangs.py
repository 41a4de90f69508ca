"""Ranks that hang: what `stall_s` and `run.stacks()` say of them, and how soon they stop. With real ranks."""

from __future__ import annotations

import inspect
import re
import threading
import time

import pytest

import labkit
from tests.conftest import LONG_S, lives, wait_until
from tests.failures.messages import assert_as_kept, said_in
from tests.support import workloads
from tests.support.hangs import is_recorded
from tests.support.tiers import few

pytestmark = pytest.mark.spawns


def line_of(text):
    """The number of the one line of `workloads.py` that has some text in it."""
    lines = inspect.getsource(workloads).splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return number


OTHERS = f"ranks 0 and 2 wait in all_reduce at workloads.py, line {line_of('the others are here')}"
IN_IT = f"workloads.py, line {line_of('the others are here')}"
ASTRAY = {
    "sleeps": f"is in time.sleep at workloads.py, line {line_of('time.sleep(1e6)')}",
    "loops": rf"is at workloads.py, line ({line_of('while True:  # rank 1')}|{line_of('n += 1')})",
    "holds the lock": f"is in re.match at workloads.py, line {line_of('re.match')}",
    "waits elsewhere": f"waits in barrier at workloads.py, line {line_of('of rank 1 alone')}",
    "is suspended": "did not answer",
}


def missed(how):
    """What the report says of the collective that rank 1 has missed, as a regular expression."""
    if not is_recorded():
        return f"rank 1 {ASTRAY[how]}; {OTHERS}"
    if how == "waits elsewhere":
        line = line_of("of rank 1 alone")
        return (
            "ranks met in different collectives, call #2 of the default group: "
            rf"rank 1 is in barrier #2 at workloads.py, line {line}; "
            rf"ranks 0 and 2 are in all_reduce #2 \(float32 \[1\]\) at {IN_IT}"
        )
    if how in ("holds the lock", "is suspended"):  # and so cannot say which collectives it has called
        said = rf"ranks 0 and 2 are in all_reduce #2 \(float32 \[1\]\) at {IN_IT}"
        return f"{said}; rank 1 {ASTRAY[how]}"
    return (
        rf"rank 1 has not entered all_reduce #2 \(float32 \[1\]\); ranks 0 and 2 wait in it at {IN_IT}; "
        rf"rank 1 {ASTRAY[how]} \(last entered: all_reduce #1\)"
    )


def launched(function, *args, world_size=2, logged=None):
    """A run in the background whose ranks have begun, and have logged so many values together."""
    run = labkit.launch(function, *args, world_size=world_size, wait=False, live=False)
    wait_until(
        lambda: ("starting" not in run.states and len(run.history) >= (logged or world_size)) or run.over.is_set()
    )
    assert run.status == "running", run.error
    return run


def stacks_when(run, words):
    """Where the ranks stand, as soon as that is something; rank 1 needs a moment to get there."""
    found = []
    wait_until(lambda: found.append(run.stacks()) or re.fullmatch(words, found[-1].in_words))
    return found[-1]


# A time limit


@pytest.mark.parametrize("how", few(ASTRAY, lambda how: how in ("sleeps", "holds the lock")))
def test_at_the_timeout_the_odd_rank_is_named_with_its_place_and_that_of_the_others(how):
    with pytest.raises(labkit.WorkerFailed) as failure:
        labkit.launch(workloads.go_astray, how, world_size=3, stall_s=1.5, live=False)
    error = failure.value
    said = re.escape("no rank logged, printed or returned anything for 1.5 s (stall_s): ") + missed(how)
    assert re.fullmatch(said, error.diagnosis.headline), error.diagnosis.headline
    assert error.rank == 1
    assert error.cause.startswith("Rank 1 stood apart")
    assert "dist.all_reduce(total)  # the others are here" in error.cause, "the source line"
    assert "in go_astray" in error.cause
    silent = how in ("holds the lock", "is suspended") or not is_recorded()
    assert ("called is not known" in error.cause) == silent
    if how != "is suspended":
        assert "ASTRAY[how]()" in error.cause, "who called it"
    assert [line.split(" wait")[0] for line in error.diagnosis.others] == ["rank 0", "rank 2"]
    assert error.run.states == ["ended", "failed", "ended"]
    assert error.run.history["rank"].tolist() == [0, 1, 2], "what was logged is kept"
    if how != "loops" and is_recorded():  # which is at one of two lines
        assert_as_kept(f"hang, one {how}", said_in(error))


# While it goes on


@pytest.mark.parametrize("how", few(["holds the lock", "sleeps"], 2))
def test_a_hung_run_says_where_its_ranks_stand_and_can_be_stopped(how):
    run = launched(workloads.go_astray, how, world_size=3)
    stacks = stacks_when(run, f"rank 1 {ASTRAY[how]}; {OTHERS}")
    assert stacks.outliers == [1]
    assert re.fullmatch(missed(how), stacks.missed) or not is_recorded()
    assert str(stacks).startswith("\n\n".join(filter(None, [stacks.missed, stacks.in_words])))
    assert "dist.all_reduce(total)  # the others are here" in str(stacks)
    assert run.status == "running", "asking ends nothing"
    pids = list(run.engine.pids)
    assert run.stop().status == "stopped"
    assert run.stop_outcome == "late"
    assert not any(map(lives, pids))
    assert len(run.history) == 3
    again = run.stacks()
    assert again.in_words == "ranks 0, 1 and 2 have ended (ended)"
    assert again.outliers == []


def test_a_stop_comes_to_ranks_of_which_others_ask_things_all_the_time():
    run, is_over = launched(workloads.spin), threading.Event()

    def ask():
        while not is_over.wait(0.001):
            run.engine.ask_for_stacks()

    asking = threading.Thread(target=ask)
    asking.start()
    run.stop(grace_s=LONG_S)
    is_over.set()
    asking.join()
    assert (run.status, run.stop_outcome) == ("stopped", "")
    assert run.results[0] == run.results[1] > 0


# Stop


def test_ranks_that_go_on_logging_end_at_a_common_step_though_one_takes_as_long_as_it_never_did():
    run = launched(workloads.slow_steps, [0.05] * 20 + [1.0], logged=43)
    run.stop()
    assert (run.status, run.states, run.stop_outcome) == ("stopped", ["finished"] * 2, "")
    assert run.results[0] == run.results[1] == run.progress(0)[0].steps - 1, "the call that said stop is the last"


@pytest.mark.parametrize("how", few(["sleeps", "is suspended"], 2))
def test_a_stuck_run_is_ended_two_seconds_and_four_steps_after_it_was_asked_to_stop(how):
    run = launched(workloads.go_astray, how)
    asked_s = time.monotonic()
    run.stop()
    assert time.monotonic() - asked_s < 3 + 4 * run.recorded.longest_step_s([0.0] * 2) + LONG_S / 30
    assert (run.status, run.states, run.stop_outcome) == ("stopped", ["ended"] * 2, "late")
    assert len(run.history) == 2


def test_a_rank_that_logs_alone_returns_what_it_has():
    def train(worker):
        steps = 0
        try:
            while True:
                if worker.rank == 1:
                    worker.log(loss=1.0)
                steps += 1
                time.sleep(0.01)
                if worker.stopping and worker.rank == 0:
                    return steps
        except labkit.Stopped:
            return steps

    run = launched(train, logged=3)
    run.stop()
    assert (run.status, run.states, run.stop_outcome) == ("stopped", ["finished"] * 2, "")


def test_stopping_again_with_another_grace_ends_the_run_now():
    run = launched(workloads.go_astray, "loops")
    run.ask_to_stop(grace_s=1e6)
    assert run.stopping
    assert not run.over.wait(0.2)
    run.stop(grace_s=0)
    assert (run.status, run.stop_outcome, run.stopping) == ("stopped", "late", False)
