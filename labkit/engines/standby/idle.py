"""Whether this notebook or script has work of its own just now, whatever other programs do on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

IDLE_SHARE = 0.3
"""A notebook is idle when it uses less than this share of a core …"""

PAUSE_S = 0.1
"""… for so long: the next cell, or the next line, would have come by then."""


def wait(still: Callable[[], bool] = lambda: True, sleep: Callable[[float], object] = time.sleep) -> bool:
    """Wait until the notebook is idle; say so, or that `still` no longer holds.

    `sleep` may return early when it does not.
    """
    while still():
        began_s, used_s = time.monotonic(), time.process_time()
        sleep(PAUSE_S)
        if time.process_time() - used_s < IDLE_SHARE * (time.monotonic() - began_s):
            return still()
    return False
