"""Tables that a click on a heading sorts, as `labkit.compare` shows them."""

from labkit.comparing.sorting import sortable

__all__ = ["sortable"]
