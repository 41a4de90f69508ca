"""What a rank does for its waits to be known."""

from __future__ import annotations

import pickle

from labkit.plugins.in_vain.waiting import look
from labkit.protocol.events import Attached
from labkit.protocol.job import RankHooks
from labkit.rank.channels import Channel

KIND = "waits"
"""What the notebook knows by it what a rank says."""


class SaysWaits(RankHooks):
    """Says what the rank waits for, whenever it is asked to stop."""

    def hear(self, word: str, channel: Channel) -> None:
        """Answer a stop, perhaps once more, in the thread that receives it."""
        if word == "stop":
            channel.send(Attached(channel.rank, KIND, pickle.dumps(tuple(look(channel.rank)))))
