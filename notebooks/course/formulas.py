"""Formulas that several lessons use; the lesson that derives one is named, and types it out itself."""

from __future__ import annotations


def all_reduce_bytes(n: int, size: float) -> float:
    """Return what each of n ranks sends in a ring all-reduce of `size` bytes. Derived in lesson 03."""
    return 2 * (n - 1) / n * size


def bubble(p: int, m: int) -> float:
    """Return the share of a step for which a pipeline of p stages idles, with m micro-batches. Derived in lesson 08."""
    return (p - 1) / (m + p - 1)
