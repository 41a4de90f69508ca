"""A run that is launched with `watch="nan"`."""

from __future__ import annotations

from labkit.monitor.companion import Companion
from labkit.plugins.not_finite.hooks import EndsAtTheFirst
from labkit.protocol.job import Job


class Watched(Companion):
    """Has the run's ranks end at the first value that is not finite."""

    title = "NaN observer"

    def begin(self, job: Job) -> Job:
        """Return the job with what ends them."""
        return job.with_hooks(EndsAtTheFirst())
