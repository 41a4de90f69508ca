"""A part of a save that all ranks do together: if it fails on one, it is raised on all, and none waits for another."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from labkit.checkpoint.files import CheckpointError

CULPRIT_FIRST_S = 0.5
"""How long a rank waits before it raises another rank's error, so that the one that failed is seen to fail first."""

T = TypeVar("T")


def together(what: str, part: Callable[[], T], world_size: int, clean: Callable[[], None]) -> list[T]:
    """Do this rank's part and return what the parts of all ranks returned, by rank. Blocks until all have done theirs.

    Raises CheckpointError on all ranks if one of them fails, after `clean`: what is half written may be what fills the
    disk.
    """
    result, failure = None, None
    try:
        result = part()
    except Exception as error:
        failure = error
    outcomes = [(result, None if failure is None else in_words(failure))]
    if world_size > 1:
        mine, outcomes = outcomes[0], outcomes * world_size
        dist.all_gather_object(outcomes, mine)
    for rank, (_, said) in enumerate(outcomes):
        if said is not None:
            clean()
            if failure is None:
                time.sleep(CULPRIT_FIRST_S)
            raise CheckpointError(f"rank {rank} could not {what}: {said}") from failure
    return [result for result, _ in outcomes]  # type: ignore[misc]


def in_words(error: Exception) -> str:
    """Return what an error says, and what to do where the disk is at fault."""
    if isinstance(error, CheckpointError):
        return str(error.args[0])
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text += ". Make room, or choose another folder"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            text += ". Choose a folder that can be written"
    return text
