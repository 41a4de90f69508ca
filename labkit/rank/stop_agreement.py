"""How ranks that were asked to stop end at the same step."""

from __future__ import annotations

import time

from labkit.rank.channels import Channel

PATIENCE_S = 0.5
"""How long a rank that has posted its log calls waits at least for the others' posts, to agree on a last step …"""

PATIENCE_STEPS = 2
"""… and for so many of its own steps: within one, others that meet it in a collective have heard and logged, too."""


class Stopped(BaseException):
    """Raised by `worker.log` once the run was asked to stop, on every rank at the same step where ranks log in step.

    Not an `Exception`, so that a training loop's own error handling does not swallow it. Catch it to return what the
    rank has so far:

    >>> def train(worker):
    ...     try:
    ...         ...  # the training loop, with worker.log(...) in it
    ...     except labkit.Stopped:
    ...         pass
    ...     return model.state_dict()
    """


class StopAgreement:
    """Has the ranks of a job stop at the first log call that every rank can still reach.

    Each rank posts how many log calls it had made when it was asked to stop; all end one call after the greatest. Ranks
    that meet in a collective every step are never further apart than that. How long to wait for the others is counted
    from the own post, and in steps: when the stop came, all may have been in the midst of a long one. Once a rank has
    left because it has not posted, the others leave at their next call, for they miss it.
    """

    def __init__(self, channel: Channel, world_size: int) -> None:
        self._channel, self._world_size = channel, world_size
        self._posted: tuple[int, float] | None = None

    def check(self, log_calls: int) -> None:
        """Raise `Stopped` after so many log calls, unless other ranks may not reach this one yet."""
        store, rank = self._channel.store, self._channel.rank
        if store is None:  # there are no others to agree with
            raise Stopped(f"rank {rank} stopped after log call {log_calls}")
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
        if all_posted and log_calls > last_call:
            raise Stopped(f"rank {rank} stopped after log call {log_calls}")
