"""A rank as code that was written for a script finds its process.

bars       progress bars made for notebooks, as text
children   the processes that it starts, a DataLoader's workers, say (with `fork_server`)
dynamo     optimizers and DDP without the compiler, until something compiles
hooks      `init_process_group` and `env://`, in a process that labkit has made a member of a group
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.protocol.job import RankHooks


def rank_begins() -> None:
    """Prepare a rank's process that the notebook's has spawned."""
    from labkit.plugins.as_script import children

    children.as_of_a_script()
    process_begins()


def process_begins() -> None:
    """Prepare a rank's process, whoever has started it."""
    from labkit.plugins.as_script import bars, children, dynamo

    children.prepare()
    dynamo.put_off()
    bars.as_text()


def rank_hooks() -> RankHooks:
    """Return what has scripts find the group that there is."""
    from labkit.plugins.as_script.hooks import FindsTheGroup

    return FindsTheGroup()
