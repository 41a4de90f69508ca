"""A rank that SLURM or Ray has started: the same `worker`, with a run's directory where others have pipes.

`supervisor` starts it, and ends with its launcher; this process ends with its supervisor.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from labkit.launchers.environments import launcher_here
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.files import clock_off_s
from labkit.launchers.run_directory.sender import FileSender, printing_never_fails
from labkit.launchers.tcp_store import RENDEZVOUS_S, is_address, join_store, open_store
from labkit.protocol import events
from labkit.protocol.job import RankInfo
from labkit.rank import script_compat
from labkit.rank.channels import Channel
from labkit.rank.local_rendezvous import LocalRendezvous, open_file_store, serve_master_port
from labkit.rank.main import RankTask, do_and_exit, fast_exit, read_job
from labkit.rank.private_folder import check_rendezvous, is_in_use
from labkit.rank.signals import handle_signals
from labkit.system import host

SIGCONT_S = 0.2
"""How long a process that is told to end waits for the SIGCONT by which SLURM's signals are known …"""

SIGCONT_SINCE_S = 5.0
"""… and how long ago that may have come."""

FIND_EVERY_S = 0.02
"""Time between two looks whether it has."""


class FileChannel(Channel):
    """The channel of a rank that another machine may have: what it reports goes to its file."""

    def __init__(self, directory: RunDirectory, rank: int, attempt: int) -> None:
        super().__init__()
        self.directory, self.rank = directory, rank
        self.sender = FileSender(directory.file(rank, attempt, "records"))

    def _send(self, event: events.Event) -> None:
        self.sender.send(event)


def listen(receive: Callable[[str], None]) -> None:
    """Call `receive` with each word from the supervisor, in a thread of its own. Without one the process ends."""
    threading.Thread(target=_listen, args=(receive,), name="labkit-listen", daemon=True).start()


def _listen(receive: Callable[[str], None]) -> None:
    with os.fdopen(os.dup(0), encoding="utf-8") as words:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what the function starts is not to take words away
        for word in words:
            receive(word.strip())
    fast_exit(1)  # the supervisor is gone, and its launcher with it


def main() -> NoReturn:
    """Run one rank: `rank_entry DIRECTORY RANK ATTEMPT`, with the launcher's variables in the environment."""
    directory, rank, attempt = RunDirectory(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

    def prepare() -> Callable[[], RankTask | None]:
        begin(directory.open(rank, attempt, "stacks"))
        channel = FileChannel(directory, rank, attempt)
        listen(channel.receive)
        atexit.register(channel.sender.flush)  # first, so that it is called last
        info = rank_info_here()
        job = read_job(directory.job, channel)
        correct_clock(channel.sender, info, directory)
        about = directory.about()  # the notebook's own folder, where that is here too
        with contextlib.suppress(OSError):
            os.chdir(about["cwd"])
        return lambda: RankTask(job, info, channel, lambda job, info: rendezvous(info, directory, attempt))

    do_and_exit(prepare)


def correct_clock(sender: FileSender, info: RankInfo, directory: RunDirectory) -> None:
    """Have the times that a rank reports be by the notebook's clock, should this machine's be off; say so then."""
    sender.clock_off_s = clock_off_s(directory.path, sender.path)
    if sender.clock_off_s and info.local_rank == 0:
        how = f"{abs(sender.clock_off_s):,.0f} s {'ahead of' if sender.clock_off_s > 0 else 'behind'} the notebook's"
        sender.warn("clock", f"the clock of {host.node()} is {how}; times from there are corrected", info.rank)


def begin(stacks: int) -> None:
    """Prepare this process, whose stacks go to that file when it is asked where it stands."""
    script_compat.begin()
    handle_signals(stacks)
    outlive_the_launchers_signal()
    faulthandler.enable()
    sys.stdout, sys.stderr = printing_never_fails(sys.stdout), printing_never_fails(sys.stderr)


def outlive_the_launchers_signal() -> None:
    """Have SLURM's SIGTERM end neither this process nor those that it forks: the supervisor says what is to happen.

    SLURM sends it to every process of a job, whose ranks may then still take a last checkpoint, and need a DataLoader's
    workers until then. What ends a worker otherwise, `Process.terminate()`, sends the same signal; but SLURM's comes
    with a SIGCONT. Programs that a rank starts, spawned workers among them, are ended by SLURM's signal.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=_obey_others_only)


def _obey_others_only() -> None:
    """Have SIGTERM end this forked process, unless it is SLURM's."""
    continued_s, is_meant = float("-inf"), False

    def note(*_: Any) -> None:
        nonlocal continued_s
        continued_s = time.monotonic()

    def decide() -> None:
        nonlocal is_meant
        if time.monotonic() - continued_s > SIGCONT_SINCE_S:
            is_meant = True
            os.kill(os.getpid(), signal.SIGTERM)

    def take(*_: Any) -> None:
        if is_meant:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        # Later, in another thread: of signals that have come together Python handles SIGTERM first, and SIGCONT only
        # when this has returned.
        later = threading.Timer(SIGCONT_S, decide)
        later.daemon = True
        later.start()

    for number, handler in ((host.continue_signal, note), (signal.SIGTERM, take)):
        signal.signal(number, handler)
        signal.siginterrupt(number, False)


def rank_info_here() -> RankInfo:
    """Return which rank this process is, as its launcher has put it into the environment."""
    here = launcher_here()
    return RankInfo(*(here.number(what) for what in RankInfo._fields))


def rendezvous(info: RankInfo, directory: RunDirectory, attempt: int) -> dist.Store:
    """Return the store through which the ranks find each other.

    Ranks of one machine meet in a file that no other user can open. For several, rank 0 takes a free port of its own
    and publishes its address in the run's directory, so that nobody must know names or free ports beforehand. Bytes
    alone pass through the store.
    """
    alone = info.local_world_size == info.world_size
    store = _meet_here(info, directory, attempt) if alone else _meet_by_network(info, directory, attempt)
    serve_master_port(store)
    return store


def _meet_by_network(info: RankInfo, directory: RunDirectory, attempt: int) -> dist.Store:
    own = _own_address()
    _use_interface(own)
    published = published_name(attempt)
    if info.rank == 0:
        store = open_store(info.world_size, own)
        token = secrets.token_hex(16)
        store.set("labkit/token", token)
        addresses = [own] if is_address(own) else _addresses(own)
        directory.write(published, json.dumps({"addresses": addresses, "port": store.port, "token": token}).encode())
        os.environ.update(MASTER_ADDR=own, MASTER_PORT=str(store.port))
        return store
    return _published(directory, published, info, _join_published)


def _join_published(found: dict[str, Any], info: RankInfo) -> dist.Store:
    why = OSError("it has published no address")
    for address in found["addresses"]:
        try:
            socket.create_connection((address, found["port"]), 1).close()
        except OSError as error:
            why = OSError(f"at {', '.join(found['addresses'])}, port {found['port']}, nobody answers ({error})")
            continue
        store = join_store(address, found["port"], info.world_size)
        if store.get("labkit/token").decode() == found["token"]:
            os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(found["port"]))
            return store
        why = OSError(f"at {address}, port {found['port']}, another store answers")
    raise why


def published_name(attempt: int) -> str:
    """Return the name of the file by which rank 0 says where the store is: of this job, step and attempt."""
    return ".".join(["rendezvous", *launcher_here().job(), str(attempt), "json"])


def _published(
    directory: RunDirectory,
    name: str,
    info: RankInfo,
    join: Callable[[dict[str, Any], RankInfo], dist.Store],
) -> dist.Store:
    """Join the store that rank 0 has published. `join` raises OSError for one that an earlier run left behind."""
    deadline = time.monotonic() + RENDEZVOUS_S
    why = f"it has not written {directory.path / name}"
    while time.monotonic() < deadline:
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((directory.path / name).read_text(encoding="utf-8"))
        try:
            if found:
                return join(found, info)
        except OSError as error:
            why = str(error)
        time.sleep(FIND_EVERY_S)
    raise TimeoutError(f"rank {info.rank} has waited {RENDEZVOUS_S:g} s for rank 0: {why}")


# Ranks of one machine

_mine: LocalRendezvous | None = None
"""Where rank 0 has made the ranks meet last."""


def _meet_here(info: RankInfo, directory: RunDirectory, attempt: int) -> dist.Store:
    global _mine
    _use_interface("127.0.0.1")
    if info.rank == 0:
        leave_rendezvous()
        _mine = LocalRendezvous()  # not in the directory, which may be on a network, without locks
        found = {"file": str(_mine.file), "port": _mine.port}
        store = _join_here(found, info)
        directory.write(published_name(attempt), json.dumps(found).encode())
    else:
        store = _published(directory, published_name(attempt), info, _join_here)
    return store


def leave_rendezvous() -> None:
    """Remove the folder in which ranks have met, if this process has made one."""
    global _mine
    former, _mine = _mine, None
    if former is not None:
        former.close()


def _join_here(found: dict[str, Any], info: RankInfo) -> dist.Store:
    file = Path(found["file"])
    check_rendezvous(file.parent)
    if not is_in_use(file.parent):
        raise OSError(f"{file.parent} is left of a run that is over")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(found["port"]))
    return open_file_store(file, timeout_s=RENDEZVOUS_S)


def _own_address() -> str:
    """Return this node's address on the network over which SLURM reached it. No packet is sent to find out.

    On Ray it is the address by which the other nodes know this one.
    """
    if known := os.environ.get("LABKIT_NODE_ADDRESS"):
        return known
    with contextlib.suppress(OSError, KeyError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["SLURM_LAUNCH_NODE_IPADDR"], 9))
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _addresses(own: str) -> list[str]:
    """Return all by which others may reach this node, likely ones first."""
    found = [own, os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    for addresses in psutil.net_if_addrs().values():
        found += [a.address for a in addresses if a.family == socket.AF_INET and not a.address.startswith("127.")]
    return list(dict.fromkeys(filter(None, found)))


def _use_interface(address: str) -> None:
    """Have gloo, NCCL and TensorPipe use the interface with this address, unless the environment says which.

    `LABKIT_INTERFACES` names what is set here: ranks that this one launches elsewhere may have another.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            unset = [n for n in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME") if n not in os.environ]
            os.environ |= {**dict.fromkeys(unset, interface), "LABKIT_INTERFACES": " ".join(unset)}
            return
