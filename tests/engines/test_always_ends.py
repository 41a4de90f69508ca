"""A run always ends, and what went wrong is named: an exception, an end, garbage or a delay at every place where the
local engine, its ranks, and what follows them read, write, wait or end something."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import re
import subprocess
import threading
import time

import pytest
import torch

from labkit import run as monitor_run
from labkit.engines import listener, local, spawn
from labkit.monitor import asking as question
from labkit.monitor import follower
from labkit.protocol import events
from labkit.protocol.job import Job, RankHook, Surroundings
from labkit.protocol.packing import pack_call
from labkit.rank import channels, failure, log_batcher, main, process_group, spawned, worker
from labkit.run import Run
from tests.support.forked_ranks import ForkedRanks
from tests.support.injection import READS, WRITES, Delays, Ends, Garbles, Instrumented, Raises, has_bytes, places
from tests.support.tiers import few

MODULES = (
    *(listener, local, spawn, follower, monitor_run),
    *(channels, failure, log_batcher, main, process_group, spawned, worker),
)

NEVER_S = 40.0
"""After which a run is given up here."""

OVER_S = 5.0
"""How soon after a fault a run is over on an idle machine."""

RUNS = {
    "returns": "finished",
    "raises": "failed",
    "is stopped": "stopped",
    "is stopped at once": "stopped",
    "is killed": "stopped",
    "stays": "finished",
    "starts programs": "finished",
    "forks": "finished",
    "dies early": "failed",
    "sends garbage": "failed",
    "sends nonsense": "failed",
    "cannot read its job": "failed",
    "closes everything": "failed",
}
"""What the ranks do, or has been done to them, and how that ends."""


_have_logged = mmap.mmap(-1, 2)
"""A byte for each rank of a run, which is 1 once what it has logged has been sent: memory that forks share."""


def work(worker, how, more=b""):
    worker.expect(3)
    for step in range(3):
        worker.log(loss=float(step))
    print(f"rank {worker.rank} has printed")
    _wait_until(lambda: not worker._log._steps)
    with worker._log._lock:  # held while it sends
        _have_logged[worker.rank] = 1
    _wait_until(lambda: all(_have_logged))
    if worker.rank == 1:
        _be_different(worker, how)
    while how == "is stopped":
        time.sleep(0.005)
        worker.log(loss=3.0)
    while how == "is killed":
        time.sleep(0.01)
    return {"rank": worker.rank}


def _be_different(worker, how):
    match how:
        case "raises":
            raise ValueError("bad batch")
        case "starts programs":
            subprocess.Popen(["sleep", "20"])  # no longer, for a fault may keep them from being ended
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,)).start()
            time.sleep(0.4)  # and the other rank does not wait so long
        case "forks":
            if pid := os.fork():
                os.waitpid(pid, 0)
        case "sends garbage":
            os.write(worker._channel._queue._writer.fileno(), b"garbage")
            time.sleep(1000)
        case "sends nonsense":
            worker._channel.send(events.Change(1))
            time.sleep(1000)
        case "closes everything":
            os.closerange(3, 1000)
            time.sleep(1000)


def _wait_until(is_so):
    """Wait for it, unless a fault keeps it from coming."""
    deadline = time.monotonic() + 3
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)


class Unreadable(RankHook):
    """What cannot be unpickled, though it can be pickled."""

    def __reduce__(self):
        return _missing, ()


def _missing():
    raise AttributeError("what the kernel has, and the rank has not")


SAYS = {
    "raises": "rank 1 failed: ValueError: bad batch",
    "dies early": r"rank 1 .*\(exit code 3\)",
    "sends garbage": "rank 1 failed while what it sent was being read in the notebook: b'garbage' is not the beginning",
    "sends nonsense": "labkit lost track of the ranks: ",
    "cannot read its job": r"(?s)rank [01] .*\(exit code 1\).*AttributeError: what the kernel has, and",
    # Seen by the notebook, or by the rank itself once something is asked of it.
    "closes everything": r"ConnectionError: its channel has ended, and it goes on|rank 1 .*\(exit code 1\)",
}
"""A pattern of what the error of a failed run says."""


class Outcome:
    """How a run of two ranks went, and when it was over."""

    def __init__(self, how):
        _have_logged[:] = bytes(2)
        self.how, self.raised = how, []
        self.engine = ForkedRanks(2, dies=how == "dies early")
        self.run = Run(self.engine, 2, "train")
        self.over_s = None
        thread = threading.Thread(target=self._to_the_end, daemon=True)
        if self._does(self._start) or self.run.is_followed:
            thread.start()
            thread.join(NEVER_S)
        self.over_s = self.over_s or time.monotonic()
        for process in self.engine.started:  # where the fault kept labkit from doing it
            if process.is_alive:
                process.process.kill()
        assert not thread.is_alive(), f"never ends: {self.run.states}"

    def _does(self, step):
        try:
            step()
        except BaseException as error:
            self.raised.append(error)
            return False
        return True

    def _to_the_end(self):
        # The reader's next buttons, where the first does not do it.
        _ = self._does(self._drive) or self._does(lambda: self.run.stop(0)) or self._does(self.engine.kill)
        self._does(self.run.wait)
        self.run.over.wait()
        self.over_s = time.monotonic()

    def _start(self):
        # More than a pipe holds, and a tensor, whose memory follows its message.
        more = {"dies early": (b"x" * 2**20,), "returns": (torch.zeros(2000),)}.get(self.how, ())
        job = Job(
            pack_call(work, (self.how, *more), {}), 2, "gloo", 0, 1, None, 0, time.time(), environment={}, cells={}
        )
        if self.how == "stays":
            job = job._replace(stays=Surroundings(os.getcwd()))
        if self.how == "cannot read its job":
            job = job._replace(hooks=(Unreadable(),))
        self.run.start(job)

    def _drive(self):
        if self.how == "is stopped at once":
            self.run.stop()
        if self.how in ("is stopped", "is killed"):
            deadline = time.monotonic() + OVER_S  # a fault may keep what is logged from coming
            while time.monotonic() < deadline and not (self.run.over.wait(0.01) or self._has_logged()):
                pass
            self.engine.say(0, "a word")
            self.run.stacks()
            if self.how == "is killed":
                self.run.kill()
            self.run.stop(0 if self.how == "is killed" else None)

    def _has_logged(self):
        return all(self.run.progress(rank)[0].steps >= 3 for rank in range(2))

    @property
    def is_as_without_a_fault(self):
        run = self.run
        if not run.is_followed or run.status != RUNS[self.how] or not re.search(SAYS.get(self.how, ""), str(run.error)):
            return False
        if self.how == "is stopped at once":
            return True
        if run.status == "finished" and run.results != [{"rank": 0}, {"rank": 1}]:
            return False
        # What ends the follower may come before what the other rank has logged.
        return self._has_logged() or self.how in ("dies early", "cannot read its job", "sends nonsense")

    @property
    def said(self):
        """What the reader is told."""
        said = [*map(str, self.raised), str(self.run.error or ""), *self.run.warnings, *self.run.output]
        return "\n".join(said + [failure.traceback for failure in self.run.failures if failure])


@pytest.fixture(scope="module", autouse=True)
def forks():
    """What is as it should be of spawned ranks: their stacks end in a module; and less patience."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(question, "is_complete", lambda text: text.endswith("\n"))
        patch.setattr(spawn, "GONE_S", 2.0)
        yield


@pytest.fixture(scope="module")
def code():
    with Instrumented(*MODULES) as code:
        yield code


@pytest.fixture(scope="module")
def reached(code):
    """The first kind of run that comes to a place on a side, and how long that takes without a fault."""
    found = {}
    for how in RUNS:
        began_s = time.monotonic()
        outcomes = []
        there = code.reached(lambda how=how, outcomes=outcomes: outcomes.append(Outcome(how)))
        assert outcomes[0].is_as_without_a_fault, (outcomes[0].run, outcomes[0].said)
        for place, side in sorted(there, key=str):
            found.setdefault((place, side), (how, time.monotonic() - began_s))
    return found


UNREACHED = {
    "engines.local: LocalEngine._take: standby.take": "the ranks are forked here",
    "engines.spawn: RankProcess.is_ready: self.queue.receive": "of standby ranks and sessions",
    "engines.spawn: RankProcess.wait_for_exit: self.process.kill": "who waits for it has seen that it has ended",
    "engines.spawn: spawn: process.close": "ranks are forked here; see test_ranks_that_cannot_be_started",
    "engines.spawn: _spawn: copy.close": "likewise",
    "engines.spawn: in_spawner_thread: _work.put": "likewise",
    "engines.spawn: _close_lifelines: os.close": "likewise",
    "engines.spawn: _serve: _work.get": "likewise",
    **dict.fromkeys(
        (f"engines.spawn: end_all: {call}" for call in ("popen.poll", "popen.kill", "popen.wait", "stopping.join")),
        "as a kernel shuts down; see tests/session/test_magic.py",
    ),
    "run: Run._stop_or_end: self.engine.kill": "see test_the_second_interrupt",
    "rank.main: do_jobs: channel.send": "a GPU that is broken; see tests/rank/test_device.py",
    "rank.main: set_up: pickle.loads": "no settings are sent here",
    "rank.main: end_children: os.kill": "a fork server, which a rank of this Python has not",
    "rank.process_group: join: store.wait": "no group is joined here",
    "rank.process_group: when_left.<locals>.wait_and_do: before.join": "likewise",
}
"""Places to which no run comes here, and why."""

SOMETIMES = {
    "monitor.follower: Follower._enforce_stop: self._engine.ask_to_stop",  # ranks take long, and are asked again
    "monitor.follower: Follower.begin: self.take",  # one has sent something before it is followed
}
"""Places to which some runs come by chance."""

OF_FORKED_RANKS = {"rank.channels: EventQueue.close: end.close", "rank.channels: RankPipes.close: end.close"}
"""What ranks do here because they are forked: they let go of the others' ends. One that is spawned has its own only."""


@pytest.mark.spawns
def test_every_place_is_reached_or_it_is_said_why_not(reached):
    there = {place for place, _ in reached}
    unreached = {str(place) for place in places(*MODULES) if place not in there}
    assert sorted((unreached ^ set(UNREACHED)) - SOMETIMES) == []


def faults(place):
    """What may go wrong there."""
    found = [Raises(RuntimeError)]
    if place.name in READS | WRITES:
        found += [Raises(OSError), Ends()]
    if has_bytes(place):
        found += [Garbles()]
    return found


ALL_THAT_IS_KNOWN = {Ends: "and left no traceback", Garbles: "cannot read what the kernel has sent"}
"""What is said where a fault has no name: a channel ends as that of a rank that calls os._exit does."""


def check(code, place, side, fault, how, usual_s):
    """Return what is wrong with a run that meets a fault, or None."""
    code.arm(place, side, fault)
    try:
        outcome = Outcome(how)
    except AssertionError as error:
        return f"{error}"
    finally:
        began_s = code.effective_s()
        code.disarm()
    outcome.engine.close()  # where the fault was that nobody did
    if began_s is None:
        return None  # it did not come there this time
    took_s = outcome.over_s - began_s
    if took_s > OVER_S + 10 * usual_s:
        return f"over after {took_s:.1f} s, in {usual_s:.1f} s without a fault; {outcome.run}, {outcome.said}"
    said = [text for kind, text in ALL_THAT_IS_KNOWN.items() if isinstance(fault, kind)] + ["injected"]
    if not (outcome.is_as_without_a_fault or any(text in outcome.said for text in said)):
        return f"the cause is not named: {outcome.run}, {outcome.run.results}, {outcome.said}"
    return None


@pytest.mark.spawns
@pytest.mark.parametrize("place", few((each for each in places(*MODULES) if str(each) not in UNREACHED), 9), ids=str)
def test_whatever_goes_wrong_at_a_place_the_run_ends_and_says_why(place, code, reached):
    wrong = []
    for side in ("notebook", "rank"):
        if side == "rank" and str(place) in OF_FORKED_RANKS:
            continue
        how, usual_s = reached.get((place, side), (None, 0))
        for fault in faults(place) if how else ():
            if found := check(code, place, side, fault, how, usual_s):
                wrong.append(f"a run that {how}, {side}, {fault}: {found}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.spawns
@pytest.mark.parametrize("how", few(RUNS, 3))
def test_a_run_in_which_everything_takes_longer_ends_as_it_should(how, code):
    code.arm(None, None, Delays(0.02))
    outcome = Outcome(how)
    code.disarm()
    assert outcome.is_as_without_a_fault, (outcome.run, outcome.said)
