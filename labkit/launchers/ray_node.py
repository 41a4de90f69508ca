"""The actor that a Ray cluster starts on each node: an agent whose words and events go through Ray."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from labkit.launchers import start
from labkit.protocol import events
from labkit.rank.channels import pack

if TYPE_CHECKING:
    from labkit.launchers.agent import StoreAddress
    from labkit.protocol.job import Job

BACKLOG = 100
"""Batches of events that wait for the notebook at most; ranks that report more wait."""

BLOCK_BYTES = 1 << 24
"""Sent at once, at least one event."""

ANSWER_S = 1.0
"""How long a question for news is kept when there is none."""


class RayNode:
    """An agent on its node. Ray calls its methods, several at once."""

    def __init__(self, number: int, ranks: int) -> None:
        processes = start.begin(ranks)
        from labkit.launchers.agent import NodeAgent  # torch, while the ranks import it, too

        self._agent = NodeAgent(number, processes)
        self._batches: queue.Queue[bytes] = queue.Queue(BACKLOG)
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open_store(self) -> StoreAddress:
        """Open the store through which all ranks rendezvous."""
        import ray

        return self._agent.open_store(ray.util.get_node_ip_address())

    def start(self, packed: bytes, store: StoreAddress | None) -> None:
        """Start the ranks of this node."""
        from labkit.rank.channels import Messages

        (job,) = Messages().add(packed)
        self._thread = threading.Thread(target=self._run, args=(job, store), name="labkit-agent")
        self._thread.start()

    def _run(self, job: Job, store: StoreAddress | None) -> None:
        try:
            self._agent.run(job, store, self._put, self._new_words)
        except BaseException as error:
            self._put([events.Warned(-1, "agent", f"{type(error).__name__}: {error}")])

    def _put(self, found: list[events.Event]) -> None:
        self._batches.put(b"".join(part for event in found for part in pack(event)))

    def _new_words(self) -> list[str]:
        return [self._words.get() for _ in range(self._words.qsize())]

    def tell(self, word: str) -> None:
        """Take a word."""
        self._words.put(word)

    def news(self) -> tuple[bytes, bool]:
        """Return what the ranks have reported since, waiting a while for it, and whether that is all there will be."""
        is_over = self._thread is not None and not self._thread.is_alive()
        found, size = [], 0
        try:
            found.append(self._batches.get(timeout=0 if is_over else ANSWER_S))
            while (size := size + len(found[-1])) < BLOCK_BYTES:
                found.append(self._batches.get_nowait())
        except queue.Empty:
            pass
        return b"".join(found), is_over and not found
