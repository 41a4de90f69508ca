"""What a spawned process runs before anything else: from then on it ends with the process that spawned it.

`torch.multiprocessing.spawn` asks for a mere SIGINT once torch has been imported, which takes seconds on a busy
machine; `worker` then asks for SIGKILL again.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
