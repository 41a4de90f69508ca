"""Tables that a click on a heading sorts, as `labkit.compare` shows them."""

from labkit.comparison.sorting import sortable

__all__ = ["sortable"]
