"""What a rank's fork server imports before it forks: it then ends with the rank, and has torch for all its forks.

The system's signal at the end of a parent (`die_with_parent`) would come when the *thread* ends that has started the
server. So the server looks; what it forks, always from its main thread, has the signal.
"""

import torch.utils.data  # noqa: F401

from labkit.system import host

LOOK_EVERY_S = 0.5
"""Time between two looks whether the rank is still there."""

host.watch_parent(LOOK_EVERY_S)
