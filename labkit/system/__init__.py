"""The one room that knows the operating system: `host` is the system that this process runs on, chosen once.

Only this room reads `sys.platform`, `os.name` and `/proc`, calls the C library, and names signals other than SIGINT and
SIGTERM. `base.System` lists what the others may ask of it; `linux` and `macos` say how it is done there:

ends with its notebook   `die_with_parent`, `begin_session`, `end_session`
a rank's stack           `stacks_signal`, `answer_stacks`, `ask_for_stack`
a rank's output          `redirect_output`
the store                `lends_bound_ports`; `rank_environment`, so that scripts open one there
a peer's end             nothing: labkit itself sees to it on every system (`labkit.failures.ledger`)
memory now and peak      `resident_bytes`, `peak_bytes`
a rank's environment     `rank_environment`, `set_start_environment`

Standard library only, but for psutil where the system itself does not tell: an agent imports no torch before its ranks.
"""

from __future__ import annotations

import os
import sys

from labkit.system.base import System as System

if sys.platform == "linux":
    from labkit.system.linux import Linux as Here
else:
    from labkit.system.macos import MacOS as Here  # and what else has POSIX calls

host: System = Here()
"""The system that this process runs on."""


def threads(world_size: int) -> int:
    """Return with how many threads each of so many ranks computes here: its share of the cores.

    A smaller OMP_NUM_THREADS is shared instead, as administrators of shared machines set it.
    """
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    cores = host.cores()
    return max(1, min(cores, int(allowed) if allowed.isdecimal() else cores) // world_size)
