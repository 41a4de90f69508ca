"""`init_process_group` in a launched function: a script that was written for torchrun runs unchanged.

What it finds is one function for the life of the process, for a library may have imported it in an earlier job.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from labkit.protocol.job import Job, RankHooks
from labkit.rank.channels import Channel


class _Within(NamedTuple):
    """The job that this process is doing."""

    store: dist.Store
    in_cells: bool
    """Whether its group stays from cell to cell."""


_within: _Within | None = None
_asked = 0
"""How often its function has called `init_process_group`."""

_init_process_group = dist.init_process_group


class FindsTheGroup(RankHooks):
    """Has a script that joins the group itself find that it has."""

    @contextlib.contextmanager
    def around(self, job: Job, channel: Channel) -> Iterator[None]:
        """Return the context in which it does."""
        global _within, _asked
        assert channel.store is not None
        _within, _asked = _Within(channel.store, job.group is not None), 0
        dist.init_process_group = dist.distributed_c10d.init_process_group = _init_as_under_torchrun
        try:
            yield
        finally:
            _within = None


def _libraries(backend: str) -> set[str]:
    """Return what a backend is made of: "nccl", or by device "cpu:gloo,cuda:nccl"."""
    return {part.rpartition(":")[2] for part in backend.lower().split(",")}


@functools.wraps(_init_process_group)
def _init_as_under_torchrun(*args: Any, **options: Any) -> None:
    """Find the group in which this rank is already, at the first call.

    A script that has destroyed it gets another through the same store, as the port in `MASTER_PORT` is taken. Raises
    ValueError if it asks for another group than there is.
    """
    global _asked
    asked = inspect.signature(_init_process_group).bind(*args, **options).arguments
    if _within is None or asked.get("store") is not None or asked.get("init_method") not in (None, "env://"):
        return _init_process_group(*args, **options)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _asked += 1
    if not dist.is_initialized():
        asked.pop("init_method", None)
        store = dist.PrefixStore(f"group/{_asked}", _within.store)
        return _init_process_group(**{**asked, "store": store, "rank": rank, "world_size": world_size})
    if _asked > 1 and not _within.in_cells:
        return _init_process_group(*args, **options)  # a second time, which is an error
    there, backend = dist.get_backend(), asked.get("backend")
    if backend is not None and not _libraries(there) & _libraries(str(backend)):
        raise ValueError(
            f"rank {rank} asks for a process group with {backend}, but labkit.launch has made one with {there}: "
            f"launch(…, backend={str(backend)!r})"
        )
    if asked.get("world_size", -1) not in (-1, world_size):
        raise ValueError(
            f"rank {rank} asks for a process group of {asked['world_size']} ranks, but {world_size} were launched"
        )
    return None
