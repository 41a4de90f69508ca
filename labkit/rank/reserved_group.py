"""The process group of a rank that stays for other jobs: how it keeps one, and leaves one.

Cells have a group that stays from cell to cell. A launch has a group of its own, as in a new process.

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
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from labkit.protocol.job import Job, RankInfo
from labkit.rank import file_store, process_group
from labkit.rank.channels import Channel
from labkit.rank.device import Settled, settle
from labkit.system import host


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


def join(
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
    store = file_store.rendezvous(job, info)
    settled = settle(job, info, store)
    before = frozenset(host.open_sockets())
    process_group.join(info, settled, store)
    _joined = Joined(job.group, settled, store, frozenset(host.open_sockets()) - before)
    _cells_are_set_up = _cells_are_set_up or job.group is not None
    return settled, store


def leave() -> None:
    """Leave the process group, if this process is in one, at once and for good."""
    global _joined
    joined, _joined = _joined, None
    process_group.leave()
    if joined and joined.connections:
        process_group.when_left(lambda: _shut_down(joined.connections))


def _shut_down(connections: frozenset[str]) -> None:
    """Shut down those connections of a group that are still there."""
    for name, descriptor in host.open_sockets().items():
        if name not in connections:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            # gloo ends the process if the socket on which it listens is shut down under it.
            if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                end.shutdown(socket.SHUT_RDWR)
