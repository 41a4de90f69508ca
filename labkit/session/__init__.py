"""Reserved ranks: processes that stay, and do one job after another.

`session` is what the notebook holds (`labkit.Session`), and `magic` hands it the notebook's cells (`%%ranks`). `local`
keeps the processes of this machine, `cluster` those under SLURM or torchrun. `cells` is what a rank does with a cell;
`view` shows a session.
"""

from labkit.session.session import Session

__all__ = ["Session"]
