"""Ranks that hang: what `timeout_s` and `run.stacks()` say of them, and how soon they stop. With real ranks."""

from __future__ import annotations

import inspect
import re
import time

import pytest

import labkit
from labkit.run import IDLE_S, USAGE_EVERY_S, Run
from tests import workloads
from tests.conftest import lives, start_of, wait_until

pytestmark = pytest.mark.spawns


def line_of(text):
    """The number of the one line of `workloads.py` that has some text in it."""
    lines = inspect.getsource(workloads).splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return number


OTHERS = f"ranks 0 and 2 wait in all_reduce at workloads.py, line {line_of('the others are here')}"
ASTRAY = {
    "sleeps": f"is in time.sleep at workloads.py, line {line_of('time.sleep(1e6)')}",
    "loops": rf"is at workloads.py, line ({line_of('while True:  # rank 1')}|{line_of('n += 1')})",
    "holds the lock": f"is in re.match at workloads.py, line {line_of('re.match')}",
    "waits elsewhere": f"waits in barrier at workloads.py, line {line_of('of rank 1 alone')}",
    "is suspended": "did not answer",
}


def launched(function, *args, world_size=2, logged=None):
    """A run in the background, each of whose ranks has logged."""
    run = labkit.launch(function, *args, world_size=world_size, wait=False, live=False)
    wait_until(lambda: len(run.history) >= (logged or world_size) or run.over.is_set())
    assert run.status == "running", run.error
    return run


def stacks_when(run, words):
    """Where the ranks stand, as soon as that is something; rank 1 needs a moment to get there."""
    found = []
    wait_until(lambda: found.append(run.stacks()) or re.fullmatch(words, found[-1].in_words))
    return found[-1]


# A time limit


@pytest.mark.parametrize("how", ASTRAY)
def test_at_the_timeout_the_odd_rank_is_named_with_its_place_and_that_of_the_others(how):
    with pytest.raises(labkit.WorkerFailed) as failure:
        labkit.launch(workloads.go_astray, how, world_size=3, timeout_s=1.5, live=False)
    error = failure.value
    said = re.escape("no rank logged or returned anything for 1.5 s (timeout_s): ") + f"rank 1 {ASTRAY[how]}; {OTHERS}"
    assert re.fullmatch(said, error.verdict.headline), error.verdict.headline
    assert error.rank == 1
    assert error.cause.startswith("Rank 1 stood apart")
    assert "dist.all_reduce(total)  # the others are here" in error.cause, "the source line"
    assert "in go_astray" in error.cause
    if how != "is suspended":
        assert "ASTRAY[how]()" in error.cause, "who called it"
    assert [line.split(" wait")[0] for line in error.verdict.others] == ["rank 0", "rank 2"]
    assert error.run.states == ["ended", "failed", "ended"]
    assert error.run.history["rank"].tolist() == [0, 1, 2], "what was logged is kept"


def test_the_time_to_start_does_not_count():
    start_s = start_of(labkit.launch(workloads.log_once, live=False))
    assert labkit.launch(workloads.log_once, timeout_s=start_s / 4, live=False).results == [0, 1]


def test_a_run_that_logs_now_and_then_is_not_ended():
    def train(worker):
        for step in range(8):
            time.sleep(0.25)
            worker.log(loss=1 / (1 + step))

    run = labkit.launch(train, timeout_s=1.5, live=False)
    assert (run.status, len(run.history)) == ("finished", 16)


# While it goes on


@pytest.mark.parametrize("how", ["sleeps", "holds the lock"])
def test_a_hung_run_says_where_its_ranks_stand_and_can_be_stopped(how):
    run = launched(workloads.go_astray, how, world_size=3)
    stacks = stacks_when(run, f"rank 1 {ASTRAY[how]}; {OTHERS}")
    assert stacks.odd == [1]
    assert str(stacks).startswith(stacks.in_words)
    assert "dist.all_reduce(total)  # the others are here" in str(stacks)
    assert run.status == "running", "asking ends nothing"
    pids = list(run._engine.pids)
    asked = time.monotonic()
    assert run.stop().status == "stopped"
    assert time.monotonic() - asked < 3
    assert not any(map(lives, pids))
    assert len(run.history) == 3
    again = run.stacks()
    assert again.in_words == "ranks 0, 1 and 2 have ended (ended)"
    assert again.odd == []


def test_asking_again_and_again_does_not_disturb_a_run():
    run = launched(workloads.spin)
    for _ in range(10):
        stacks = run.stacks()
        assert len(stacks) == 2
        assert all("workloads.py" in where.place for where in stacks), str(stacks)
    before = len(run.history)
    wait_until(lambda: len(run.history) > before + 10)
    run.stop()
    assert run.status == "stopped"
    assert run.results[0] == run.results[1] > 0
    assert run.stacks().in_words == "ranks 0 and 1 have returned"


def test_a_run_that_is_starting_says_so():
    run = labkit.launch(workloads.spin, wait=False, live=False)
    assert run.stacks().in_words in ("ranks 0 and 1 are still starting", "ranks 0 and 1 did not answer")
    assert run.stop().status == "stopped"


# Stop


@pytest.mark.parametrize("time_of_three", range(3))
def test_a_run_that_logs_stops_within_a_second_and_keeps_what_it_returns(time_of_three):
    run = launched(workloads.spin, logged=20 * (1 + time_of_three))
    asked = time.monotonic()
    run.stop()
    assert time.monotonic() - asked < 1
    assert run.status == "stopped"
    assert run.results[0] == run.results[1] > 0, "both have taken equally many steps"
    # Each logs once more than it counts: the call that said "stop".
    steps = run.history.groupby("rank")["step"]
    assert steps.max().tolist() == run.results
    assert steps.count().tolist() == [steps_taken + 1 for steps_taken in run.results], "complete"


@pytest.mark.parametrize("how", ["holds the lock", "waits elsewhere"])
def test_a_run_that_got_stuck_just_now_stops_within_three_seconds(how):
    run = launched(workloads.go_astray, how)
    asked = time.monotonic()
    run.stop()
    assert time.monotonic() - asked < 3
    assert run.status == "stopped"
    assert run.states == ["ended", "ended"]
    assert len(run.history) == 2


@pytest.mark.parametrize(
    ("seconds", "grace_s", "kept"), [(4, 60, [0, 1]), (60, None, [None, None])], ids=["patience", "no word of it"]
)
def test_idle_ranks_are_ended_soon_unless_they_are_given_time(seconds, grace_s, kept):
    run = launched(workloads.sleep_and_return, seconds)
    run._engine.stop_grace_s = 60  # what ranks are given that are not idle
    asked = time.monotonic()
    run.stop(grace_s)
    assert time.monotonic() - asked < 30
    assert run.status == "stopped"
    assert run.results == kept


class Looked:
    """An engine whose one rank has used so much processor time, in s, at each look."""

    def __init__(self, used_s):
        self._used_s = iter(used_s)

    def usage(self, rank):
        return 0, next(self._used_s)


@pytest.mark.parametrize(
    ("used_s", "in_vain"),
    [
        ([0.0] * 8, True),
        ([0.0, 0.0, 0.02, 0.02, 0.02, 0.03, 0.05, 0.05], True),  # two ticks of the system's clock in one look
        ([0.02 * look for look in range(8)], False),
        ([0.0] * 4, False),
    ],
    ids=["idle", "a few ticks", "works a little, all the time", "not for long"],
)
def test_little_work_is_told_from_none_over_several_looks(used_s, in_vain):
    run = Run(Looked(used_s), 1, "test")
    for look in range(len(used_s)):
        now = run._last_progress_s + look * USAGE_EVERY_S
        run._look_at_usage(now)
    assert run._waits_in_vain(now) == in_vain
    run._last_progress_s = now
    assert not run._waits_in_vain(now + IDLE_S / 2), "it has just logged"
