"""How a rank joins its process group and leaves it. Runs in the rank's own process."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.rank.device import is_nccl
from labkit.rank.file_store import LocalFileStore, pause_s

if TYPE_CHECKING:
    from labkit.protocol.job import Job, RankInfo
    from labkit.rank.device import Settled

LEAVE_TOGETHER_S = 0.25
"""How long a rank that has returned waits for the others to return before it leaves the process group."""

CONNECTED_S = 0.35
"""As long, if it is in groups that the launched function has made: `new_group` may return here before the others have
connected, and once this rank has left, they cannot. Less than what ranks are given after a failure
(`Engine.failure_grace_s`), so that this rank ends by itself."""


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
    """Leave the process group, if this process is in one.

    gloo's threads look every 10 ms whether they are to end, so to destroy a group takes some 20 ms: it is only let go
    of here, and ends in a thread of its own, while the next job begins.
    """
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
