"""When a rank that was asked something counts as mute: by its own time, as the system tells it. No rank is started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from labkit.failures import silence
from labkit.failures.silence import MUTE_S, Look, Silence, Silences, look_at
from labkit.protocol import events
from tests.conftest import wait_until

BUSY, IDLE = True, False
PASSES = {
    "keeps the lock": ([(0.05, 0.05, BUSY)] * 100, True),
    "keeps the lock on a machine with twenty others": ([(0.05, 0.0025, BUSY)] * 500, True),
    "is suspended": ([(0.05, 0.0, IDLE)] * 100, True),
    "waits for the lock, which sleeps": ([(0.05, 0.0005, IDLE)] * 100, True),
    "has threads on eight cores": ([(0.05, 0.4, BUSY)] * 19, False),
    "has just been asked": ([(0.0, 0.0, IDLE)] * 3, False),
    "was not let near a core for a minute": ([(0.05, 0.0, BUSY)] * 1200, False),
    "got a core for a moment now and then": ([(0.05, 0.0, BUSY)] * 600 + [(0.05, 0.01, BUSY)] * 20, False),
    "was asked by a notebook that was not let near a core": ([(2 * MUTE_S, 0.0, IDLE)], False),
    "waits for a disk": ([(1.0, 0.0, BUSY)] * 30, False),
    "ends a thread, whose time is no longer told": ([(0.05, -3.0, BUSY), (0.05, 0.0, BUSY)], False),
}
"""What passes from look to look: seconds of our clock, of a processor, and whether the rank is at work; is it mute?"""


def looking(steps):
    """What is seen of a process for which so much passes from look to look."""
    seen = [Look(0.0, 5.0, IDLE)]
    for passed_s, used_s, at_work in steps:
        seen.append(Look(seen[-1].now_s + passed_s, seen[-1].used_s + used_s, at_work))
    return iter(seen).__next__


@pytest.mark.parametrize("what", PASSES)
def test_a_rank_is_mute_once_it_has_had_the_time_of_its_own(what):
    steps, is_mute = PASSES[what]
    of_rank = Silence(looking(steps))
    assert any(of_rank.is_mute() for _ in steps) == is_mute


def test_a_rank_is_mute_only_if_an_answer_is_awaited(monkeypatch):
    monkeypatch.setattr(silence, "LOOK_EVERY_S", 0.0)
    steps = [(0.4 * MUTE_S, 0.0, IDLE)] * 10
    silences = Silences({rank: looking(steps) for rank in range(4)})
    for event in (events.Stack(0, "…"), events.Answered(0), events.Stack(1, "…"), events.Exit(2, 0)):
        silences.take(event)
    assert [silences.mute() for _ in range(2)] == [set(), set()]
    assert silences.mute() == {1, 3}


def test_a_rank_is_not_looked_at_whenever_somebody_asks(monkeypatch):
    monkeypatch.setattr(silence, "LOOK_EVERY_S", 1e6)
    silences = Silences({0: looking([(MUTE_S, 0.0, IDLE)] * 2)})
    assert [silences.mute() for _ in range(100)] == [set()] * 100, "a second look would make it mute"


@pytest.mark.spawns
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what others' threads do")
def test_the_system_tells_whether_a_process_is_at_work_and_how_long_it_was():
    loop = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        loop.stdout.readline()
        before = look_at(loop.pid)
        assert before.at_work
        wait_until(lambda: look_at(loop.pid).used_s > before.used_s)
        wait_until(lambda: not look_at(sleeper.pid).at_work)
        assert look_at(sleeper.pid).used_s < 1.0
    finally:
        for process in (loop, sleeper):
            process.kill()
            process.wait()
        loop.stdout.close()
    assert look_at(loop.pid)[1:] == (0.0, False), "gone"
    assert look_at(os.getpid()).at_work, "this one looks"
