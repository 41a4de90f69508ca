"""Ranks on a Ray cluster, for machines without SLURM and without a folder that they share.

In the order in which a run comes to them: `target` (what `on=` takes), `job` (the notebook's side), `driver` (a process
beside the notebook, which alone speaks with Ray: `placement` says what fits where, `attempt` follows the ranks),
`rank_holder` (an actor per rank, which starts it), `mirror` (keeps the run directories of both ends equal).
The rest is common to all launchers: each rank has a run directory on its node, and the notebook one for all ranks.
"""
