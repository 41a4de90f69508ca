"""The actor that a Ray cluster starts on each node: an agent whose words and events go through Ray."""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING

from labkit.launchers import start
from labkit.launchers.environments import without_launchers
from labkit.protocol import events
from labkit.rank.channels import Messages, pack

if TYPE_CHECKING:
    from labkit.launchers.agent import NodeZero

BACKLOG = 64
"""Blocks that wait for the notebook at most; ranks that report more wait."""

BLOCK_BYTES = 1 << 22
"""Sent at once, at most: Ray keeps each answer in its object store."""

ANSWER_S = 1.0
"""How long a question for news is kept when there is none."""


class RayNode:
    """An agent on its node. Ray calls its methods, several at once."""

    def __init__(self, number: int, ranks: int) -> None:
        for name in os.environ.keys() - without_launchers(os.environ).keys():  # where Ray runs in a job of SLURM's
            del os.environ[name]
        os.environ.pop("PYTHONBREAKPOINT", None)  # Ray's own debugger
        processes = start.begin(ranks)
        from labkit.launchers.agent import NodeAgent

        self._agent = NodeAgent(number, processes)
        self._blocks: queue.Queue[bytes] = queue.Queue(BACKLOG)
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def address(self) -> str:
        """Return this node's address, as Ray has it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def be_node_zero(self) -> NodeZero:
        """Listen for the other agents and for the ranks of all nodes."""
        return self._agent.be_node_zero(self.address())

    def start(self, packed: bytes, zero: NodeZero | None) -> str:
        """Start the ranks of this node; return its address."""
        thread = threading.Thread(target=self._run, args=(packed, zero), name="labkit-agent")
        thread.start()
        self._thread = thread  # only now: to `news` one that has not begun would be one that is over
        return self.address()

    def _run(self, packed: bytes, zero: NodeZero | None) -> None:
        try:
            (job,) = Messages().add(packed)
            self._agent.run(job, zero, self._put, self._new_words)
        except BaseException as error:
            self._error = error

    def _put(self, found: list[events.Event]) -> None:
        data = b"".join(part for event in found for part in pack(event))
        for begin in range(0, len(data), BLOCK_BYTES):
            self._blocks.put(data[begin : begin + BLOCK_BYTES])

    def _new_words(self) -> list[str]:
        return [self._words.get() for _ in range(self._words.qsize())]

    def tell(self, word: str) -> None:
        """Take a word."""
        self._words.put(word)

    def news(self) -> tuple[bytes, bool]:
        """Return what the ranks have reported since, waiting a while for it, and whether that is all there will be.

        Raises what has ended the agent.
        """
        is_over = self._thread is not None and not self._thread.is_alive()  # before the look
        try:
            return self._blocks.get(timeout=0 if is_over else ANSWER_S), False
        except queue.Empty:
            if is_over and self._error is not None:
                raise self._error from None
            return b"", is_over
