"""What the agents of all nodes tell each other: words, and numbers that they add up. Node 0's agent keeps them.

PyTorch's `TCPStore` would do, if agents had torch. But its import takes longer than all else, and where ranks import it
on the same cores the run would begin seconds later. So agents send lines of JSON. Node 0 does not answer a line without
the token of the run, which lies in its folder.
"""

from __future__ import annotations

import hmac
import json
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

ANSWER_S = 300.0
"""How long an agent waits for an answer of node 0's."""

LINE_BYTES = 1 << 16
"""Longest line that is read."""


Exchange = Callable[[list[str], dict[str, int], int], tuple[list[str], dict[str, int]]]
"""Adds words and numbers; returns the words after the first so many, and all sums."""


class Board:
    """Where words and numbers are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words: list[str] = []
        self._sums: dict[str, int] = {}

    def exchange(self, words: list[str], more: dict[str, int], seen: int) -> tuple[list[str], dict[str, int]]:
        """Add words and numbers; return the words after the first `seen`, and all sums."""
        with self._lock:
            self._words += words
            for name, number in more.items():
                self._sums[name] = self._sums.get(name, 0) + number
            return self._words[seen:], dict(self._sums)


class BoardServer(socketserver.ThreadingTCPServer):
    """Answers other nodes through a socket that listens already."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, board: Board, token: str) -> None:
        super().__init__(listener.getsockname(), _Answers, bind_and_activate=False)
        self.socket.close()
        self.socket, self.board, self.token = listener, board, token
        threading.Thread(target=self.serve_forever, name="labkit-nodes", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the node is gone, or no agent of this run has sent that. Its connection is closed."""


class _Answers(socketserver.StreamRequestHandler):
    server: BoardServer

    def handle(self) -> None:
        """Answer one node until it leaves."""
        while line := self.rfile.readline(LINE_BYTES):
            token, *question = json.loads(line)
            if not hmac.compare_digest(token.encode(), self.server.token.encode()):
                return
            self.wfile.write(json.dumps(self.server.board.exchange(*question)).encode() + b"\n")


def board_of_node_zero(host: str, port: int, token: str) -> Exchange:
    """Connect with node 0, and return its board's `exchange`. That raises ConnectionError once node 0 is gone."""
    connection = socket.create_connection((host, port), ANSWER_S)
    answers = connection.makefile("rb")

    def exchange(words: list[str], more: dict[str, int], seen: int) -> tuple[list[str], dict[str, int]]:
        try:
            connection.sendall(json.dumps((token, words, more, seen)).encode() + b"\n")
            found, sums = json.loads(answers.readline())
        except (OSError, ValueError) as error:
            raise ConnectionError(f"node 0 does not answer any more: {error}") from error
        return found, sums

    return exchange


class Nodes:
    """What all nodes know, as one of them sees it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._seen = exchange, 0

    def say(self, words: list[str]) -> list[str]:
        """Have every node hear words; return those that are new to this one."""
        found, _ = self._exchange(words, {}, self._seen)
        self._seen += len(found)
        return found

    def count(self, what: str, more: int = 0) -> int:
        """Add to a number that all nodes have in common; return the sum."""
        _, sums = self._exchange([], {what: more} if more else {}, self._seen)
        return sums.get(what, 0)
