"""What the ranks returned, also where the notebook cannot load it: the bytes are kept, and can be loaded later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.protocol.pickling import Message, loads
from labkit.protocol.text import printable


class UnloadedResult:
    """What a rank returned and this notebook could not load, in `run.results`; `run.load_results` tries again.

    A module that is missing here, a class that has changed since: neither is a failure of the training, nor costs the
    other ranks' results.

    Attributes:
        rank: the rank that returned it.
        size: its bytes.
        error: what loading it raised.
    """

    def __init__(
        self,
        rank: int,
        blob: Message | bytes,
        error: BaseException,
        missing: Callable[[str], Any] | None = None,
    ) -> None:
        self.rank, self.error = rank, error
        self.size = blob.size if isinstance(blob, Message) else len(blob)
        self._blob, self._missing = blob, missing

    @property
    def why(self) -> str:
        """What loading it raised, in one line."""
        first_line = str(self.error).partition("\n")[0]
        return printable(f"{type(self.error).__name__}: {first_line}"[:500])

    def load(self) -> Any:
        """Return what the rank returned. Raises the error if it cannot be loaded."""
        try:
            return loads(self._blob, missing=self._missing)
        except (Exception, SystemExit) as error:
            self.error = error
            raise

    def __repr__(self) -> str:
        return f"<rank {self.rank}'s result, {megabytes(self.size)}, could not be loaded here: {self.why}; {TRY_AGAIN}>"


TRY_AGAIN = "run.load_results() tries again"


def load(rank: int, blob: Message | bytes, missing: Callable[[str], Any] | None = None) -> Any:
    """Return what a rank returned; where it cannot be loaded, an `UnloadedResult`. Raises nothing.

    `missing` is as in `pickling.loads`.
    """
    try:
        return loads(blob, missing=missing)
    except (Exception, SystemExit) as error:  # importing what it needs may end in either
        return UnloadedResult(rank, blob, error.with_traceback(None), missing)


def megabytes(size: int) -> str:
    """Return a number of bytes in words: "12.3 MB"."""
    return f"{size / 1e6:,.1f} MB" if size >= 50_000 else f"{size:,} bytes"
