"""A small client of the Debug Adapter Protocol: says to a rank what VS Code says, and waits for what it answers."""

from __future__ import annotations

import itertools
import json
import socket
import time

from labkit.rank.breakpoints.attach import LOOPBACK, Messages, message

LONG_S = 60


class Client:
    """A debugger at one port."""

    def __init__(self, port):
        self.connection = socket.create_connection((LOOPBACK, port), LONG_S)
        self._messages, self._come, self._numbers = Messages(), [], itertools.count(1)

    def _next(self, is_wanted):
        """The first message that is wanted; others are kept for whoever wants them."""
        deadline = time.monotonic() + LONG_S
        while True:
            for each in self._come:
                if is_wanted(each):
                    self._come.remove(each)
                    return each
            assert time.monotonic() < deadline, self._come
            data = self.connection.recv(1 << 16)
            assert data, f"the rank has closed the connection; it had said {self._come}"
            self._come += [json.loads(each.partition(b"\r\n\r\n")[2]) for each in self._messages.add(data)]

    def send(self, command, **arguments):
        """Send a request; its number is returned."""
        number = next(self._numbers)
        request = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        self.connection.sendall(message(request))
        return number

    def ask(self, command, **arguments):
        """Send a request, and return what is answered."""
        number = self.send(command, **arguments)
        answer = self._next(lambda each: each["type"] == "response" and each["request_seq"] == number)
        assert answer["success"], answer
        return answer.get("body") or {}

    def event(self, name):
        """Wait for an event."""
        return self._next(lambda each: each["type"] == "event" and each["event"] == name).get("body") or {}

    def attach(self, file, *lines, **options):
        """Attach as VS Code does, with breakpoints at these lines of a file, and let the rank go on."""
        self.ask("initialize", adapterID="debugpy", clientID="vscode", pathFormat="path", linesStartAt1=True)
        attached = self.send("attach", **{"justMyCode": True, **options})
        self.event("initialized")
        breakpoints = [{"line": line} for line in lines]
        found = self.ask("setBreakpoints", source={"path": str(file)}, breakpoints=breakpoints)
        assert all(each["verified"] for each in found["breakpoints"])
        self.ask("configurationDone")
        self._next(lambda each: each["type"] == "response" and each["request_seq"] == attached)

    def stopped(self):
        """Wait until the rank has stopped; return its thread, and the frame on top."""
        thread = self.event("stopped")["threadId"]
        return thread, self.ask("stackTrace", threadId=thread)["stackFrames"][0]

    def value(self, expression, frame):
        """What an expression comes to in a frame."""
        return self.ask("evaluate", expression=expression, frameId=frame["id"], context="watch")["result"]

    def go_on(self, thread):
        """Let the rank go on. It may have ended before it answers."""
        self.send("continue", threadId=thread)

    def close(self):
        """Vanish, without a word."""
        self.connection.close()
