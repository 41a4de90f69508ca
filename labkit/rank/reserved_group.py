"""The process group of a rank that stays for other jobs: how it keeps one, and leaves one.

Cells have a group that stays from cell to cell. A launch has a group of its own, as in a new process. NCCL's is slow to
make, so on a local session it stays for the next launch, if that finds it as good as new: all ranks returned, together;
none left it, or made another besides; the processes and devices are the same. Each rank knows that of itself only, and
one that joins a group while another keeps one would wait for ever. So as a launch begins each rank tells the others
which group it has kept, and they keep it if all have said the same. On a cluster each launch makes its own.

A process that does one job leaves its group by ending. One that stays must leave it as thoroughly: the others have to
learn that this rank takes no part any more. `destroy_process_group` alone does not tell them, as long as anything still
refers to the group: a model kept in a global variable, the frames of an exception. gloo's connections then stay open,
and whoever waits in a collective waits for ever. So the connections that were made in joining are shut down, as the end
of the process would do. What still fails: a subgroup's own connections (`new_group`) are not known here, so whoever
waits in a subgroup that a failed rank still refers to is ended after the usual grace.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import NamedTuple

import torch.distributed as dist

from labkit.protocol.job import RankInfo
from labkit.rank import main, process_group
from labkit.rank.device import Settled, is_nccl, settle
from labkit.rank.local_rendezvous import exchange, open_file_store
from labkit.system import host


class Joined(NamedTuple):
    """The process group that this process is in."""

    number: int | None
    """Of a group that stays from cell to cell; None for a job's own."""
    settled: Settled
    store: dist.Store
    connections: frozenset[str]
    """Made in joining it, as Linux names them."""
    name: str = ""
    """Of a group that may outlive its launch; "" for one that may not."""
    group: weakref.ref[dist.ProcessGroup] | None = None
    """The same; destroyed by the function, it is to end."""
    is_kept: bool = False
    """Whether it does."""


_joined: Joined | None = None
_cells_are_set_up = False


def join(part: main.RankTask) -> tuple[Settled, dist.Store]:
    """Return where a job computes, and the store of its group, which is that of the last cell or is joined now."""
    global _joined, _cells_are_set_up
    job, info, channel, rendezvous = part
    if _joined is not None and job.group is not None and _joined.number == job.group:
        return _joined.settled, _joined.store
    if not job.lasting_store:
        leave()
    # Cells keep their settings and random states, also where a launch has ended their process group.
    if job.group is None or not _cells_are_set_up:
        main.set_up(job, info)
    channel.during = "joining the process group"
    store = rendezvous(job, info)
    settled = settle(job, info, store)
    lasts = bool(job.lasting_store) and is_nccl(settled.backend)
    if lasts and _have_all_kept(info, settled, store):
        # As in a new one: an earlier launch, or somebody at a prompt, may have changed it.
        process_group.set_timeout(process_group.default_timeout(settled.backend))
        return settled, store
    leave()
    before = frozenset(host.open_sockets())
    name = str(job.start_s) if lasts else ""
    process_group.join(info, settled, store, _lasting_store(job.lasting_store, name) if lasts else None)
    group = weakref.ref(dist.group.WORLD) if name and dist.group.WORLD is not None else None
    _joined = Joined(job.group, settled, store, frozenset(host.open_sockets()) - before, name, group)
    _cells_are_set_up = _cells_are_set_up or job.group is not None
    return settled, store


def _have_all_kept(info: RankInfo, settled: Settled, store: dist.Store) -> bool:
    """Whether all ranks of a launch have kept the same group, each on the device where it is to compute now."""
    global _joined
    mine = _joined if _joined is not None and _joined.is_kept and _joined.settled == settled else None
    name = mine.name if mine is not None and dist.get_world_size() == info.world_size else ""
    kept = exchange(store, "labkit/kept", name, info)
    if _joined is None or not name or set(kept) != {name}:
        return False
    _joined = _joined._replace(store=store, is_kept=False)
    return True


_lasting: dict[str, dist.Store] = {}
"""By their files."""


def _lasting_store(file: str, name: str) -> dist.Store:
    if file not in _lasting:
        _lasting[file] = open_file_store(file)
    return dist.PrefixStore(f"group/{name}", process_group.native(_lasting[file]))


def keep() -> bool:
    """Keep the process group for the next launch, if that may find it as good as new; return whether."""
    global _joined
    if _joined is None or _joined.group is None or not dist.is_initialized():
        return False
    if _joined.group() is not dist.group.WORLD or _groups() != 1:
        return False
    _joined = _joined._replace(is_kept=True)
    return True


def _groups() -> int:
    """Return how many process groups this process has made since it was in none."""
    return int(dist.distributed_c10d._world.group_count)


def leave_unless_kept() -> None:
    """Leave the process group, if this process is in one that is not kept for the next launch."""
    if _joined is None or not _joined.is_kept:
        leave()


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
