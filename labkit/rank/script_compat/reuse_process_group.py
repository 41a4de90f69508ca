"""`init_process_group` in a launched function: a script that was written for torchrun or mp.spawn runs unchanged.

What it finds is one function for the life of the process, for a library may have imported it in an earlier job. Who
meets otherwise, `torch.distributed.rpc` by `env://`, say, finds the job's store: `labkit.rank.file_store`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.protocol.job import Job, RankHook
from labkit.rank import process_group
from labkit.rank.channels import Channel
from labkit.rank.device import is_nccl


def _meeting_place() -> list[str | None]:
    """Return the rank, world size, address and port that `env://` reads from the environment.

    See https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization.
    """
    return [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]


@dataclass
class _Within:
    """The job that this process is doing."""

    store: dist.Store
    in_cells: bool
    """Whether its group stays from cell to cell."""
    rank: int
    world_size: int
    has_limit: bool = False
    """Whether the launch says how long a collective may take."""
    environment: list[str | None] = field(default_factory=_meeting_place)
    """Where and as what the rank joins a group, as the launch has it."""
    pid: int = field(default_factory=os.getpid)
    asked: Counter[str] = field(default_factory=Counter)
    """How often its function has called `init_process_group`, by the address that it gave."""


_within: _Within | None = None

_init_process_group = dist.init_process_group


class ReuseProcessGroup(RankHook):
    """Has a script that joins the group itself find that it has."""

    @contextlib.contextmanager
    def around(self, job: Job, channel: Channel) -> Iterator[None]:
        """Return the context in which it does."""
        global _within
        assert channel.store is not None
        # By this variable every rank would join the store at MASTER_PORT, and none open it: also at a port that the
        # script has chosen, and in processes that it starts, whose world is another.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        rank, has_limit = int(os.environ["RANK"]), job.pg_timeout_s is not None
        _within = _Within(channel.store, job.group is not None, rank, job.world_size, has_limit)
        if dist.init_process_group is not _init_as_under_torchrun:
            _put_in_place()
        if job.pg_timeout_s is not None:  # not in joining: the ranks of a cluster may begin minutes apart
            process_group.set_timeout(timedelta(seconds=job.pg_timeout_s))
        try:
            yield
        finally:
            _within = None


def _put_in_place() -> None:
    """Put ours in the place of torch's, also where it has been imported by its name: in a script, say."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("init_process_group") is _init_process_group:
            vars(module)["init_process_group"] = _init_as_under_torchrun


@functools.wraps(_init_process_group)
def _init_as_under_torchrun(*args: Any, **options: Any) -> None:
    """Find the group in which this rank is already, at the first call, whatever address or store it was to meet at.

    A script that has destroyed it gets another through the job's store; or PyTorch's own, if it has changed what its
    environment says. Raises ValueError if it asks for another group than there is.
    """
    within = _within
    if within is None or within.pid != os.getpid():
        return _init_process_group(*args, **options)
    asked = inspect.signature(_init_process_group).bind(*args, **options).arguments
    url = urlsplit(str(asked.get("init_method") or "env://"))
    wanted: dict[str, Any] = {
        name: int(value) for name, value in parse_qsl(url.query) if name in ("rank", "world_size")
    }
    wanted |= {name: asked[name] for name in ("rank", "world_size") if asked.get(name, -1) != -1}
    is_first = not within.asked
    within.asked[at := url._replace(query="").geturl()] += 1
    if not dist.is_initialized():
        if url.scheme == "env" and within.environment != _meeting_place():
            return _init_process_group(*args, **options)
        if asked.get("store") is None:
            # Under the address as a key: ranks that form several groups have chosen one for each.
            asked["store"] = dist.PrefixStore(f"group/{at}/{within.asked[at]}", within.store)
            asked.pop("init_method", None)
        return _init_process_group(**{**asked, "rank": within.rank, "world_size": within.world_size, **wanted})
    if not is_first and not within.in_cells:
        return _init_process_group(*args, **options)  # a second time, which is an error
    _check(wanted, within)
    if asked.get("timeout") is not None:
        process_group.set_timeout(asked["timeout"])
    elif is_nccl(dist.get_backend()) and not within.has_limit:
        process_group.set_timeout(distributed_c10d._get_default_timeout(str(asked.get("backend")).lower()))
    return None


def _check(wanted: dict[str, int], within: _Within) -> None:
    rank = within.rank
    for name, here in (("world_size", within.world_size), ("rank", rank)):
        if wanted.get(name, here) != here:
            raise ValueError(
                f"rank {rank} asks for a process group in which {name} is {wanted[name]}, but it was launched with "
                f"{here}: write worker.{name}. Ranks that form a group of their own leave that of all first: "
                "dist.destroy_process_group()"
            )
