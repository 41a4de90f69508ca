"""Arithmetic of times: lists of (start_s, end_s), in order and apart from one another, as `union` returns them."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """Return when at least one of these went on."""
    found: Intervals = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """Return when both went on."""
    return subtract(one, subtract(one, other))


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """Return when the one went on and the other did not."""
    found: Intervals = []
    j = 0
    for start, end in one:
        while j < len(other) and other[j][1] <= start:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if other[k][0] > start:
                found.append((start, other[k][0]))
            start = max(start, other[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found


def length(one: Intervals) -> float:
    """Return how long it went on in all, in seconds."""
    return sum(end - start for start, end in one)


def partition(span: tuple[float, float], parts: Iterable[tuple[str, Intervals]]) -> dict[str, Intervals]:
    """Return a stretch of time by part: each instant counts once, as the first of these parts that went on then."""
    left, found = [span], dict[str, Intervals]()
    for part, when in parts:
        found[part] = union([*found.get(part, []), *intersect(left, when)])
        left = subtract(left, when)
    return found
