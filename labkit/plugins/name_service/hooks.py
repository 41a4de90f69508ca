"""What a run's notebook and its ranks do when they connect."""

from __future__ import annotations

from contextlib import AbstractContextManager

from labkit.plugins.name_service.lookup import without_name_service
from labkit.protocol.job import RankHooks


class ByAddress(RankHooks):
    """Has no name looked up where an address is given."""

    def connecting(self, host: str) -> AbstractContextManager[None]:
        """Return the context in which a connection is made."""
        return without_name_service(host)
