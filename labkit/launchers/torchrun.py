"""Ranks under torch's elastic launcher: `labkit.launch(train, on=labkit.Torchrun(ranks_per_node=2, max_restarts=3))`.

The agent (https://docs.pytorch.org/docs/stable/elastic/run.html) runs as a process of its own, because it takes over
the signal handlers of the process that it is in.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

from labkit.engines.arguments import check_world_size, naming
from labkit.launchers import job_events
from labkit.launchers.directory_engine import Launcher, check_whole, runs_folder
from labkit.launchers.environments import without_launchers
from labkit.launchers.launcher_job import SETTLE_S, ProcessJob, RanksSeen
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.rank.device import usable_gpus
from labkit.rank.local_rendezvous import LocalRendezvous

START = "import labkit.rank.die_with_parent; from labkit.launchers.torchrun import be_agent; be_agent()"
"""The agent ends with the notebook; `torchrun` on the command line would not."""

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else ranks that are started again read the addresses of the dead: https://github.com/pytorch/pytorch/issues/135712."""

ONE_MACHINE = "labkit-one-machine"
"""What torchrun calls the rendezvous of an agent that is alone."""


class Torchrun(Launcher):
    """Where to launch: under torchrun, on this machine and perhaps others.

    Args:
        nodes: machines. With more than one, the run says which command to start on each of the others. A process that
            reaches the port of `rdzv_endpoint` can run code as you: torchrun unpickles what it finds there.
        ranks_per_node: ranks on each; by default as many as this machine has GPUs, or 2 without GPUs.
        rdzv_endpoint: host:port, on this machine, for the rendezvous of the agents of several machines. Give an
            address of the network that they share, and not a name, to listen there alone.
        max_restarts: how often all ranks are started again when one fails. A function that keeps checkpoints then goes
            on from the newest.
        folder: where the runs' folders are made; with several machines, one that all of them can write.
    """

    def __init__(
        self,
        nodes: int = 1,
        ranks_per_node: int | None = None,
        rdzv_endpoint: str | None = None,
        max_restarts: int = 0,
        folder: str | os.PathLike[str] = "labkit-runs",
    ) -> None:
        if ranks_per_node is None:
            ranks_per_node = check_world_size(None, usable_gpus())
        with naming("bad_argument"):
            check_whole("nodes", nodes)
            check_whole("ranks_per_node", ranks_per_node)
            check_whole("max_restarts", max_restarts, least=0)
            if nodes > 1 and rdzv_endpoint is None:
                raise ValueError(
                    f"{nodes} machines need a rendezvous: give rdzv_endpoint='HOST:PORT', a name of this machine "
                    "and a free port on it"
                )
            if rdzv_endpoint is not None and not rdzv_endpoint.rpartition(":")[2].isdigit():
                raise ValueError(f"rdzv_endpoint is HOST:PORT, got {rdzv_endpoint!r}")
        self.nodes, self.ranks_per_node, self.max_restarts = nodes, ranks_per_node, max_restarts
        self.rdzv_endpoint, self.folder = rdzv_endpoint, runs_folder(folder)
        self.world_size = nodes * ranks_per_node

    def job_in(self, directory: RunDirectory, about: dict[str, Any]) -> TorchrunJob:
        """Return a job; its agent is not started yet."""
        return TorchrunJob(self.world_size, directory, about, self)

    def arguments(self, supervisor: Path, directory: Path) -> list[str]:
        """Return torchrun's arguments, the same on every machine."""
        meeting = [f"--rdzv-backend={ONE_MACHINE}"]
        if self.nodes > 1:
            meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.rdzv_endpoint}"]
        return [
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.ranks_per_node}",
            f"--max-restarts={self.max_restarts}",
            "--monitor-interval=0.1",
            *meeting,
            f"--rdzv-id={directory.name}",
            f"--log-dir={directory / 'torchrun'}",
            str(supervisor),
            str(directory),
        ]

    def command(self, supervisor: Path, directory: Path) -> str:
        """Return the line to type on each of the other machines."""
        setting = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
        arguments = self.arguments(supervisor, directory)
        return f"{setting} {shlex.join([sys.executable, '-m', 'torch.distributed.run', *arguments])}"

    def __repr__(self) -> str:
        return f"Torchrun(nodes={self.nodes}, ranks_per_node={self.ranks_per_node}, max_restarts={self.max_restarts})"


class TorchrunJob(ProcessJob):
    """Ranks under an agent on this machine."""

    kind, output = "torchrun", "torchrun.out"

    def __init__(self, world_size: int, directory: RunDirectory, about: dict[str, Any], on: Torchrun) -> None:
        super().__init__(world_size, directory, about)
        self._on = on
        self._rendezvous: LocalRendezvous | None = None
        """Where the ranks meet if they are all on this machine."""

    def submit(self) -> dict[str, Any]:
        """Start the agent. Raises ValueError for an endpoint that cannot be used."""
        path = self.directory.path
        environment = {"OMP_NUM_THREADS": "1", **without_launchers(os.environ), **ENVIRONMENT}
        if self._on.nodes == 1:
            self._rendezvous = LocalRendezvous()
            environment["LABKIT_RENDEZVOUS"] = str(self._rendezvous.folder)
        else:
            assert self._on.rdzv_endpoint is not None
            _check_endpoint(self._on.rdzv_endpoint)
        self.start_process(["-c", START, *self._on.arguments(self.supervisor, path)], environment)
        if self._on.nodes > 1:
            others = f"{self._on.nodes - 1} other machine{'s' if self._on.nodes > 2 else ''}"
            command = self._on.command(self.supervisor, path)
            self.emit(job_events.Notice(-1, f"start on {others}:\n{command}", queued=True))
        threading.Thread(target=self._wait, name="labkit-torchrun", daemon=True).start()
        return {"agent": self.process.pid}

    def ranks_have_begun(self) -> None:
        """Take back what was to be typed."""
        if self._on.nodes > 1:
            self.emit(job_events.Notice(-1, ""))

    def _wait(self) -> None:
        self.process.wait()
        self.settle(0.0 if self.was_ended else SETTLE_S)

    def ending(self, seen: RanksSeen) -> job_events.JobEnded | None:
        """Return how the agent ended, if that is no rank's doing."""
        if seen.explains or self.was_ended:
            return None
        return job_events.JobEnded(
            -1,
            f"torchrun {_how(self.process.wait())}"
            + (", and its ranks with it" if seen.begun else " before any rank began"),
            self.what_it_wrote(),
            page="torchrun",
        )

    def end(self) -> None:
        """End the agent and, with it, its ranks; tell those on other machines."""
        if not self.is_going:
            return
        self.was_ended = True
        self.end_is_due()
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # After what needs no disk, which may be full. Here nobody is left to be told.
        if self._on.nodes > 1:
            try:
                self.directory.ask("end")
            except OSError as error:
                self.emit(job_events.Notice(-1, f"ranks on other machines could not be told to end: {error}"))

    def _family(self) -> list[psutil.Process]:
        try:
            agent = psutil.Process(self.process.pid)
            return [agent, *agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """End an agent that does not take its leave."""
        self.end()

    def close(self) -> None:
        """Let the agent take its leave of the others, and end what is left."""
        super().close()
        if self._rendezvous is not None:
            self._rendezvous.close()


def be_agent() -> None:
    """Be torchrun, in the agent's own process.

    Agents of several machines meet in a store that holds pickles, so anybody who reaches it can run code. By default
    the store listens on every interface; a single agent opens none.
    """
    from torch.distributed import TCPStore, run
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, rendezvous_handler_registry

    from labkit.launchers.one_machine import OneMachine
    from labkit.launchers.tcp_store import is_address, listen

    gc.enable()  # which `die_with_parent` has turned off

    def store(host: str, port: int, is_master: bool, **options: Any) -> TCPStore:
        if is_master and is_address(host):
            try:
                listener = listen(host, port, backlog=128)
            except OSError as error:
                raise RuntimeError(str(error)) from error  # another agent may be the host: to be joined
            port, options["master_listen_fd"] = listener.getsockname()[1], listener.detach()
        return TCPStore(host, port, is_master=is_master, **options)

    vars(c10d_rendezvous_backend)["TCPStore"] = store
    rendezvous_handler_registry.register(ONE_MACHINE, lambda parameters: OneMachine(parameters.run_id))
    run.main(sys.argv[1:])


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _check_endpoint(endpoint: str) -> None:
    """Raise ValueError if no agent can listen there: one that listens may be another run's, which would be joined."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"something listens at {endpoint} already; give another port as rdzv_endpoint") from None
        raise ValueError(
            f"rdzv_endpoint={endpoint!r} is no address of this machine ({error.strerror or error}); it names a port "
            "here, by a name that the other machines know"
        ) from None
