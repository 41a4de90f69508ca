"""The signals of a rank: asked for its stacks, interrupted with the notebook, ended with it, or for a child's end."""

from __future__ import annotations

import faulthandler
import signal

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
"""Makes a rank write its stacks, where the system has such a signal."""


def ignore_sigchld() -> None:
    """Have the end of a child process go unnoticed: a DataLoader would raise an exception wherever this process is."""
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def handle_signals(stacks: int) -> None:
    """Answer a question for stacks, leave the notebook's interrupt alone, and end when the notebook is killed."""
    # The interrupt goes to the notebook's whole process group; stopping the ranks is the notebook's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if STACKS_SIGNAL is None:
        return
    # The main thread's stack alone, to which the system delivers the signal. To write the others', which go on running
    # meanwhile, crashes a process: one question in some hundreds, where a thread was reading PyTorch's recorder.
    # Chained, to nothing: only then does faulthandler put `errno` back. Else a system call that has just failed raises
    # "OSError: [Errno 0] Error" now and then, also where its failure was to be expected: a file that need not be there.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=False, chain=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, STACKS_SIGNAL})
    # On Linux the system then ends this process when the notebook's has gone, even if native code holds Python's lock
    # so that the channel cannot notice.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
