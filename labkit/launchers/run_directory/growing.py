"""Files that others write to, read while they grow. Needs nothing but the standard library, as supervisors do."""

from __future__ import annotations

import time
from pathlib import Path

from labkit.launchers.run_directory.files import was_cut

BLOCK_BYTES = 1 << 22
"""Read at once from one file at most, so that a rank that writes much does not hide the others."""

LINE_S = 5.0
"""How long the rest of a line may take to be seen."""


class Growing:
    """A file that grows, read from where the last look ended. Opened for each look: over a network it is seen anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        """Why it could not be read at the last look, other than that it is not there."""
        self.grew = self.has_more = False
        """Whether the last look found something; and perhaps not all."""
        self._offset = 0

    def skip(self) -> None:
        """Pass over what is there. Raises OSError."""
        self._offset = self.path.stat().st_size

    def read(self) -> bytes:
        """Return a block of what is new."""
        data, self.error = b"", None
        try:
            with open(self.path, "rb", buffering=0) as file:
                if was_cut(file.fileno(), self._offset):
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(BLOCK_BYTES)
        except FileNotFoundError:
            pass  # not there yet
        except OSError as error:
            self.error = error
        self._offset += len(data)
        self.grew, self.has_more = bool(data), len(data) == BLOCK_BYTES
        return data


class Lines(Growing):
    """Lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parts: list[bytes] = []
        self._grew_s = 0.0

    @property
    def awaits_rest(self) -> bool:
        """Whether the last line is not whole, and its rest may still come."""
        return bool(self._parts) and time.monotonic() < self._grew_s + LINE_S

    def new(self) -> list[bytes]:
        """Return the whole lines among what is new."""
        if not (data := self.read()):
            return []
        self._grew_s = time.monotonic()
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._parts, whole[0]])
            self._parts = []
        if rest:
            self._parts.append(rest)
        return whole
