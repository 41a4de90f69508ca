"""How a batch is split. No process."""

from __future__ import annotations

import pytest

from course.formulas import split


@pytest.mark.parametrize("batch_size", [8, 100, 126, 127, 128, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 7, 8])
def test_a_split_loses_nothing_and_is_as_even_as_can_be(batch_size, ranks):
    shares = split(batch_size, ranks)
    assert sum(shares) == batch_size
    assert len(shares) == ranks
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True), "the remainder goes to the first ranks"


def test_a_split_says_who_would_have_nothing_to_do():
    with pytest.raises(ValueError, match="a batch of 5 leaves nothing to do for 3 of 8 ranks"):
        split(5, 8)
    with pytest.raises(ValueError, match="ranks must be a whole number from 1 on, got 0"):
        split(5, 0)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on, got -1"):
        split(-1, 1)
