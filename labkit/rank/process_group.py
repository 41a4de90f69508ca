"""How a rank joins its process group and leaves it. Runs in the rank's own process.

A process that does one job leaves its group by ending. One that stays (reserved ranks) must leave it as thoroughly: the
others have to learn that this rank takes no part any more. `destroy_process_group` alone does not tell them, as long as
anything still refers to the group: a model kept in a global variable, the frames of an exception. gloo's connections
then stay open, and whoever waits in a collective waits for ever. So the connections that were made in joining are shut
down, as the end of the process would do. What still fails: a subgroup's own connections (`new_group`) are not known
here, so whoever waits in a subgroup that a failed rank still refers to is ended after the usual grace.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from labkit.protocol.job import Job, RankInfo

LEAVE_TOGETHER_S = 0.25
"""How long a rank that has returned waits for the others to return before it leaves the process group."""


class Joined(NamedTuple):
    """The process group that this process is in."""

    number: int | None
    """Of a group that stays from cell to cell; None for a job's own."""
    store: dist.Store
    device: torch.device
    connections: frozenset[str]
    """Made in joining it, as Linux names them; none where the process ends with its job."""


_joined: Joined | None = None
_asked = 0
"""How often the reader's function has called `init_process_group`."""

_init_process_group = dist.init_process_group
_device_of_cells: torch.device | None = None


def kept_for(job: Job) -> Joined | None:
    """Return the group that this job finds in info, if it is one of cells."""
    return _joined if _joined is not None and job.group is not None and _joined.number == job.group else None


def device_of_cells(job: Job) -> torch.device | None:
    """Return the device of this rank if the job is a cell and this process has had cells before."""
    return _device_of_cells if job.group is not None else None


def join(
    job: Job, info: RankInfo, device: torch.device, rendezvous: Callable[[Job, RankInfo], dist.Store]
) -> dist.Store:
    """Join the group of a job, having left any other, and return the store through which its ranks meet."""
    global _joined, _device_of_cells, _asked
    leave()
    store = rendezvous(job, info)
    backend = job.backend or _backend_for(info, device, store)
    before = _open_sockets() if job.reserved else {}
    _init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=info.rank,
        world_size=info.world_size,
        device_id=device if backend == "nccl" else None,
    )
    if job.group is not None:
        _device_of_cells = device
    connections = frozenset(_open_sockets() if job.reserved else before) - frozenset(before)
    _joined = Joined(job.group, store, device, connections)
    _asked = 0
    dist.init_process_group = dist.distributed_c10d.init_process_group = _init_as_under_torchrun
    return store


def leave_together(job: Job, info: RankInfo, before_leaving_alone: Callable[[], None]) -> None:
    """Wait a moment for the other ranks to return, then leave the process group.

    A rank that closes its connections while another still reads the last collective can make that one fail. Ranks
    that return much later are not waited for: if they are in a collective, they must learn that this rank is gone;
    `before_leaving_alone` is called then.
    """
    together, store = False, _joined.store if _joined else None
    with contextlib.suppress(RuntimeError):  # the rank that keeps the store has left
        together = store is not None and _wait_for(store, "labkit/returned", 1, job.world_size)
    if not together:
        before_leaving_alone()
    leave()
    if store is not None and together and not job.port:  # rank 0 keeps the store, and so leaves last
        with contextlib.suppress(RuntimeError):
            if info.rank:
                store.add("labkit/left", 1)
            else:
                _wait_for(store, "labkit/left", 0, job.world_size - 1)


def leave() -> None:
    """Leave the process group, if this process is in one, at once and for good."""
    global _joined
    joined, _joined = _joined, None
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except RuntimeError as error:
        print(f"labkit: leaving the process group failed: {error}", file=sys.stderr)
    # One that could not be made, because a rank left meanwhile, has been counted too. The count is in the keys by which
    # ranks meet: this one and a new process would wait for each other for ever.
    dist.distributed_c10d._world.group_count = 0
    if joined is not None:
        _shut_down(joined.connections)


@functools.wraps(_init_process_group)
def _init_as_under_torchrun(*args: Any, **options: Any) -> None:
    """Have a script that was written for torchrun, and joins the group itself, find that it has.

    Its first call finds the group in which this rank is already. One that has destroyed it gets another through the
    same store, as the port in `MASTER_PORT` is taken. Raises ValueError if it asks for another group than there is.
    """
    global _asked
    asked = inspect.signature(_init_process_group).bind(*args, **options).arguments
    if _joined is None or asked.get("store") is not None or asked.get("init_method") not in (None, "env://"):
        return _init_process_group(*args, **options)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _asked += 1
    if not dist.is_initialized():
        asked.pop("init_method", None)
        store = dist.PrefixStore(f"group/{_asked}", _joined.store)
        return _init_process_group(**{**asked, "store": store, "rank": rank, "world_size": world_size})
    if _asked > 1 and _joined.number is None:
        return _init_process_group(*args, **options)  # a second time, which is an error
    there, backend = dist.get_backend(), asked.get("backend")
    if backend is not None and there not in re.split("[:,]", str(backend).lower()):
        raise ValueError(
            f"rank {rank} asks for a process group with {backend}, but labkit.launch has made one with {there}: "
            f"launch(…, backend={str(backend)!r})"
        )
    if asked.get("world_size", -1) not in (-1, world_size):
        raise ValueError(
            f"rank {rank} asks for a process group of {asked['world_size']} ranks, but {world_size} were launched"
        )
    return None


def _backend_for(info: RankInfo, device: torch.device, store: dist.Store) -> str:
    """Choose nccl where every rank has a GPU of its own, wherever the ranks are; else gloo."""
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    keys = [f"labkit/gpu/{rank}" for rank in range(info.world_size)]
    store.set(keys[info.rank], mine)
    gpus = set(store.multi_get(keys))
    return "nccl" if b"" not in gpus and len(gpus) == info.world_size and dist.is_nccl_available() else "gloo"


def _wait_for(store: dist.Store, key: str, mine: int, expected: int) -> bool:
    """Count oneself, and wait a moment until all have been counted."""
    count = store.add(key, mine)
    deadline = time.monotonic() + LEAVE_TOGETHER_S
    while count < expected and time.monotonic() < deadline:
        time.sleep(0.002)
        count = store.add(key, 0)
    return count >= expected


def _open_sockets() -> dict[str, int]:
    """Return this process's sockets by name, with a descriptor of each. Empty where the system does not list them."""
    found = {}
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if name.startswith("socket:"):
                    found[name] = int(descriptor)
    return found


def _shut_down(connections: frozenset[str]) -> None:
    for name, descriptor in _open_sockets().items():
        if name not in connections:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            # gloo ends the process if the socket on which it listens is shut down under it.
            if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                end.shutdown(socket.SHUT_RDWR)
