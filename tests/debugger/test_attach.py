"""`debug="attach"`: a debugger by the protocol that VS Code speaks, at two ranks; who gets in, and who does not.

Ranks are processes of their own here, debugpy is the real one, and the client is `tests.support.dap`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import textwrap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit.debugger.attach import AttachObserver
from labkit.protocol.events import Exit, Started
from labkit.rank.breakpoints.attach import ATTACHED, LEFT, LOOPBACK, WAITS, DebuggerState, Messages, Protocol, message
from tests.conftest import LONG_S, wait_until
from tests.support.dap import Client
from tests.support.fake_engine import FakeEngine

SCRIPT = """
import torch
import torch.distributed as dist
import labkit

dist.init_process_group("gloo")
rank = dist.get_rank()
total = 0
for step in range(3):
    total += 10 * rank + step
    print("at step", step)
summed = torch.tensor(total)
dist.all_reduce(summed)
labkit.log(total=total, summed=summed.item())
breakpoint()
print("over", summed.item())
"""
LINE = 1 + SCRIPT[1:].split("\n").index('    print("at step", step)')
LAST = 1 + SCRIPT[1:].split("\n").index('print("over", summed.item())')


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(SCRIPT[1:]))
    return file


@pytest.fixture
def launched(script):
    """Runs that are stopped when the test ends, and clients that are closed."""
    runs = []

    def launch(**options):
        options = {"world_size": 2, "debug": "attach", "wait": False, "live": False, **options}
        runs.append(labkit.run_script(script, **options))
        return runs[-1]

    yield launch
    for run in runs:
        run.stop(0)


def ports(run, count=2):
    """Where each rank waits, by rank, as the run says it."""
    found = {}

    def all_said():
        found.update((int(r), int(port)) for r, port in re.findall(rf"rank (\d+) at {LOOPBACK}:(\d+)", run.notice))
        return len(found) == count

    wait_until(lambda: run.over.is_set() or all_said(), LONG_S)
    assert len(found) == count, str(run.error)
    return [port for _, port in sorted(found.items())]


# With a debugger


@pytest.mark.spawns
def test_a_debugger_stops_each_of_two_ranks_reads_its_values_and_lets_it_go_on(launched, script):
    run = launched(stall_s=1)
    clients = [Client(port) for port in ports(run)]
    for client in clients:
        client.attach(script, LINE)
    for step in range(3):
        stops = [client.stopped() for client in clients]
        for rank, (client, (_, frame)) in enumerate(zip(clients, stops, strict=True)):
            assert (frame["line"], frame["source"]["path"]) == (LINE, str(script))
            assert client.value("(rank, step)", frame) == f"({rank}, {step})"
        if step == 1:
            time.sleep(2.5)  # no rank says anything for longer than stall_s
            assert not run.over.is_set(), str(run.error)
            assert run.notice == "ranks 0 and 1 have a debugger"
        for client, (thread, _) in zip(clients, stops, strict=True):
            client.go_on(thread)
    for client in clients:  # what the script itself says, too
        thread, frame = client.stopped()
        assert frame["line"] == LAST
        client.go_on(thread)
    run.wait()
    assert run.error is None
    assert [" ".join(output.split()) for output in run.output] == ["at step 0 at step 1 at step 2 over 36"] * 2
    assert list(run.history["summed"]) == [36.0, 36.0]
    assert run.notice == ""
    assert not run.paused_by
    for client in clients:
        client.close()


@pytest.mark.spawns
def test_a_debugger_that_vanishes_at_a_breakpoint_lets_the_rank_run_on_and_another_may_come(launched, script):
    run = launched(debug=[1])
    [port] = ports(run, 1)
    first = Client(port)
    first.attach(script, LINE)
    first.stopped()
    other = socket.create_connection((LOOPBACK, port))
    other.settimeout(LONG_S)
    assert other.recv(1) == b"", "a second one beside the first"
    other.close()
    first.connection.sendall(b"Content-Length: 500\r\n\r\nhalf of")
    first.close()
    # No breakpoint is left, and that of the script is for a debugger that is there.
    run.wait()
    assert run.error is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port))


@pytest.mark.spawns
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_another_user_and_a_browser_get_no_byte_in_and_the_rank_goes_on_waiting(launched, script):
    run = launched(debug=[0])
    [port] = ports(run, 1)
    greeting = message({"seq": 1, "type": "request", "command": "initialize", "arguments": {"adapterID": "debugpy"}})
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            with socket.create_connection((LOOPBACK, port), LONG_S) as connection:
                try:
                    connection.sendall(greeting)
                    answered = connection.recv(1) != b""
                except ConnectionError:
                    answered = False
            os._exit(int(answered))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with socket.create_connection((LOOPBACK, port), LONG_S) as browser:
        browser.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\n" + greeting)
        with contextlib.suppress(ConnectionError):
            assert browser.recv(1) == b""
    assert f"rank 0 waits for a debugger: attach to rank 0 at {LOOPBACK}:{port}" in run.notice
    client = Client(port)
    client.attach(script)
    client.go_on(client.stopped()[0])
    run.wait()
    assert run.error is None
    client.close()


@pytest.mark.spawns
def test_a_stop_ends_ranks_that_wait_for_a_debugger_and_frees_their_ports(launched):
    run = launched()
    waiting = ports(run)
    run.stop()
    assert run.status == "stopped"
    assert not run.paused_by
    for port in waiting:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, port))


# What is said


def test_the_run_says_where_each_rank_waits_and_what_vs_code_is_to_be_told():
    engine = FakeEngine()
    observer = AttachObserver([0, 1])
    run = labkit.Run(engine, 2, "train", stall_s=1e-9, observers=[observer])
    for rank in range(2):
        run._follower.take(DebuggerState(rank, 4000 + rank, WAITS))
    first, *lines = run.notice.splitlines()
    assert first == ("ranks 0 and 1 wait for a debugger: attach to rank 0 at 127.0.0.1:4000, rank 1 at 127.0.0.1:4001")
    assert lines[1] == (
        '{"name": "rank 1", "type": "debugpy", "request": "attach", "connect": {"host": "127.0.0.1", "port": 4001}}'
    )
    for rank in range(2):
        run._follower.take(Started(rank))
    time.sleep(0.001)
    run._follower.enforce_deadlines()
    assert engine.calls == [], "a rank that waits for a debugger does not hang"
    run._follower.take(DebuggerState(0, 4000, ATTACHED))
    assert run.notice.startswith("rank 1 waits for a debugger, rank 0 has a debugger: attach to rank 1 at")
    run._follower.take(DebuggerState(0, 4000, LEFT))
    run._follower.take(Exit(1, 0))
    assert run.notice.startswith("rank 0 has no debugger: attach to rank 0 at 127.0.0.1:4000\n")
    assert not run.paused_by
    run._follower.take(Exit(0, 0))
    assert run.notice == ""


@pytest.mark.parametrize("debug", ["atach", True, 0, [2], [], ["0"], [True]])
def test_a_debug_that_is_none_is_refused_with_the_ranks_that_there_are(debug):
    with pytest.raises(ValueError, match=r"debug is 'attach', .* or a list of the ranks that do, of 0, 1; got"):
        labkit.launch(lambda: None, world_size=2, debug=debug)


def test_on_ranks_that_no_debugger_can_reach_or_leave_it_is_refused():
    with pytest.raises(ValueError, match=r"debug='attach' needs new processes of this machine, .* Leave on=… away"):
        labkit.launch(lambda: None, on=labkit.Here(), debug="attach")


def test_without_debugpy_the_error_says_how_to_get_it(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "debugpy" else found(name, *rest)
    )
    with pytest.raises(ModuleNotFoundError, match="needs debugpy, .*: pip install debugpy"):
        labkit.launch(lambda: None, world_size=2, debug="attach")


# What is passed on


@given(st.lists(st.text(max_size=20), max_size=5), st.integers(1, 50))
def test_messages_come_out_whole_wherever_they_are_cut(texts, size):
    sent = [message({"text": text}) for text in texts]
    stream, messages, found = b"".join(sent), Messages(), []
    for start in range(0, len(stream), size):
        found += messages.add(stream[start : start + size])
    assert found == sent


@pytest.mark.parametrize(
    "sent",
    [b"POST / HTTP/1.1\r\n", b"G", b"Content-Length: x\r\n\r\n" + b"x" * 1000, b"Content-Length: 99999999\r\n\r\n"],
)
def test_what_is_no_message_is_not_passed_on(sent):
    with pytest.raises(Protocol):
        Messages().add(sent)
