"""What a rank does to end at the same step as the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from labkit.protocol.job import Job, RankHooks
from labkit.rank.channels import Channel
from labkit.rank.worker import Stopped

PATIENCE_S = 0.5
"""How long a rank that has posted its log calls waits at least for the others' posts, to agree on a last step …"""

PATIENCE_STEPS = 2
"""… and for so many of its own steps: within one, others that meet it in a collective have heard and logged, too."""


class Agrees(RankHooks):
    """Has the ranks of a job stop at the first log call that every rank can still reach.

    Each rank posts how many log calls it had made when it heard of the stop; all end one call after the greatest.
    Ranks that meet in a collective every step are never further apart than that. How long to wait for the others is
    counted from the own post, and in steps: when the stop was heard, all may have been in the midst of a long one. Once
    a rank has left for want of posts, the others leave at their next call, for they miss it.
    """

    _world_size = 0
    _posted: tuple[int, float] | None = None

    @contextlib.contextmanager
    def around(self, job: Job, channel: Channel) -> Iterator[None]:
        """Note how many are to agree."""
        self._world_size = job.world_size
        yield

    def goes_on(self, log_calls: int, channel: Channel) -> bool:
        """Return whether others may not come as far as this."""
        store, rank = channel.store, channel.rank
        assert store is not None
        keys = [f"labkit/stop/{each}" for each in range(self._world_size)]
        try:
            if self._posted is None:
                self._posted = log_calls, time.monotonic()
                store.set(keys[rank], str(log_calls))
            if store.check(["labkit/stop/left"]):
                raise Stopped(f"rank {rank} stopped; another had left")
            all_posted = store.check(keys)
            last_call = max(int(count) for count in store.multi_get(keys)) if all_posted else 0
            calls, posted_s = log_calls - self._posted[0], time.monotonic() - self._posted[1]
            if not all_posted and calls >= PATIENCE_STEPS and posted_s > PATIENCE_S:
                store.set("labkit/stop/left", "")
                raise Stopped(f"rank {rank} stopped; other ranks do not log")
        except RuntimeError:  # the rank that keeps the store has ended
            raise Stopped(f"rank {rank} stopped; rank 0 had ended") from None
        return not all_posted or log_calls <= last_call
