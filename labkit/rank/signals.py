"""The signals of a rank: asked for its stacks, interrupted with the notebook, ended with it, or for a child's end."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from typing import Any

from labkit.system import host


def handle_signals(stacks: int) -> None:
    """Answer a question for stacks, leave the notebook's interrupt alone, and end when the notebook is killed."""
    # Stopping the ranks is the notebook's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "LABKIT_AGENT" in os.environ:
        leave_sigterm_to_the_agent()
    host.answer_stacks(stacks)
    parent: Any = multiprocessing.parent_process()
    host.begin_session(parent.sentinel)


def leave_sigterm_to_the_agent() -> None:
    """Have SIGTERM end neither this process nor a DataLoader's workers: the agent of this node says what is to happen.

    Where SLURM keeps jobs in cgroups it signals the agent alone; elsewhere (proctrack/linuxproc) every process. Not
    SIG_IGN, which programs that the rank starts would inherit. In a worker PyTorch's own handler, in C, comes after
    every other, so there the signal is held back, also from threads that libraries start at a fork. What else the rank
    forks ends at the signal, as `Process.terminate()` expects.
    """
    from torch.utils.data._utils import signal_handling

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    hold_back = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    take = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM})
    set_handlers = signal_handling._set_worker_signal_handlers

    def take_as_by_default() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        take()

    def set_and_hold_back() -> None:
        set_handlers()
        hold_back()

    os.register_at_fork(before=hold_back, after_in_parent=take, after_in_child=take_as_by_default)
    signal_handling._set_worker_signal_handlers = set_and_hold_back
