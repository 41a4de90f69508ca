"""A rank as code that was written for a script finds its process.

bars                 progress bars made for notebooks, as text
children             the processes that it starts, a DataLoader's workers, say (with `fork_server`)
reuse_process_group  `init_process_group` and `env://`, in a process that labkit has made a member of a group
"""

from __future__ import annotations


def begin_spawned() -> None:
    """Prepare a rank's process that the notebook's has spawned."""
    from labkit.rank.script_compat import children  # not above: a fork server imports this package, and needs none

    children.reset_start_method()
    begin()


def begin() -> None:
    """Prepare a rank's process, no matter what has started it."""
    from labkit.rank.script_compat import bars, children

    children.prepare()
    bars.as_text()
