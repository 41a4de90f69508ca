"""What a rank does for its collectives to be known."""

from __future__ import annotations

import contextlib
import pickle

from labkit.failures import recorder
from labkit.protocol.events import Attached
from labkit.protocol.job import Job, RankHooks
from labkit.rank.channels import Channel

KIND = "collectives"
"""What the notebook knows by it what a rank says."""

_group: int | None = None
"""The number of the process group of the last job, if that stays from cell to cell."""


class SaysCalls(RankHooks):
    """Says which collectives the rank has called, when it is asked and when it fails."""

    def around(self, job: Job, channel: Channel) -> contextlib.AbstractContextManager[None]:
        """Forget what earlier jobs have called, in a process that stays, unless this one goes on in their group."""
        global _group
        if job.group is None or job.group != _group:
            recorder.forget()
        _group = job.group
        return contextlib.nullcontext()

    def hear(self, word: str, channel: Channel) -> None:
        """Answer the question for details. In whatever thread asks, while the main thread waits in native code."""
        if word == "details":
            channel.send(Attached(channel.rank, KIND, pickle.dumps(tuple(recorder.look(channel.rank)))))

    def failed(self, error: BaseException, job: Job, channel: Channel) -> None:
        """Say it of a rank that fails, too."""
        self.hear("details", channel)
