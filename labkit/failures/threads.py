"""Threads of a rank that ended with an exception. Nothing else fails then, and what waits for them waits forever."""

from __future__ import annotations

import re
from collections.abc import Mapping

from labkit.failures.facts import Diagnosis
from labkit.protocol.job import Cell
from labkit.protocol.modules import is_readers
from labkit.protocol.source import place_of

DIED = re.compile(
    r"^Exception in thread (?P<name>.+):\nTraceback .*\n(?P<trace>(?:[ \t]+.*\n)+)(?P<error>\S.*)$", re.MULTILINE
)
"""How Python reports that a thread has ended with an exception."""

FRAME = re.compile(r'^  File "(.*)", line (\d+), in ', re.MULTILINE)

CONCERNED = ("hang", "nccl_timeout", "returned_early", "different_collectives")
"""Help pages of messages about ranks that did not come to where others wait for them."""


def dead_threads(output: str, cells: Mapping[str, Cell]) -> list[str]:
    """Return a rank's threads that ended with an exception, from its output: "thread loader ended by ValueError: …"."""
    found = []
    for died in DIED.finditer(output):
        places = [(file, int(line)) for file, line in FRAME.findall(died["trace"])]
        mine = [place for place in places if is_readers(place[0], cells)] or places
        where = f" at {place_of(*mine[-1], cells)}" if mine else ""
        found.append(f"thread {died['name']} ended by {died['error'].strip():.200}{where}")
    return found


def name_dead_threads(diagnosis: Diagnosis, output: str, cells: Mapping[str, Cell]) -> Diagnosis:
    """Add to a diagnosis the threads of the blamed rank that ended with an exception, if that may be why it hangs."""
    if diagnosis.page not in CONCERNED or diagnosis.rank is None or not (dead := dead_threads(output, cells)):
        return diagnosis
    said = f"rank {diagnosis.rank}'s {dead[-1]}"
    return diagnosis._replace(
        headline=f"{diagnosis.headline}; {said}",
        cause=f"{diagnosis.cause}\n\nIts output has the traceback of the thread that ended ({said}).",
    )
