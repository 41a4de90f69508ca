"""Ranks on a Ray cluster: `labkit.launch(train, on=labkit.Ray(nodes=2, ranks_per_node=4, gpus_per_node=4))`.

One actor per node is an agent. What its ranks report comes back through Ray, so no folder is shared.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from labkit.engines.arguments import naming
from labkit.failures.grouping import rank_list
from labkit.launchers.job_events import JobEnded, Notice, Restarted
from labkit.launchers.ray_node import RayNode
from labkit.launchers.remote import LOOK_S, Launcher, RemoteJob, check_whole, start_uninterrupted
from labkit.protocol import events
from labkit.protocol.job import Job
from labkit.protocol.pages import help_hint
from labkit.rank.channels import Messages, pack

CONNECT_S = 10.0
"""How long the cluster's head may take to answer."""

FREE_S = 1.0
"""Time between two questions what is free on the cluster."""

LOST_S = 10.0
"""How long the other nodes may take to end their ranks once one is lost."""

LEAVE_S = 2.0
"""How long agents whose ranks have ended may take to remove what they have made on their nodes."""


class Ray(Launcher):
    """Where to launch: `nodes` × `ranks_per_node` ranks on a Ray cluster.

    Args:
        nodes: bundles of one placement group; the ranks begin when there is room for all.
        ranks_per_node: ranks in each.
        gpus_per_node, cpus_per_node: what each bundle takes; by default no GPU, and a CPU per rank.
        placement: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD", as Ray names them.
        max_restarts: how often all ranks are started again when one fails or its node is lost. A function that keeps
            checkpoints where every node sees them then goes on from the newest.
        address: of the cluster, as `ray.init` takes it: "auto", "HOST:PORT", "ray://HOST:PORT".
        runtime_env: what the ranks find, as Ray's runtime environments have it: {"working_dir": "."} sends the
            notebook's folder, {"pip": […]} installs packages, {"env_vars": {…}} sets variables.

    Every node needs labkit, with the versions of Python and Ray that the notebook has.
    """

    def __init__(
        self,
        nodes: int = 1,
        ranks_per_node: int = 1,
        gpus_per_node: float = 0,
        cpus_per_node: float | None = None,
        placement: str = "PACK",
        max_restarts: int = 0,
        address: str = "auto",
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ModuleNotFoundError("labkit.Ray needs Ray: pip install ray", name="ray")
        with naming("bad_argument"):
            self.nodes, self.ranks_per_node = check_whole("nodes", nodes), check_whole("ranks_per_node", ranks_per_node)
            cpus = self.ranks_per_node if cpus_per_node is None else cpus_per_node
            self.bundle = {name: amount for name, amount in {"CPU": cpus, "GPU": gpus_per_node}.items() if amount}
            if not self.bundle:
                raise ValueError("a node takes CPUs, GPUs or both, got none")
        self.world_size, self.max_restarts = self.nodes * self.ranks_per_node, max_restarts
        self.placement, self.address, self.runtime_env = placement, address, dict(runtime_env or {})

    def job(self, name: str, stall_s: float | None) -> RayJob:
        """Return a job for one run."""
        return RayJob(self)


class _Connection:
    """This process's connection with a cluster: opened for the first of several runs, closed after the last."""

    def __init__(self) -> None:
        self._lock, self._users, self._with = threading.Lock(), 0, ("", dict[str, Any]())

    def open(self, address: str, runtime_env: dict[str, Any]) -> None:
        """Connect, unless this process is. Raises RuntimeError if no cluster answers, or that is another connection."""
        import ray

        with self._lock:
            if not self._users and not ray.is_initialized():
                options = {"runtime_env": runtime_env or None, "logging_level": logging.ERROR}
                try:
                    _check_that_it_listens(address)
                    ray.init(address, log_to_driver=False, **options)
                except Exception as error:
                    raise RuntimeError(f"no Ray cluster answers at {address!r}: {error}\n{help_hint('ray')}") from error
                self._with = address, runtime_env
            elif runtime_env != self._with[1] or self._with[0] not in ("", address):
                raise RuntimeError(
                    "this notebook is connected with Ray already, in another runtime environment or to another "
                    f"cluster: wait for the other run, or call ray.shutdown()\n{help_hint('ray')}"
                )
            self._users += 1

    def close(self) -> None:
        """Disconnect after the last run, if this class has connected."""
        import ray

        with self._lock:
            self._users -= 1
            if not self._users and self._with[0]:
                self._with = "", {}
                ray.shutdown()


def _check_that_it_listens(address: str) -> None:
    """Raise OSError if nobody listens there: Ray would try for minutes."""
    given = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if found := re.fullmatch(r"(?:ray://)?\[?([^\]/]+)\]?:(\d+)", given):
        socket.create_connection((found[1], int(found[2])), CONNECT_S).close()


_connection = _Connection()


class RayJob(RemoteJob):
    """The actors of one run."""

    def __init__(self, on: Ray) -> None:
        super().__init__(on.nodes, on.ranks_per_node)
        self._on, self._attempt, self._packed = on, 0, b""
        self._group: Any = None
        self._actors: list[Any] = []
        self._addresses: list[str] = []
        self._asked: dict[Any, int] = {}
        """Which node was asked by each question, and by each order to start, that has no answer yet."""
        self._messages: list[Messages] = []
        self._lost: JobEnded | None = None
        self._lost_s = float("inf")
        self._free_s = 0.0
        self._said = ""
        self._has_failed = self._is_to_end = self._is_connected = False

    @property
    def may_restart(self) -> bool:  # type: ignore[override]
        """Whether all ranks are started again when one fails."""
        return self._attempt < self._on.max_restarts and not self._is_to_end

    def start(self, job: Job) -> None:
        """Join the cluster, and ask for room. Raises RuntimeError if no cluster answers."""
        self._packed = b"".join(pack(job))
        start_uninterrupted(lambda: _connection.open(self._on.address, self._on.runtime_env), _connection.close)
        self._is_connected = True
        self._place()

    def _place(self) -> None:
        import ray

        self._group = ray.util.placement_group([self._on.bundle] * self.nodes, strategy=self._on.placement)
        self._ready = self._group.ready()

    def poll(self) -> list[events.Event]:
        """Return what the ranks have reported; start them once there is room, and again if one was lost."""
        import ray

        if not ray.is_initialized():  # the next question would start a cluster on this machine
            self._lost = self._lost or JobEnded(-1, "this notebook has left the Ray cluster", "Launch it again.", "ray")
            self._actors = []
            self.over_s = min(self.over_s, time.monotonic())
            return []
        if not self._actors:
            return self._wait_for_room()
        found = self._news()
        self._has_failed |= any(isinstance(event, events.Exit) and event.code and not event.ended for event in found)
        if self._asked and time.monotonic() < self._lost_s + LOST_S:
            return found
        if self._has_failed and self.may_restart:
            self._release()
            self._attempt, self._has_failed, self._lost, self._lost_s = self._attempt + 1, False, None, float("inf")
            self._place()
            return [*found, Restarted(-1, self._attempt)]
        self.over_s = min(self.over_s, time.monotonic())
        return found

    def _wait_for_room(self) -> list[events.Event]:
        import ray

        if self._is_to_end:
            self.over_s = min(self.over_s, time.monotonic())
        elif ray.wait([self._ready], timeout=0)[0]:
            self._start_actors()
        elif time.monotonic() > self._free_s + FREE_S:
            self._free_s = time.monotonic()
            free = ray.available_resources()
            wanted = " and ".join(f"{amount:g} {name}" for name, amount in self._on.bundle.items())
            there = " and ".join(f"{free.get(name, 0):g} {name}" for name in self._on.bundle)
            return self._notice(f"waits on Ray for {self.nodes} × {wanted}; free: {there}", queued=True)
        return []

    def _start_actors(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Bundle

        cpus, gpus = self._on.bundle.get("CPU", 0), self._on.bundle.get("GPU", 0)
        kind: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=4)(RayNode)
        self._actors = [
            kind.options(scheduling_strategy=Bundle(self._group, number)).remote(number, self.ranks_per_node)
            for number in range(self.nodes)
        ]
        zero = self._actors[0].be_node_zero.remote() if self.nodes > 1 else None
        self._messages, self._addresses = [Messages() for _ in self._actors], [""] * self.nodes
        packed = ray.put(self._packed)
        for number, actor in enumerate(self._actors):
            self._asked[actor.start.remote(packed, zero)] = number

    def _news(self) -> list[events.Event]:
        import ray

        found: list[events.Event] = []
        answers = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0] if self._asked else []
        for answer in answers:
            number = self._asked.pop(answer)
            try:
                said = ray.get(answer)
            except ray.exceptions.RayError as error:
                self._note_lost(number, error)
                if self._lost and not self.may_restart:  # it comes before what that did to the others
                    found.append(self._lost)
                continue
            if isinstance(said, str):  # it has started its ranks, there
                self._addresses[number] = said
                if all(self._addresses):
                    nodes = f"{self.nodes} node{'s' * (self.nodes > 1)} of Ray"
                    found += self._notice(f"on {nodes} ({', '.join(self._addresses)})")
            else:
                found += self._messages[number].add(said[0]) if said[0] else []
            if isinstance(said, str) or not said[1]:
                self._asked[self._actors[number].news.remote()] = number
        return found

    def _note_lost(self, number: int, error: Exception) -> None:
        import ray

        self._has_failed = True
        self._lost_s = min(self._lost_s, time.monotonic())
        if self._lost is None:
            first = number * self.ranks_per_node
            who, address = rank_list(list(range(first, first + self.ranks_per_node))), self._addresses[number]
            headline = f"Ray has lost {who}, on node {address}" if address else f"Ray could not start {who}"
            if address and isinstance(error, ray.exceptions.RayTaskError):  # the node is there, and has raised this
                headline = f"the agent of {who} failed, on node {address}"
            cause = re.sub(r"\x1b\[[\d;]*m", "", str(error))
            if not self._on.max_restarts:
                cause += "\nWith max_restarts=3 all ranks begin again, and go on from their newest checkpoint."
            self._lost = JobEnded(first if self.ranks_per_node == 1 else -1, headline, cause, "ray")
        self._send("end")

    def _notice(self, text: str, queued: bool = False) -> list[events.Event]:
        said, self._said = self._said, text
        return [Notice(-1, text, queued)] if text != said else []

    def tell(self, word: str) -> None:
        """Send a word to node 0; to all, if one is lost. Before there are ranks nobody needs to hear it."""
        self._is_to_end |= word in ("stop", "end")
        self._send(word)

    def _send(self, word: str) -> None:
        import ray

        for actor in self._actors if self._lost else self._actors[:1]:
            if ray.is_initialized():  # else, at the kernel's exit, Ray would start a cluster of its own for this
                actor.tell.remote(word)

    def end(self) -> None:
        """Have the ranks ended."""
        self.tell("end")

    def why_over(self, missing: list[int]) -> JobEnded | None:
        """Return which node was lost."""
        return self._lost

    def _release(self) -> None:
        """End the actors, and release their place."""
        import ray

        actors, self._actors, self._asked = self._actors, [], {}
        group, self._group = self._group, None
        if not ray.is_initialized():
            return
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            ray.util.remove_placement_group(group)

    def close(self) -> None:
        """Let the agents tidy up, end the actors, release their place and leave the cluster."""
        import ray

        if self._is_connected:
            self._is_connected = False
            deadline = time.monotonic() + LEAVE_S
            try:
                while self._asked and ray.is_initialized() and time.monotonic() < deadline:
                    self._news()
                    time.sleep(LOOK_S)
            finally:  # an interrupt, too, leaves no actor
                self._release()
                _connection.close()
