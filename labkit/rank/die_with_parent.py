"""What a spawned process runs before anything else: it ends with the process that spawned it, imports without looking
for garbage, and its threads yield.

`torch.multiprocessing.spawn` asks for a mere SIGINT once torch has been imported, which takes seconds on a busy
machine; `worker` then asks for SIGKILL again.
"""

import ctypes
import gc
import os
import signal
import sys

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

# Importing torch makes some 300,000 objects, none of them garbage; to look through them again and again is a tenth of
# the time that it takes. Whoever goes on from here turns it on again: a rank in `main.do_jobs`.
gc.disable()

# libgomp, torch's pool of threads, reads this when it is loaded. By default its threads spin for milliseconds between
# two parallel loops: on cores that have other work (another rank, another user's program) one spins while the thread
# that it waits for cannot run, and a small network's step takes tens of times as long. So many turns suffice on free
# cores.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# So does NumPy's pool, OpenBLAS, which begins to spin as NumPy is imported, for 2^26 cycles: 6 % of the time in which
# two ranks start on two cores. 2^4 is the least that it takes.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
