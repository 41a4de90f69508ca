"""What a rank's fork server imports before it forks: it then ends with the rank, and has torch for all its forks.

The system's signal at the end of a parent (`die_with_parent`) would come when the *thread* ends that has started the
server. So the server looks; what it forks, always from its main thread, has the signal.
"""

import os
import signal

import torch.utils.data  # noqa: F401
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

LOOK_EVERY_S = 0.5
"""Time between two looks whether the rank is still there."""

_rank = os.getppid()


def _look(*_: object) -> None:
    if os.getppid() != _rank:
        os._exit(1)


def _end_with_the_server() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _prctl_pr_set_pdeathsig(signal.SIGKILL)


os.register_at_fork(after_in_child=_end_with_the_server)
signal.signal(signal.SIGALRM, _look)
signal.setitimer(signal.ITIMER_REAL, LOOK_EVERY_S, LOOK_EVERY_S)
