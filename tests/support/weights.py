"""The weights of a network, put together from what its ranks hold."""

from __future__ import annotations

from labkit.comparison.old_differences import whole


def whole_weights(ranks):
    """Raises ValueError if a part is missing."""
    names = dict.fromkeys(name for measured in ranks for name in measured.weights)
    return {name: whole([each.weights[name] for each in ranks if name in each.weights]) for name in names}
