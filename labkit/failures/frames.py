"""The user's own frames of a rank that failed, with what their variables were."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.protocol.events import Failure
from labkit.protocol.job import Cell
from labkit.protocol.modules import is_user_file
from labkit.protocol.source import line_of, place_of
from labkit.rank.describe import KIND

Described = Sequence[Sequence[tuple[str, str]]]
"""Of each frame of a failure, if it is the user's own: names and values of its variables, as text."""

SHOWN = 8
"""Variables shown in an error's message at most; `frames` has all."""


class FailedFrame(NamedTuple):
    """One of the user's own frames when a rank failed."""

    rank: int
    place: str
    """ "Cell In[3], line 14"."""
    function: str
    source: str
    """The line itself; "" if it is not known."""
    variables: dict[str, str]
    """What the local variables were, as text, by name: small values as they are, of a tensor shape, type, device,
    least, greatest and mean of what is finite, and how much is not."""

    @property
    def title(self) -> str:
        """ "Cell In[3], line 14, in train"."""
        return f"{self.place}, in {self.function}"

    def lines(self) -> list[str]:
        """Return a variable a line."""
        return [f"{name} = {value}" for name, value in self.variables.items()]


class Frames(list[FailedFrame]):
    """The user's own frames of the ranks that failed: of the first to fail first, the most recent first."""

    def of(self, rank: int | None) -> Frames:
        """Return those of one rank."""
        return Frames(frame for frame in self if frame.rank == rank)

    @property
    def in_short(self) -> str:
        """The variables of the most recent frame of the rank that failed first; "" if there are none."""
        if not self or not self[0].variables:
            return ""
        first, lines = self[0], self[0].lines()
        more = [f"… {len(lines) - SHOWN} more: run.error.frames"] if len(lines) > SHOWN else []
        return "\n  ".join([f"Variables of rank {first.rank} at {first.place}:", *lines[:SHOWN], *more])

    def __str__(self) -> str:
        return "\n".join(
            "\n    ".join([f"rank {f.rank}: {f.title}", *filter(None, [f.source]), *f.lines()]) for f in self
        )

    __repr__ = __str__


def frames_of(
    failures: Sequence[Failure | None],
    first: int | None,
    cells: Mapping[str, Cell],
    attached: Sequence[Mapping[str, bytes]],
) -> Frames:
    """Return the user's frames of all failures, those of the rank `first` first.

    `attached` is by rank: what `labkit.rank.describe` has sent is in there.
    """
    said: dict[int, Described] = {r: pickle.loads(by[KIND]) for r, by in enumerate(attached) if KIND in by}
    given = sorted((f for f in failures if f), key=lambda failure: (failure.rank != first, failure.time_s))
    return Frames(
        FailedFrame(failure.rank, place_of(file, line, cells), function, line_of(file, line, cells), dict(variables))
        for failure in given
        for (file, line, function), variables in zip(failure.frames, said.get(failure.rank, ()), strict=False)
        if is_user_file(file, cells)
    )
