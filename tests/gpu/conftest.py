"""What the tests of a GPU share."""

from __future__ import annotations

import functools

import pytest


@pytest.fixture
def found(record_property):
    """Say what was found, in a word, for the table."""
    return functools.partial(record_property, "found")
