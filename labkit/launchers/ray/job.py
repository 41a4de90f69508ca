"""Ranks on a Ray cluster, as the notebook has them: a driver's process, and what it says."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

from labkit.launchers import job_events
from labkit.launchers.environments import without_launchers
from labkit.launchers.launcher_job import LEAVE_S, ProcessJob, RanksSeen
from labkit.launchers.ray.orders import Answer, Orders
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.protocol.pages import help_hint

START = "import labkit.rank.die_with_parent; from labkit.launchers.ray.driver import main; main()"

END_TOLD_S = 10.0
"""How long the driver may take to end the ranks when it is told to; then it is ended, and Ray ends its actors."""

PACKAGE = Path(__file__).parents[2]


class RayJob(ProcessJob):
    """Ranks that a driver on this machine keeps on a Ray cluster. They end with it, and it with the notebook."""

    kind, output = "Ray", "ray.out"

    def __init__(self, orders: Orders, directory: RunDirectory, about: dict[str, Any]) -> None:
        super().__init__(orders.world_size, directory, about)
        self._orders = orders
        self._ended: job_events.JobEnded | None = None
        """Why there are no ranks any more, as the driver says."""
        self._notice = ""
        self._listener: threading.Thread | None = None
        self._late: threading.Timer | None = None
        """Ends a driver that does not end."""

    def submit(self) -> dict[str, Any]:
        """Start the driver and wait until it is in the cluster. Raises RuntimeError with why it is not."""
        orders = self._orders._replace(
            directory=str(self.directory.path), supervisor=str(self.supervisor.relative_to(PACKAGE))
        )
        path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        self.start_process(["-c", START], {**without_launchers(os.environ), "PYTHONPATH": path}, talks=True)
        self._send(pickle.dumps(orders))
        answer: Answer | None = self._next()
        if answer is None or not answer.address:
            self.kill()
            self.close()
            why = answer.why_not if answer else f"the process that connects to it has ended. {self.what_it_wrote()}"
            shutil.rmtree(self.directory.path, ignore_errors=True)
            raise RuntimeError(f"the ranks cannot be given to Ray at {orders.address!r}: {why}\n{help_hint('ray')}")
        self._listener = threading.Thread(target=self._listen, name="labkit-ray", daemon=True)
        self._listener.start()
        return {"driver": self.process.pid, "address": answer.address}

    def _send(self, words: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or nobody listens any more
            self.process.stdin.write(words)
            self.process.stdin.flush()

    def _next(self) -> Any:
        """Return the next message of the driver; None once it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # Others are what a site has Python print as it starts; the last may be cut.
            with contextlib.suppress(ValueError, EOFError, pickle.UnpicklingError):
                return pickle.loads(bytes.fromhex(line.decode()))
        return None

    def _listen(self) -> None:
        while (event := self._next()) is not None:
            if isinstance(event, job_events.JobEnded):
                self._ended = event
                continue
            if isinstance(event, job_events.Notice):
                self._notice = event.text
            self.emit(event)
        self.process.wait()
        if self._late is not None:
            self._late.cancel()
        self.settle(0.0)  # all that the ranks wrote was written here, by the driver

    def interruption(self) -> job_events.JobEnded:
        """Return why the ranks are gone, though they are started again."""
        cause = f"{self._notice}. They are then without variables."
        return job_events.JobEnded(-1, "the ranks on Ray were lost", cause, "ray")

    def ending(self, seen: RanksSeen) -> job_events.JobEnded | None:
        """Return why there are no ranks any more, if that is no rank's doing."""
        if self.was_ended or self._ended is not None:
            return None if self.was_ended else self._ended
        if seen.explains:
            return None
        return job_events.JobEnded(
            -1,
            f"the process that speaks with Ray has ended (exit code {self.process.poll()})",
            f"Ray ends the ranks with it. {self.what_it_wrote()}",
            page="ray",
        )

    def end(self) -> None:
        """Have the driver end the ranks, without waiting until it has."""
        if not self.is_going:
            return
        self.was_ended = True
        self.end_is_due()
        self._send(b"end\n")
        if self._late is None:
            self._late = threading.Timer(END_TOLD_S, self.kill)
            self._late.daemon = True
            self._late.start()

    def close(self) -> None:
        """Let the driver take its leave of Ray."""
        if self._process is None:
            return
        self._send(b"leave\n")
        super().close()
        if self._listener is not None:
            self._listener.join(LEAVE_S)  # it reads to the end what is closed here
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
