"""No name server is asked when ranks connect by address: one that is far makes a launch wait for 5 s and more.

lookup   what asks it, and how it is kept from asking
hooks    has a run's notebook and its ranks connect so
stores   the store through which ranks meet, for who opens and joins it without a run's hooks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.protocol.job import RankHooks


def rank_hooks() -> RankHooks:
    """Return what has connections made without a question to a name server."""
    from labkit.plugins.name_service.hooks import ByAddress

    return ByAddress()
