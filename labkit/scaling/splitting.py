"""How a batch is shared out. All of this package that a rank needs."""

from __future__ import annotations


def split(batch_size: int, ranks: int) -> list[int]:
    """Return each rank's share of a batch: whole samples, no two shares more than one apart, none lost.

    `batch_size // ranks` on every rank loses up to `ranks - 1` samples of every batch, unsaid. With unequal shares the
    mean of the ranks' means is not the mean over the batch: weight each rank's loss by `share * ranks / batch_size`.

    Raises ValueError where a rank would have nothing to do.
    """
    check_split(batch_size, ranks)
    return [batch_size // ranks + (rank < batch_size % ranks) for rank in range(ranks)]


def check_split(batch_size: int, ranks: int) -> None:
    """Raise ValueError where a rank would have nothing to do."""
    check_whole("ranks", ranks)
    check_whole("batch_size", batch_size)
    if batch_size < ranks:
        raise ValueError(f"a batch of {batch_size} leaves nothing to do for {ranks - batch_size} of {ranks} ranks")


def check_whole(name: str, value: int) -> None:
    """Raise ValueError for what is no number of things."""
    if value != int(value) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
