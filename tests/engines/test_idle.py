"""Whether the notebook has work of its own: what it does counts; what other programs do does not."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from labkit.engines.standby import idle
from tests.conftest import wait_until


@pytest.fixture
def working(monkeypatch):
    """A notebook that uses nine tenths of a core, until it is told not to."""
    load = {"share": 0.9}
    clocks = SimpleNamespace(monotonic=time.monotonic, process_time=lambda: load["share"] * time.monotonic())
    monkeypatch.setattr(idle, "time", clocks)
    return load


def test_a_notebook_that_works_is_waited_for(working):
    said, looks = [], []
    thread = threading.Thread(target=lambda: said.append(idle.wait(lambda: not looks.append(1))))
    thread.start()
    wait_until(lambda: len(looks) >= 3)
    assert said == []
    working["share"] = 0.0
    thread.join()
    assert said == [True]


def test_it_is_no_longer_waited_for_once_nobody_needs_it(working):
    looks = iter(range(3))
    assert idle.wait(lambda: next(looks, None) is not None) is False


@pytest.mark.spawns
def test_a_notebook_that_sleeps_is_idle_whatever_others_do(busy_cores):
    assert idle.wait()
