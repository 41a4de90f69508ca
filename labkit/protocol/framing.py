"""How a pickle, and the large bytes in it, follow each other in a pipe or a file: sent from where they are, and read to
where they stay, so that no copy of them is made."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Generator, Sequence

HEADER = struct.Struct("!8sQQ")
"""A mark by which garbage is known at once, how many bytes the pickle has, and how many buffers follow."""

MARK = b"\x93labkit\n"

SIZE = struct.Struct("!Q")
"""Of each buffer, before the pickle."""


def framed(pickled: bytes, blocks: Sequence[memoryview]) -> list[bytes | memoryview]:
    """Return the buffers of a message, in the order in which they are written."""
    begin = HEADER.pack(MARK, len(pickled), len(blocks)) + b"".join(SIZE.pack(block.nbytes) for block in blocks)
    return [begin + pickled, *blocks]


def unframed() -> Generator[memoryview, None, tuple[bytearray, list[bytearray]]]:
    """Yield where the next bytes are to be written, none of it empty; return the pickle and its buffers at the end.

    Raises UnpicklingError for what does not begin so.
    """
    header = bytearray(HEADER.size)
    yield memoryview(header)
    mark, size, count = HEADER.unpack(header)
    if mark != MARK:
        raise pickle.UnpicklingError(f"{bytes(header)!r} is not the beginning of a message")
    sizes, pickled = bytearray(count * SIZE.size), bytearray(size)
    yield from (memoryview(room) for room in (sizes, pickled) if room)
    found = [bytearray(each) for (each,) in SIZE.iter_unpack(sizes)]
    yield from (memoryview(room) for room in found if room)
    return pickled, found
