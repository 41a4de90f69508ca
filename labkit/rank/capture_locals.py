"""What a rank does for its variables to be known when it fails."""

from __future__ import annotations

import traceback

from labkit.protocol.job import Job, RankHook
from labkit.rank import describe as describing
from labkit.rank import failure
from labkit.rank.channels import Channel

KIND = "variables"
"""What the notebook knows them by."""


class CaptureLocals(RankHook):
    """Sends the variables of the user's frames before a failure is reported."""

    def failed(self, error: BaseException, job: Job, channel: Channel) -> None:
        """Send what the variables were, frame by frame, as `events.Failure` has the frames."""
        frames = [frame for frame, _ in traceback.walk_tb(failure.below_own(error))]
        found = describing.of_frames(reversed(frames[-failure.FRAMES :]), job.cells)
        channel.attach(KIND, found)
