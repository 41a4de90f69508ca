"""What a rank does for its waits to be known."""

from __future__ import annotations

import pickle

from labkit.protocol.events import Attached
from labkit.protocol.job import RankHook
from labkit.rank.channels import Channel
from labkit.rank.waiting import look

KIND = "waits"
"""What the notebook knows by it what a rank says."""


class ReportWaits(RankHook):
    """Says what the rank waits for, whenever it is asked to stop."""

    def hear(self, word: str, channel: Channel) -> None:
        """Answer a stop, perhaps once more, in the thread that receives it."""
        if word == "stop":
            channel.send(Attached(channel.rank, KIND, pickle.dumps(tuple(look(channel.rank)))))
