"""What a spawned process runs before anything else: from then on it ends with the process that spawned it.

`worker` says so too, but only once torch has been imported, which takes seconds on a busy machine.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
