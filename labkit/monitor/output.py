"""What ranks print, kept within bounds."""

from __future__ import annotations

from collections import deque

from labkit.protocol.text import printable

LINES_KEPT = 10_000
"""Lines kept of each rank's output; of longer output the oldest are dropped."""

LINE_CHARACTERS = 10_000
"""A longer line is cut."""


class RankOutput:
    """A rank's output: the last lines of it, with the same bound however much is printed."""

    def __init__(self) -> None:
        self.dropped = 0
        """Lines that are lost, the oldest."""
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._new: deque[str] = deque(maxlen=LINES_KEPT)
        self._partial = ""

    def add(self, text: str) -> None:
        """Take what the rank has printed; it need not end with a line."""
        *complete, partial = (self._partial + printable(text)).split("\n")
        for line in complete:
            if line.startswith("[Gloo] Rank ") and " is connected to " in line:
                continue  # PyTorch 2.8, for one, says so whenever ranks meet
            line = _after_carriage_returns(line)[:LINE_CHARACTERS]
            self.dropped += len(self._lines) == LINES_KEPT
            self._lines.append(line)
            self._new.append(line)
        self._partial = partial[-LINE_CHARACTERS:]

    def end(self) -> None:
        """Take what came without a final newline as a line."""
        if self._partial:
            self.add("\n")

    def take_new(self) -> list[str]:
        """Return the complete lines that have come since this was last called."""
        new = list(self._new)
        self._new.clear()
        return new

    def tail(self, lines: int) -> str:
        """Return the last lines, an unfinished one included."""
        last = [self._lines[i] for i in range(-min(lines, len(self._lines)), 0)]
        return "\n".join([*last, _after_carriage_returns(self._partial)] if self._partial else last)

    def __str__(self) -> str:
        head = f"… {self.dropped:,} earlier lines were dropped …\n" if self.dropped else ""
        lines = [*self._lines]  # in one go: more may come meanwhile
        return head + "\n".join([*lines, _after_carriage_returns(self._partial)])


def _after_carriage_returns(line: str) -> str:
    """What a terminal would show of a line that a progress bar has rewritten."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]
