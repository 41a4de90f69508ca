"""One rank's process as the notebook holds it, and the queue that it fills."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.spawn
import multiprocessing.util
import os
import select
import signal
import sys
import threading
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.engines import spawn as engine_spawn
from labkit.engines.local import LocalEngine
from labkit.engines.spawn import RankProcess, spawn
from labkit.rank import process_group
from labkit.rank.channels import EventQueue, receive
from labkit.rank.device import Settled
from labkit.run import Run
from tests.conftest import LONG_S, wait_until
from tests.support.fake_engine import A_JOB as A_SMALL_JOB


class ClosableProcess:
    """A `multiprocessing.Process`: once it has been closed, whatever it is asked raises an error."""

    pid, exitcode = 2**22 + 1, None  # no process has such a pid

    def __init__(self):
        self.sentinel, self._open = Pipe(duplex=False)

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        self.exitcode = -9

    def join(self):
        pass

    def close(self):
        self.is_alive = self.kill = self.join = self._refuse

    def _refuse(self):
        raise ValueError("process object is closed")


@pytest.fixture
def rank():
    ends = [end for _ in range(3) for end in Pipe(duplex=False)]
    queue = EventQueue()
    yield RankProcess(ClosableProcess(), ends[1], queue, ends[2], ends[4])
    for end in (*ends, queue):
        with contextlib.suppress(OSError):
            end.close()


def test_whoever_asks_a_rank_that_has_been_let_go_gets_an_answer(rank):
    rank.close()
    assert not rank.is_alive
    assert not rank.ask_for_stacks()
    rank.kill()
    rank.say("stop")
    rank.close()


@pytest.fixture
def no_resource_tracker(monkeypatch):
    """None has been started yet, as in a notebook before its first launch."""
    tracker = resource_tracker._resource_tracker
    monkeypatch.setattr(tracker, "_fd", None)
    monkeypatch.setattr(tracker, "_pid", None)
    yield
    tracker._stop()


@pytest.mark.spawns
@pytest.mark.cold
@pytest.mark.skipif(sys.platform != "linux", reason="signals are looked up in /proc")
def test_the_notebooks_interrupt_does_not_reach_a_rank_that_imports_in_the_first_launch(no_resource_tracker):
    (rank,) = spawn(1)
    status = dict(line.split(":\t") for line in Path(f"/proc/{rank.pid}/status").read_text().splitlines())
    rank.close()
    assert (int(status["SigBlk"], 16) | int(status["SigIgn"], 16)) >> (signal.SIGINT - 1) & 1


A_JOB = b"x" * 2**20
"""More than a pipe holds."""


def has_room(rank):
    """Whether a word can be written at once."""
    look = select.poll()
    look.register(rank._inbox.fileno(), select.POLLOUT)
    return bool(look.poll(0))


def make_hard_to_reach(rank, how):
    """Have it take a while until a rank that does not read gets a word; return what it finds before."""
    if how == "a job is being sent":
        threading.Thread(target=rank.send, args=(A_JOB,), daemon=True).start()
        wait_until(lambda: rank._inbox_lock.locked() and not has_room(rank))
        return [A_JOB]
    before = []
    while how == "there is no room" and has_room(rank):
        before.append("what others have asked")
        rank.send(before[-1])
    if how == "a word is being sent":
        rank._inbox_lock.acquire()
        threading.Thread(target=lambda: (time.sleep(0.001), rank._inbox_lock.release())).start()
    return before


@pytest.mark.parametrize("how", ["nothing is sent", "a word is being sent", "a job is being sent", "there is no room"])
def test_a_stop_is_never_lost_and_nobody_waits_until_it_has_come(how):
    for _ in range(25):
        reader, writer = Pipe(duplex=False)
        rank = RankProcess(ClosableProcess(), writer, None, None, None)
        before = make_hard_to_reach(rank, how)
        asking = [threading.Thread(target=rank.say, args=(word,)) for word in ("details", "stop")]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(LONG_S)
            assert not thread.is_alive(), "it waits for a rank that does not read"
        found = []
        while len(found) < len(before) + 2:
            assert reader.poll(LONG_S), f"one of two words never came, of {len(found)} that did"
            found.append(receive(reader))
        assert found[: len(before)] == before
        assert sorted(found[len(before) :]) == ["details", "stop"]
        reader.close()
        writer.close()


@pytest.fixture
def held_rank(rank, monkeypatch):
    """A process that the system does not let go, though it is killed: in uninterruptible sleep, say."""
    monkeypatch.setattr("labkit.engines.spawn.GONE_S", 0.3)
    monkeypatch.setattr("labkit.engines.spawn.EXIT_CODE_S", 0.0)
    monkeypatch.setattr("labkit.engines.listener.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("labkit.engines.spawn.psutil.pid_exists", lambda pid: True)
    monkeypatch.setattr(rank.process, "kill", lambda: None)
    rank.process._popen = SimpleNamespace(returncode=None)
    return rank


def test_a_run_is_over_though_the_system_holds_a_rank_and_its_report_says_so(held_rank, monkeypatch):
    engine = LocalEngine(1)
    monkeypatch.setattr(engine, "_take", lambda: [held_rank])
    monkeypatch.setattr(engine, "_give_back", lambda ranks: held_rank.close())
    run = Run(engine, 1, "train")
    run.start(A_SMALL_JOB._replace(world_size=1, start_s=time.time()))
    run.stop(0)
    assert run.status == "stopped"
    (said,) = run.warnings
    assert said.startswith(f"rank 0 was killed, and its process {held_rank.pid} is still there: the system holds it. ")


def test_a_rank_whose_exit_code_another_has_taken_has_ended(rank):
    """What it has forked keeps its sentinel open, and somebody has waited for every child of this process."""
    assert rank.has_ended


@pytest.mark.spawns  # multiprocessing's resource tracker, where no test before has
def test_of_ranks_that_cannot_all_be_started_none_is_left(monkeypatch):
    """Too many open files, say: those that began end when their channels close."""
    opened = []

    def start(main, args, nprocs, join):
        opened.extend(args[0]._left)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("torch.multiprocessing.spawn", start)
    with pytest.raises(OSError, match="Too many open files"):
        spawn(2)
    assert all(end.closed for ends in opened for end in (ends.inbox, ends.output, ends.stacks))
    assert all(ends.queue.reader.closed for ends in opened)


ON_CPU = Settled(torch.device("cpu"), "gloo", "cpu")


def test_a_rank_has_joined_when_all_have(monkeypatch):
    """One that goes on, fails and is gone closes connections that another is making: its group could not be made."""
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    store, joined = dist.HashStore(), []

    def join(rank):
        process_group.join(SimpleNamespace(rank=rank, world_size=2), ON_CPU, store)
        joined.append(rank)

    thread = threading.Thread(target=join, args=(1,))
    thread.start()
    thread.join(0.2)
    assert joined == []
    join(0)
    thread.join(LONG_S)
    assert sorted(joined) == [0, 1]


def test_ranks_that_have_returned_do_not_wait_for_one_that_has_failed():
    store, left = dist.HashStore(), []
    job = SimpleNamespace(world_size=2, port=1)
    process_group.leave_together(job, SimpleNamespace(rank=0), store, True, lambda: left.append("of the failed"))
    process_group.leave_together(job, SimpleNamespace(rank=1), store, False, lambda: left.append("alone"))
    assert left == []


@pytest.mark.spawns
@pytest.mark.parametrize("comes", ["before the work is given", "after it"])
def test_an_interrupt_as_ranks_are_asked_for_leaves_none(comes, monkeypatch):
    engine_spawn.in_spawner_thread(lambda: None).result()  # there is such a thread
    begun, work, real = [], engine_spawn._work, engine_spawn._spawn

    def interrupted(call):
        if comes == "after it":
            work.put(call)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_spawn, "_work", SimpleNamespace(put=interrupted, get=work.get))
    monkeypatch.setattr(engine_spawn, "_spawn", lambda count: begun.extend(real(count)) or begun)
    with pytest.raises(KeyboardInterrupt):
        spawn(2)
    assert len(begun) in (0, 2 * (comes == "after it"))
    wait_until(lambda: not any(process.is_alive for process in begun), LONG_S)


def test_a_rank_is_prepared_after_reset_which_deletes_what_python_knows_of_the_main_module(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__spec__", raising=False)
    with engine_spawn._nothing_in_place_of_main():
        data = multiprocessing.spawn.get_preparation_data("rank 0")
    assert data["init_main_from_name"] == "labkit.rank.die_with_parent"


def launch_there(answers):
    """Say how a launch ends in a process that was forked."""
    try:
        answers.put(labkit.launch(print, world_size=1, live=False).status)
    except RuntimeError as error:
        answers.put(str(error))


@pytest.mark.spawns
def test_a_launch_in_a_fork_of_the_notebook_is_refused():
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=launch_there, args=(answers,))
    child.start()
    child.join(LONG_S)
    assert f"process {child.pid} was forked from the notebook's, {os.getpid()}" in answers.get()
