"""Whether the notebook has work of its own: what it and its children do counts; what other programs do does not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from labkit.engines.standby import idle
from tests.conftest import wait_until

SPIN = "while True: pass"


def wanted_meanwhile(do, apart_from=()):
    """How much processor time was wanted while something was done, in s."""
    before = idle.wanted_s(apart_from)
    do()
    return sum(seconds - before.get(who, 0.0) for who, seconds in idle.wanted_s(apart_from).items())


def work(seconds):
    """Use so much processor time, however long that takes."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture
def busy_thread():
    """A thread of this process that works until the test is over; gives its native id."""
    over = threading.Event()

    def spin():
        while not over.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    yield thread.native_id
    over.set()
    thread.join()


@pytest.fixture
def busy_child():
    with subprocess.Popen([sys.executable, "-c", SPIN]) as child:
        yield child
        child.kill()


def test_what_the_notebook_computes_is_work():
    assert wanted_meanwhile(lambda: work(0.3)) >= 0.3


def test_what_another_of_its_threads_computes_is_work(busy_thread):
    def until_it_has_worked():
        before = idle.wanted_s()[busy_thread]
        wait_until(lambda: idle.wanted_s()[busy_thread] - before >= 0.2)

    assert wanted_meanwhile(until_it_has_worked) >= 0.2


@pytest.mark.spawns
def test_what_a_child_computes_is_work_unless_it_is_left_out(busy_child):
    def wanted_by_it():
        return idle.wanted_s().get(busy_child.pid, 0.0)

    wait_until(lambda: wanted_by_it() > 0.2)
    assert busy_child.pid not in idle.wanted_s(apart_from=[busy_child.pid])


@pytest.mark.spawns
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not say how long a thread waits")
def test_work_that_waits_for_a_core_is_work(busy_cores):
    """Over the time it takes, this thread wants all of a core, however little of it others leave."""
    began = time.monotonic()
    wanted = wanted_meanwhile(lambda: work(0.5))
    assert wanted > 0.8 * (time.monotonic() - began)


@pytest.mark.spawns
def test_a_notebook_that_sleeps_is_idle_whatever_others_do(busy_cores):
    asked = []
    waiter = threading.Thread(target=lambda: asked.append(idle.wait()))
    waiter.start()
    waiter.join(60)
    assert asked == [True]


def test_a_notebook_that_works_is_waited_for(monkeypatch):
    monkeypatch.setattr(idle, "wanted_s", lambda apart_from=(): {1: 0.9 * time.monotonic()})
    looks = iter(range(5))
    assert idle.wait(lambda: next(looks, None) is not None) is False
    assert next(looks, None) is None, "looked again and again"


def test_the_pause_is_in_proportion_to_how_long_ranks_take_to_start(monkeypatch):
    monkeypatch.setattr(idle, "_started_in_s", idle.START_S)
    usual = idle.pause_s()
    idle.record_startup_s(2.5 * idle.START_S)
    assert idle.pause_s() == pytest.approx(2.5 * usual)
