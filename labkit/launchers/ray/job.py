"""Ranks on a Ray cluster, as the notebook has them: a driver's process, and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from labkit.engines.spawn import in_spawner_thread
from labkit.launchers import job_events
from labkit.launchers.environments import without_launchers
from labkit.launchers.launcher_job import LauncherJob, RanksSeen
from labkit.launchers.ray.orders import Orders
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.private import private
from labkit.protocol import events
from labkit.protocol.pages import help_hint
from labkit.system import host

START = "import labkit.rank.die_with_parent; from labkit.launchers.ray.driver import main; main()"

END_TOLD_S = 10.0
"""How long the driver may take to end the ranks when it is told to; then it is ended, and Ray ends its actors."""

LEAVE_S = 5.0
"""How long the driver may take, once its ranks have ended, to take its leave of Ray."""

PACKAGE = Path(__file__).parents[2]


class RayJob(LauncherJob):
    """Ranks that a driver on this machine keeps on a Ray cluster. They end with it, and it with the notebook."""

    kind = "Ray"

    def __init__(self, orders: Orders, directory: RunDirectory, about: dict[str, Any]) -> None:
        super().__init__(orders.world_size, directory, about)
        self._orders = orders
        self._driver: subprocess.Popen[bytes] | None = None
        self._ended: job_events.JobEnded | None = None
        """Why there are no ranks any more, as the driver says."""
        self._notice = ""
        self._listener: threading.Thread | None = None
        self._late: threading.Timer | None = None
        """Ends a driver that does not end."""

    def submit(self) -> dict[str, Any]:
        """Start the driver and wait until it is in the cluster. Raises RuntimeError with why it is not."""
        orders = self._orders._replace(supervisor=str(self.supervisor.relative_to(PACKAGE)))
        # The driver ends with the thread that has started it: the spawner's lives as long as the notebook's kernel.
        self._driver = in_spawner_thread(self._start_driver).result()
        self._send(pickle.dumps(orders))
        first = self._next_word()
        if first.get("kind") != "connected":
            self._driver.kill()
            self._driver.wait()
            host.unguard(self._driver.pid)
            self._close_pipes()
            why = first.get("why") or f"the process that connects to it has ended: {self._tail()}"
            shutil.rmtree(self.directory.path, ignore_errors=True)
            raise RuntimeError(f"the ranks cannot be given to Ray at {orders.address!r}: {why}\n{help_hint('ray')}")
        self._listener = threading.Thread(target=self._listen, name="labkit-ray", daemon=True)
        self._listener.start()
        return {"driver": self._driver.pid, "address": first["address"]}

    def _start_driver(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        with open(self.directory.path / "ray.out", "ab", opener=private) as output:
            driver = subprocess.Popen(
                [sys.executable, "-c", START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**without_launchers(os.environ), "PYTHONPATH": path},
                start_new_session=True,  # the notebook's interrupt is not meant for it
            )
            host.guard(driver.pid)
            return driver

    def _send(self, words: bytes) -> None:
        assert self._driver is not None
        assert self._driver.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or nobody listens any more
            self._driver.stdin.write(words)
            self._driver.stdin.flush()

    def _next_word(self) -> dict[str, Any]:
        """Return what the driver says next; nothing once it has ended."""
        assert self._driver is not None
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            with contextlib.suppress(ValueError):  # a line that a library has printed
                found = json.loads(line)
                if isinstance(found, dict) and "kind" in found:
                    return found
        return {}

    def _listen(self) -> None:
        assert self._driver is not None
        while word := self._next_word():
            if word["kind"] == "notice":
                self._notice = word["text"]
                self.emit(job_events.Notice(-1, word["text"], queued=word["queued"]))
            elif word["kind"] == "warned":
                self.emit(events.Warned(-1, word["topic"], word["text"]))
            elif word["kind"] == "ended":
                self._ended = job_events.JobEnded(word["rank"], word["headline"], word["cause"], "ray")
        self._driver.wait()
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
        assert self._driver is not None
        return job_events.JobEnded(
            -1,
            f"the process that speaks with Ray has ended (exit code {self._driver.poll()})",
            f"Ray ends the ranks with it. What it wrote:\n{self._tail()}",
            page="ray",
        )

    def _tail(self) -> str:
        try:
            said = (self.directory.path / "ray.out").read_text(errors="replace", encoding="utf-8")
            return said.strip()[-3000:] or "nothing"
        except OSError as error:
            return f"(ray.out cannot be read: {error})"

    def end(self) -> None:
        """Have the driver end the ranks, without waiting until it has."""
        if self._driver is None or self._driver.poll() is not None:
            return
        self.was_ended = True
        self.end_is_due()
        self._send(b"end\n")
        if self._late is None:
            self._late = threading.Timer(END_TOLD_S, self._driver.kill)
            self._late.daemon = True
            self._late.start()

    def end_now(self) -> None:
        """Have the driver end the ranks, and wait until it has."""
        self.end()
        if self._driver is not None:
            self._driver.wait()

    def close(self) -> None:
        """Let the driver take its leave of Ray."""
        if self._driver is None:
            return
        self._send(b"leave\n")
        try:
            self._driver.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        host.unguard(self._driver.pid)
        if self._listener is not None:
            self._listener.join(LEAVE_S)  # it reads to the end what is closed here
        self._close_pipes()

    def _close_pipes(self) -> None:
        assert self._driver is not None
        for pipe in (self._driver.stdin, self._driver.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
