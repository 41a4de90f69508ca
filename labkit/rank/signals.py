"""The signals of a rank: asked for its stacks, interrupted with the notebook, ended with it, or for a child's end."""

from __future__ import annotations

import signal

from labkit.system import host


def handle_signals(stacks: int) -> None:
    """Answer a question for stacks, leave the notebook's interrupt alone, and end when the notebook is killed."""
    # The interrupt goes to the notebook's whole process group; stopping the ranks is the notebook's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host.answer_stacks(stacks)
    # Once more than in `die_with_parent`: PyTorch's spawn has asked for a mere SIGINT meanwhile.
    host.die_with_parent()
