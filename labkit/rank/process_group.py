"""How a rank joins its process group and leaves it. Runs in the rank's own process.

On reserved ranks cells have a group that stays from cell to cell; a launch has a group of its own, as in a new process.

A process that does one job leaves its group by ending. One that stays must leave it as thoroughly: the others have to
learn that this rank takes no part any more. `destroy_process_group` alone does not tell them, as long as anything still
refers to the group: a model kept in a global variable, the frames of an exception. gloo's connections then stay open,
and a rank that waits in a collective waits indefinitely. So the connections that were made in joining are shut down, as
the end of the process would do. What still fails: a subgroup's own connections (`new_group`) are not known here, so a
rank that waits in a subgroup to which a failed rank still refers is ended after the usual grace.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.protocol.job import Job, RankInfo
from labkit.rank.channels import Channel
from labkit.rank.device import Settled, is_nccl, settle
from labkit.rank.file_store import LocalFileStore, pause_s, rendezvous
from labkit.system import host

LEAVE_TOGETHER_S = 0.25
"""How long a rank that has returned waits for the others to return before it leaves the process group."""

CONNECTED_S = 0.35
"""As long, if it is in groups that the launched function has made: `new_group` may return here before the others have
connected, and once this rank has left, they cannot. Less than what ranks are given after a failure
(`Engine.failure_grace_s`), so that this rank ends by itself."""


class Joined(NamedTuple):
    """The process group that this process is in."""

    number: int | None
    """Of a group that stays from cell to cell; None for a job's own."""
    settled: Settled
    store: dist.Store
    connections: frozenset[str]
    """Made in joining it, as Linux names them."""


_joined: Joined | None = None
_cells_are_set_up = False


def join_for(
    job: Job, info: RankInfo, channel: Channel, set_up: Callable[[Job, RankInfo], None]
) -> tuple[Settled, dist.Store]:
    """Return where a job computes, and the store of its group, which is that of the last cell or is joined now.

    `set_up` sets this rank's environment, threads and seeds.
    """
    global _joined, _cells_are_set_up
    if _joined is not None and job.group is not None and _joined.number == job.group:
        return _joined.settled, _joined.store
    leave()
    # Cells keep their settings and random states, also where a launch has ended their process group.
    if job.group is None or not _cells_are_set_up:
        set_up(job, info)
    channel.during = "joining the process group"
    store = rendezvous(job, info)
    channel.during = "starting"
    settled = settle(job, info, store)
    channel.during = "joining the process group"
    before = _connections(job)
    join(info, settled, store)
    _joined = Joined(job.group, settled, store, _connections(job) - before)
    _cells_are_set_up = _cells_are_set_up or job.group is not None
    return settled, store


def _connections(job: Job) -> frozenset[str]:
    """Return this process's connections, if they are to be shut down after the job."""
    return frozenset(host.open_sockets() if job.stays is not None else ())


def join(info: RankInfo, settled: Settled, store: dist.Store) -> None:
    """Join the group of a job, whose ranks meet through this store, and wait until all have.

    A rank that fails, or leaves, while another still makes its connections would break those off: the other could not
    make its process group, and would not come to where the first one failed.
    """
    # Threads of NCCL's own use the store, and are not to wait for Python.
    dist.init_process_group(
        settled.backend,
        store=dist.PrefixStore("group", native(store) if settled.backend != "gloo" else store),
        rank=info.rank,
        world_size=info.world_size,
        device_id=settled.device if settled.device.type == "cuda" and is_nccl(settled.backend) else None,
        timeout=default_timeout(settled.backend),
    )
    with contextlib.suppress(RuntimeError):  # the rank that keeps the store has gone, as the function finds out
        if store.add("labkit/joined", 1) >= info.world_size:
            store.set("labkit/all have joined", "")
        store.wait(["labkit/all have joined"], dist.default_pg_timeout)


def default_timeout(backend: str | None) -> timedelta:
    """Return how long PyTorch lets collectives take by default: 10 minutes with NCCL, else 30.

    Of "cpu:gloo,cuda:nccl" PyTorch makes 30 for both; a function that has not asked for that has NCCL's.
    """
    found: timedelta = distributed_c10d._get_default_timeout("nccl" if backend and is_nccl(backend) else str(backend))
    return found


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Have the collectives of a group, by default that of all ranks, wait as long as this, and no longer."""
    set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def native(store: dist.Store) -> dist.Store:
    """Return the store as PyTorch's own, without Python, where there is one."""
    return store.in_native_code if isinstance(store, LocalFileStore) else store


def leave_together(
    job: Job,
    info: RankInfo,
    store: dist.Store,
    has_failed: bool,
    alone: Callable[[], None],
) -> None:
    """Wait a moment for the other ranks to return, then leave the process group.

    A rank that closes its connections while another still reads the last collective can make that one fail. Ranks that
    return much later are not waited for: if they are in a collective, they must learn that this rank is gone; `alone`
    is called then. Nor is one that has failed, which says so here.
    """
    together = False
    wait_s = CONNECTED_S if dist.is_initialized() and len(dist.distributed_c10d._world.pg_map) > 1 else LEAVE_TOGETHER_S
    with contextlib.suppress(RuntimeError):  # the rank that keeps the store has left
        together = _wait_for(store, "labkit/returned", 1, 0 if has_failed else job.world_size, wait_s)
    if has_failed:
        return
    if not together:
        alone()
    leave()
    if together and not job.port:  # rank 0 keeps the store, and so leaves last
        with contextlib.suppress(RuntimeError):
            mine, expected = (1, 1) if info.rank else (0, job.world_size - 1)
            _wait_for(store, "labkit/left", mine, expected, LEAVE_TOGETHER_S)


def leave() -> None:
    """Leave the process group, if this process is in one, at once and for good.

    gloo's threads look every 10 ms whether they are to end, so to destroy a group takes some 20 ms: it is only let go
    of here, and ends in a thread of its own, while the next job begins.
    """
    global _joined
    joined, _joined = _joined, None
    try:
        if dist.is_initialized():
            groups = list(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
            when_left(groups.clear)
    except RuntimeError as error:
        print(f"labkit: leaving the process group failed: {error}", file=sys.stderr)
    # One that could not be made, because a rank left meanwhile, has been counted too. The count is in the keys by which
    # ranks meet: this one and a new process would wait for each other indefinitely.
    dist.distributed_c10d._world.group_count = 0
    if joined and joined.connections:
        when_left(lambda: _shut_down(joined.connections))


def _shut_down(connections: frozenset[str]) -> None:
    """Shut down those connections of a group that are still there."""
    for name, descriptor in host.open_sockets().items():
        if name not in connections:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            # gloo ends the process if the socket on which it listens is shut down under it.
            if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                end.shutdown(socket.SHUT_RDWR)


_leaving: threading.Thread | None = None
"""In which groups that were left end; the newest."""


def when_left(do: Callable[[], object]) -> None:
    """Do something in a thread, once the groups that were left are gone, unless something refers to them."""
    global _leaving
    before = _leaving

    def wait_and_do() -> None:
        if before is not None:
            before.join()
        do()

    _leaving = threading.Thread(target=wait_and_do, name="labkit-leaves-group", daemon=True)
    _leaving.start()


def _wait_for(store: dist.Store, key: str, mine: int, expected: int, at_most_s: float) -> bool:
    """Count oneself, and wait until all have been counted, but not longer than that."""
    count, began_s = store.add(key, mine), time.monotonic()
    while count < expected and (waited_s := time.monotonic() - began_s) < at_most_s:
        time.sleep(pause_s(waited_s))
        count = store.add(key, 0)
    return count >= expected
