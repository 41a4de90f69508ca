"""One node of a run elsewhere: a `LocalEngine` runs its ranks as it runs the notebook's own; their events are relayed.

SLURM, Ray or a test starts one agent per node. What its ranks report goes into one stream of bytes, framed as in the
pipes of a local run. Node 0's agent alone is told what the notebook asks ("stop", "stacks", "end"), and tells the
others: `labkit.launchers.nodes`. It reserves a port for the store that rank 0 opens, where all ranks rendezvous.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

from labkit.engines.local import LocalEngine
from labkit.engines.spawn import RankProcess
from labkit.launchers.nodes import Board, BoardServer, Exchange, Nodes, board_of_node_zero
from labkit.launchers.run_folder import RunFolder
from labkit.protocol import events
from labkit.protocol.job import Job
from labkit.rank import ports
from labkit.system import host as system
from labkit.system.out_of_memory import OutOfMemoryKills

LOOK_S = 0.05
"""Time to wait for what the ranks report before looking elsewhere …"""

GATHER_S = 0.13
"""… and that between two writes: with the looks below they are ten operations on the folder a second at most, however
many ranks there are and however often they log."""

ASKED_EVERY_S = 0.5
"""Time between two looks at what is asked: on node 0 each opens a file on what may be everybody's file system."""

FAILURE_GRACE_S = 2.0
"""How long the other ranks may still report after the first has failed; as long again, until all nodes are to end."""

LEAVE_S = 1.0
"""How long node 0 waits for the others to leave."""

NODE_ZERO_S = 300.0
"""How long a node waits for node 0."""

SIGNAL_S = 1.0
"""How long this node's own SIGTERM is waited for when a rank has died of one: SLURM signals process after process."""

STAY_S = 600.0
"""How long a node whose ranks stopped at SLURM's signal waits for the end: a job that ends itself is not requeued."""


class NodeZero(NamedTuple):
    """Where node 0 is to be found."""

    hosts: list[str]
    """Any of them, likely ones first."""
    store: int
    """Port of the store that rank 0 opens, through which the ranks of all nodes rendezvous."""
    agent: int
    """Port of its agent …"""
    token: str
    """… and what has the agent answer."""


class NodeEngine(LocalEngine):
    """The ranks of one node, whose processes have been started already."""

    def __init__(self, first: int, processes: list[RankProcess]) -> None:
        super().__init__(len(processes), first)
        self._started = processes

    def _take(self) -> list[RankProcess]:
        return self._started

    def _give_back(self, ranks: list[RankProcess]) -> None:
        for process in ranks:
            process.close()


class NodeAgent:
    """Runs the ranks of node `number`, the processes that wait for a job there."""

    def __init__(self, number: int, processes: list[RankProcess]) -> None:
        self._engine = NodeEngine(number * len(processes), processes)
        self._board: Board | None = None
        self._reserved: socket.socket | None = None
        self._kill_s, self._memory_kills = float("inf"), OutOfMemoryKills()
        self._to_say: list[str] = []
        """Words that this node has for all."""
        self._returned: set[int] = set()
        self._codes: dict[int, int] = {}
        """Exit codes of the ranks that have ended."""
        self.was_signalled = self.was_ended = self.all_returned = False
        """Whether the scheduler takes this node away; whether the notebook has ended the ranks; whether every rank of
        every node has returned."""

    def be_node_zero(self, address: str) -> NodeZero:
        """Listen at an address for the other agents, and reserve a port there for the store of the ranks."""
        self._board = Board()
        (store, self._reserved), agents, token = ports.reserve(address), ports.listen(address), secrets.token_hex()
        BoardServer(agents, self._board, token)
        return NodeZero([address, *own_addresses()], store, agents.getsockname()[1], token)

    def note_signal(self, *_: Any) -> None:
        """Handle SIGTERM: have the ranks of all nodes stop at a common step.

        SLURM sends it when it takes the machines away (preemption, `scancel`, the time limit, `scontrol requeue`), and
        SIGKILL only when its grace is over: KillWait, 30 s unless the cluster says otherwise. That is the ranks' time
        for a last checkpoint.
        """
        self.was_signalled = True
        self._to_say.append("stop")

    def run(
        self,
        job: Job,
        zero: NodeZero | None,
        put: Callable[[list[events.Event]], object],
        asked: Callable[[], list[str]],
    ) -> int:
        """Run the job's ranks on this node to their end, and wait for the other nodes; return 0 if all ended well.

        Without `zero` this is the only node.
        """
        nodes = 1
        exchange: Exchange = (self._board or Board()).exchange
        if zero is not None:
            host, mine = reachable(zero)
            nodes = job.world_size // self._engine.world_size
            if self._board is None:
                exchange = board_of_node_zero(host, zero.agent, zero.token)
            environment = {**interface(mine), **job.environment}
            job = job._replace(store=f"tcp://{host}:{zero.store}", environment=environment)
        self._engine.start(job)
        try:
            self._follow(Nodes(exchange), nodes, put, asked)
        except ConnectionError as error:
            print(error, flush=True)
            return 1
        finally:
            self._engine.close()
        return int(any(self._codes.values()))

    def _follow(
        self,
        nodes: Nodes,
        count: int,
        put: Callable[[list[events.Event]], object],
        asked: Callable[[], list[str]],
    ) -> None:
        look_s, has_ended, give_up_s = 0.0, False, float("inf")
        while not (has_ended and nodes.count("over") >= count) and time.monotonic() < give_up_s:
            if self._to_say or time.monotonic() > look_s:
                look_s = time.monotonic() + ASKED_EVERY_S
                words, self._to_say = [*asked(), *self._to_say], []
                for word in nodes.say(words):
                    self._obey(word)
            if found := self._engine.poll(LOOK_S):
                self._await_signal(found)
                put([self._noted(event) for event in found])
                time.sleep(GATHER_S)
            if time.monotonic() > self._kill_s:
                self._engine.kill()
            if len(self._codes) == self._engine.world_size and not has_ended:
                has_ended = True
                nodes.count("returned", len(self._returned))
                nodes.count("over", 1)
            if has_ended and self._kill_s < float("inf"):  # a node may be lost
                give_up_s = min(give_up_s, max(self._kill_s, time.monotonic()) + FAILURE_GRACE_S)
        self.all_returned = nodes.count("returned") == count * self._engine.world_size
        # Node 0, whose agent the others ask, leaves last.
        left, until_s = nodes.count("left", 1), time.monotonic() + LEAVE_S
        while self._board is not None and left < count and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            left = nodes.count("left")

    def _obey(self, word: str) -> None:
        if word == "stop":
            self._engine.ask_to_stop()
        elif word == "stacks":
            self._engine.ask_for_stacks()
        elif word == "end":
            self.was_ended, self._kill_s = True, 0.0
        elif word == "failed" and self._kill_s == float("inf"):
            self._engine.ask_for_stacks()  # the notebook may ask too late
            self._kill_s = time.monotonic() + FAILURE_GRACE_S

    def _await_signal(self, found: list[events.Event]) -> None:
        """Wait a moment for this node's own SIGTERM, if ranks have died of one."""
        is_sent = any(isinstance(event, events.Exit) and event.code == -signal.SIGTERM for event in found)
        until_s = time.monotonic() + SIGNAL_S
        while is_sent and not self.was_signalled and time.monotonic() < until_s:
            time.sleep(LOOK_S)

    def _noted(self, event: events.Event) -> events.Event:
        if isinstance(event, events.Result):
            self._returned.add(event.rank)
        if not isinstance(event, events.Exit):
            return event
        self._codes[event.rank] = event.code
        is_taken = self.was_signalled and event.rank not in self._returned  # it may begin again
        ended = is_taken or self._engine.killed(event.rank)
        starved = self._memory_kills.seen() if event.code == -system.kill_signal and not ended else ""
        if event.code and not ended:
            self._to_say.append("failed")
        return event._replace(ended=ended, at_s=time.time(), out_of_memory=starved)


def run_in_folder(
    folder: RunFolder, about: dict[str, Any], number: int, attempt: int, processes: list[RankProcess], came: list[int]
) -> int:
    """Run one node of a run that has a folder; `came` are the SIGTERMs that came before."""
    asked = folder.words(from_the_start=not attempt) if number == 0 else None
    agent, zero = NodeAgent(number, processes), None
    signal.signal(signal.SIGTERM, agent.note_signal)
    if came:
        agent.note_signal()
    if about["nodes"] > 1:
        name = f"node_zero.{attempt}.json"
        if number == 0:
            zero = agent.be_node_zero(about.get("address") or routed_address())
            folder.write(name, json.dumps(zero).encode())
        zero = NodeZero(*json.loads(folder.wait_for(name, NODE_ZERO_S)))
    code = agent.run(folder.job(), zero, folder.stream(number, attempt).put, asked.new if asked else list)
    if agent.was_signalled and agent.all_returned:
        folder.note_done()
    elif agent.was_signalled and "SLURM_JOB_ID" in os.environ and not (code or agent.was_ended):
        time.sleep(STAY_S)
    return code


def routed_address() -> str:
    """Return this node's address on the network by which SLURM reached it. No packet is sent to find out."""
    with contextlib.suppress(OSError, KeyError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["SLURM_LAUNCH_NODE_IPADDR"], 9))
        return str(probe.getsockname()[0])
    return socket.gethostname()


def own_addresses() -> list[str]:
    """Return the other names and addresses of this node."""
    found = [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    for addresses in psutil.net_if_addrs().values():
        found += [a.address for a in addresses if a.family == socket.AF_INET and not a.address.startswith("127.")]
    return list(dict.fromkeys(filter(None, found)))


def reachable(zero: NodeZero) -> tuple[str, str]:
    """Return the host at which node 0 answers, and this node's own address on that network."""
    for host in zero.hosts:
        with contextlib.suppress(OSError), socket.create_connection((host, zero.agent), 1) as connection:
            return host, str(connection.getsockname()[0])
    raise ConnectionError(f"node 0 does not answer at {', '.join(zero.hosts)}, port {zero.agent}")


def interface(address: str) -> dict[str, str]:
    """Return the variables that have gloo, NCCL and TensorPipe use the interface with this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            libraries = (f"{library}_SOCKET_IFNAME" for library in ("GLOO", "NCCL", "TP"))
            found = {variable: name for variable in libraries if variable not in os.environ}
            return {**found, "LABKIT_INTERFACES": " ".join(found)}  # not meant for ranks on other machines
    return {}
