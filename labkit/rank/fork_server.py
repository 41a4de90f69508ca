"""What a rank's fork server imports before it forks: it then ends with the rank, and has torch for all its forks."""

import labkit.rank.die_with_parent  # noqa: F401, I001 - first: torch takes seconds

import os
import signal

import torch.utils.data  # noqa: F401
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

os.register_at_fork(after_in_child=lambda: _prctl_pr_set_pdeathsig(signal.SIGKILL))
