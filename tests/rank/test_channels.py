"""What a rank and the notebook send each other: put together wherever it is cut, from the rank's own process alone."""

from __future__ import annotations

import contextlib
import os
import pickle
from array import array

import pytest

import labkit
from labkit.protocol import events
from labkit.protocol.framing import HEADER, MARK
from labkit.rank.channels import Channel, CorruptMessage, EventQueue, Messages
from tests.support.fake_engine import a_worker

SOME = [events.Started(0), events.Log(0, ("loss",), array("q", [3]), array("d", [0.5]), array("d", [1.0])), None, "a"]


def frame(event):
    body = pickle.dumps(event)
    return HEADER.pack(MARK, len(body), 0) + body


STREAM = b"".join(map(frame, SOME))


@pytest.mark.parametrize("size", [1, 7, 16, len(STREAM)])
def test_events_are_whole_wherever_their_bytes_are_cut(size):
    messages, found = Messages(), []
    for at in range(0, len(STREAM), size):
        found += messages.add(STREAM[at : at + size])
    assert found == SOME
    assert not messages.is_partial


def test_a_byte_that_is_missing_does_not_go_unnoticed_wherever_it_was():
    """As after two writers at once. The next message does not begin where it should, or the last one does not end."""
    for cut in range(len(STREAM)):
        messages = Messages()
        with contextlib.suppress(CorruptMessage):
            messages.add(STREAM[:cut] + STREAM[cut + 1 :])
            messages.check()
            assert messages.is_partial, cut


@pytest.mark.parametrize("garbage", [b"x", b"garbage", MARK[:3] + b"x", bytes(100), HEADER.pack(MARK, 5, 0) + b"xxxxx"])
def test_garbage_is_known_at_once_and_what_came_before_it_is_kept(garbage):
    apart, together = Messages(), Messages()
    assert apart.add(frame("before")) == ["before"]
    with pytest.raises(CorruptMessage):
        apart.add(garbage)
    assert together.add(frame("before") + garbage) == ["before"]
    for messages in (apart, together):
        with pytest.raises(CorruptMessage):
            messages.check()
        with pytest.raises(CorruptMessage):
            messages.add(b"")


def test_an_event_of_which_a_part_never_comes_holds_up_nobody():
    """Its writer was killed, and what it has forked keeps the pipe open."""
    queue = EventQueue()
    os.write(queue._writer.fileno(), frame(events.Result(0, bytes(1000)))[:500])
    assert queue.receive() == []
    assert queue.receive() == []
    queue.close_writer()
    with pytest.raises(EOFError, match="in the middle of a message"):
        queue.receive()
    queue.close()


# In a process that is not the rank's


def in_a_fork(do):
    """Return what something raises in a forked process, as text; "" if nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            do()
            os._exit(0)
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as end:
        said = end.read().decode()
    os.waitpid(pid, 0)
    return said


@pytest.mark.spawns
def test_a_forked_process_is_told_that_it_cannot_speak_for_the_rank_also_while_a_lock_is_held():
    worker, batcher, channel = a_worker()
    worker.log(loss=0.0)
    with batcher._lock:  # by a thread that a fork does not have
        said = in_a_fork(lambda: worker.log(loss=1.0))
    assert said.startswith("RuntimeError: worker.log was called in process ")
    assert "which rank 1 has started (a DataLoader's worker?)" in said
    assert said.endswith("return the value to it, and log it there")
    batcher.close()
    assert [step for event in channel.sent for step in event.steps] == [0]


@pytest.mark.spawns
def test_nothing_that_a_forked_process_sends_comes_between_what_the_rank_sends():
    queue = EventQueue()
    channel = Channel(queue, 1)
    with channel._lock:
        said = in_a_fork(lambda: channel.send(events.Exit(1, 0)))
    assert "Exit was to be sent in process" in said
    channel.send(events.Started(1))
    assert queue.receive() == [events.Started(1)]
    queue.close()


# With real ranks


def fork_and_return(worker, how):
    worker.log(loss=0.0)
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        worker.log(code=os.waitstatus_to_exitcode(status))
        return "the rank's"
    if how == "raises":
        raise ValueError("the fork's own")
    if how == "exits":
        raise SystemExit(7)
    return "the fork's"


@pytest.mark.spawns
@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("raises", 1), ("exits", 7)])
def test_a_forked_process_that_comes_back_from_the_function_is_not_taken_for_the_rank(how, code, ranks):
    run = labkit.launch(fork_and_return, how, on=ranks, live=False)
    assert run.results == ["the rank's"] * 2
    assert [run.recorded.progress(rank).last["code"] for rank in range(2)] == [code] * 2
    assert ("ValueError: the fork's own" in run.output[0]) == (how == "raises")
