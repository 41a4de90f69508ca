"""Formulas that several lessons use; the lesson that derives one is named, and types it out itself."""

from __future__ import annotations


def all_reduce_bytes(n: int, size: float) -> float:
    """Return the bytes that each of n ranks sends in a ring all-reduce of `size` bytes. Derived in lesson 01."""
    return 2 * (n - 1) / n * size


def bubble(p: int, m: int) -> float:
    """Return the share of a step for which a pipeline of p stages idles, with m micro-batches. Derived in lesson 06."""
    return (p - 1) / (m + p - 1)


def split(batch_size: int, ranks: int) -> list[int]:
    """Return each rank's share of a batch: whole samples, no two shares more than one apart, none lost.

    `batch_size // ranks` on every rank silently loses up to `ranks - 1` samples of every batch. With unequal shares the
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
    """Raise ValueError unless a count is a whole number from 1 on."""
    if value != int(value) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
