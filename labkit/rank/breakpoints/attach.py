"""A debugger of the reader's own, VS Code's say, at a rank: `labkit.launch(…, debug="attach")`. Runs in the rank.

    VS Code ── 127.0.0.1:port ──► `_Gate`, a thread of the rank ── a socket of the rank's own ──► debugpy

The problem: a process that reaches debugpy's port runs code as this user, and any user of the machine reaches a port
on loopback. What does not work: debugpy's access tokens, by which its two halves recognise each other, but which no
editor can show; a Unix socket, for no editor connects to one. So debugpy connects out and listens nowhere. labkit
listens, asks the system whose process is at the other end, and closes the connection of another user before a byte of
it is passed on. A page in this user's own browser can be made to post something to a port; so what does not begin as
the protocol does is closed, too. What still fails: a process of the same user gets in, and so do others that it
forwards the port to (`ssh -R`, say).

Whole messages are passed on, so that an editor that vanishes halfway through one leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from labkit.protocol.job import Job, RankHook
from labkit.rank.breakpoints.hook import hold_timeouts
from labkit.rank.channels import Channel
from labkit.system import host

LOOPBACK = "127.0.0.1"

ATTACHED, WAITS, LEFT = "attached", "waits", "left"
"""A debugger is there; the rank waits for its first; it has gone, and another may come."""

HEADER = re.compile(rb"Content-Length: *(\d+)\r\n(?:[\w-]+:[^\r\n]*\r\n)*\r\n", re.ASCII)
"""What stands before each message (https://microsoft.github.io/debug-adapter-protocol/overview#base-protocol)."""

BEGINNING = b"Content-Length:"

MOST_BYTES = 1 << 26
"""Of one message."""

ANSWER_S = 5.0
"""How long debugpy may take to answer that its editor has gone."""

SAYS_IT_HAS_GONE = 2**30
"""The number of that request."""


class DebuggerState(NamedTuple):
    """Whether a debugger is at a rank, and where it is to connect."""

    rank: int
    port: int
    state: str


class AttachHook(RankHook):
    """Has these ranks wait for a debugger before they call the function."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = frozenset(ranks)

    @contextlib.contextmanager
    def around(self, job: Job, channel: Channel) -> Iterator[None]:
        """Return the context in which the rank calls the function, with a debugger there."""
        hold_timeouts()  # in every rank: others wait for one at a breakpoint in their next collective
        before, gate = sys.breakpointhook, None
        try:
            if channel.rank in self.ranks:
                gate = _Gate(channel)
                sys.breakpointhook = self._wait(gate)
            else:
                sys.breakpointhook = _ignore  # which is for a debugger, and this rank has none
            yield
        finally:
            sys.breakpointhook = before
            if gate is not None:
                gate.close()

    def _wait(self, gate: _Gate) -> Callable[..., object]:
        """Wait for a debugger; return what `breakpoint()` is to call from then on."""
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a remark on Python's own frozen modules
        import debugpy

        gate.start()
        _spare_own_threads()
        # What the rank starts would look for a debugger, too, where none is.
        debugpy.configure(subProcess=False)
        debugpy.connect(gate.for_debugpy)  # returns once an editor has set its breakpoints, and lets the rank go on
        gate.let_go()
        return debugpy.breakpoint


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _spare_own_threads() -> None:
    """Have labkit's threads go on at a breakpoint, which suspends all others: the one that passes messages on, say.

    By these names debugpy and ipykernel tell their own threads.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("labkit-"):
            vars(thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)


class Protocol(Exception):  # noqa: N818 - says what is not spoken
    """What has come is no message of the Debug Adapter Protocol."""


class Messages:
    """Cuts what comes through a connection into whole messages."""

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, data: bytes) -> list[bytes]:
        """Take bytes; return the messages that are whole now, with their headers. Raises Protocol."""
        self._bytes += data
        found = []
        while self._bytes:
            header = HEADER.match(self._bytes)
            if header is None:
                if not self._bytes.startswith(BEGINNING[: len(self._bytes)]) or len(self._bytes) > 1000:
                    raise Protocol(f"{self._bytes[:40]!r} does not begin a message")
                break
            size = header.end() + int(header[1])
            if size > MOST_BYTES:
                raise Protocol(f"a message of {size:,} bytes")
            if len(self._bytes) < size:
                break
            found.append(self._bytes[:size])
            self._bytes = self._bytes[size:]
        return found


def message(content: dict[str, Any]) -> bytes:
    """Return a message as it is sent."""
    body = json.dumps(content).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


class _Gate(threading.Thread):
    """Lets this user's editor at the rank's debugpy: one at a time, one after the other."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(name="labkit-attach", daemon=True)
        self._channel: Any = channel
        self._is_waiting = True
        self._for_debugpy = socket.create_server((LOOPBACK, 0), backlog=1)
        self._for_editors = socket.create_server((LOOPBACK, 0), backlog=1)
        self.for_debugpy: tuple[str, int] = self._for_debugpy.getsockname()
        """Where debugpy is to connect."""
        self._port = self._for_editors.getsockname()[1]
        self._from_debugpy = Messages()

    def let_go(self) -> None:
        """Note that the rank waits no longer."""
        self._is_waiting = False

    def close(self) -> None:
        """Let no other editor in. One that is there hears of the end of the process."""
        # Not just `close`: the thread may be waiting for it, and has it open as long as it does.
        with contextlib.suppress(OSError):
            self._for_editors.shutdown(socket.SHUT_RDWR)
        self._for_editors.close()

    def run(self) -> None:
        """Pass on what editors and debugpy say to each other, until the process ends."""
        try:
            debugpy = self._accept_own()
            while True:
                self._say(WAITS if self._is_waiting else LEFT)
                with self._next_editor(debugpy) as editor:
                    self._pass_on(editor, debugpy)
                self._say_it_has_gone(debugpy)
        except (OSError, ValueError):  # closed: ValueError, of its number, which is -1 then
            return

    def _say(self, state: str) -> None:
        self._channel.send(DebuggerState(self._channel.rank, self._port, state))

    def _accept_own(self) -> socket.socket:
        with self._for_debugpy as listener:
            while True:
                connection, _ = listener.accept()
                if host.is_mine(connection):
                    return connection
                connection.close()

    def _next_editor(self, debugpy: socket.socket) -> socket.socket:
        """Return the next connection of this user's, and drop what debugpy says meanwhile."""
        while True:
            ready, _, _ = select.select([self._for_editors, debugpy], [], [])
            if debugpy in ready:
                self._read(debugpy, self._from_debugpy)
            if self._for_editors in ready:
                connection, _ = self._for_editors.accept()
                if host.is_mine(connection):
                    return connection
                connection.close()

    def _pass_on(self, editor: socket.socket, debugpy: socket.socket) -> None:
        """Pass messages on until the editor has gone, or was no editor."""
        from_editor, is_editor = Messages(), False
        while True:
            waited_for = [editor, debugpy] if self._for_editors.fileno() < 0 else [editor, debugpy, self._for_editors]
            ready, _, _ = select.select(waited_for, [], [])
            if self._for_editors in ready:
                with contextlib.suppress(OSError):  # closed meanwhile
                    self._for_editors.accept()[0].close()  # one at a time
            try:
                if editor in ready:
                    for each in self._read(editor, from_editor):
                        if not is_editor:
                            is_editor = True
                            self._say(ATTACHED)
                        debugpy.sendall(each)
                if debugpy in ready:
                    for each in self._read(debugpy, self._from_debugpy):
                        editor.sendall(each)
            except (OSError, Protocol):
                return

    def _read(self, connection: socket.socket, messages: Messages) -> list[bytes]:
        """Return the messages that have come. Raises ConnectionError at the end, and Protocol."""
        if not (data := connection.recv(1 << 16)):
            raise ConnectionError("the other end has gone")
        return messages.add(data)

    def _say_it_has_gone(self, debugpy: socket.socket) -> None:
        """Have debugpy forget the editor's breakpoints and let the rank run on; it may have been told already."""
        arguments = {"restart": False, "terminateDebuggee": False}
        request = {"seq": SAYS_IT_HAS_GONE, "type": "request", "command": "disconnect", "arguments": arguments}
        debugpy.sendall(message(request))
        deadline = time.monotonic() + ANSWER_S
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([debugpy], [], [], left_s)[0]:
                return
            for each in self._read(debugpy, self._from_debugpy):
                if b'"request_seq": %d' % SAYS_IT_HAS_GONE in each or b'"request_seq":%d' % SAYS_IT_HAS_GONE in each:
                    return
