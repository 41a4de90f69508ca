"""How long ranks that were asked to stop may take, by the length of a step, from what they logged: no process."""

from __future__ import annotations

import pytest

from labkit.monitor.history import RECENT, History
from labkit.protocol.events import Started
from labkit.run import Run
from tests.support.fake_engine import FakeEngine
from tests.support.logs import log


def logged(history, rank, *times_s):
    history.add(log(rank, range(len(times_s)), times_s=times_s, loss=times_s))


def test_the_pace_is_that_of_the_slowest_rank():
    history = History(2)
    assert history.longest_step_s([0.0, 0.0]) == 0
    logged(history, 0, 1.0, 1.5)
    logged(history, 1, 1.0, 2.0, 2.5)
    assert history.longest_step_s([0.0, 0.0]) == 1.0
    logged(history, 0, 4.5)
    assert history.longest_step_s([0.0, 0.0]) == 3.0, "from one record to the next"


def test_the_first_call_says_something_of_the_pace_only_while_there_is_no_second():
    history = History(2)
    logged(history, 0, 5.0)
    assert history.longest_step_s([2.0, 2.0]) == 3.0
    logged(history, 0, 5.25)
    assert history.longest_step_s([2.0, 2.0]) == 0.25


def test_a_long_step_is_forgotten_in_time():
    history = History(1)
    logged(history, 0, 0.0, 60.0)
    logged(history, 0, *(60.0 + step for step in range(1, RECENT - 1)))
    assert history.longest_step_s([0.0]) == 60.0
    logged(history, 0, 60.0 + RECENT - 1)
    assert history.longest_step_s([0.0]) == 1.0


def test_what_lies_between_two_attempts_is_no_step():
    history = History(1)
    logged(history, 0, 1.0, 2.0)
    logged(history, 0, 100.0, 101.0)
    assert history.longest_step_s([99.0]) == 1.0


def test_the_grace_is_the_engines_and_four_of_the_longest_recent_steps_unless_somebody_says_another():
    run = Run(FakeEngine(2), 2, "train")
    for rank in range(2):
        run._follower.take(Started(rank))
    run.ask_to_stop()
    assert run._follower.grace_s == run.engine.stop_grace_s
    run = Run(FakeEngine(2), 2, "train")
    for rank in range(2):
        run._follower.take(Started(rank))
        run._follower.take(log(rank, range(3), times_s=[10.0, 10.5, 10.6 + rank], loss=[1.0] * 3))
    run.ask_to_stop()
    assert run._follower.grace_s == pytest.approx(run.engine.stop_grace_s + 4 * 1.1)
    run.ask_to_stop(grace_s=0)
    assert run._follower.grace_s == 0
