"""Ranks on a Ray cluster, for whoever has machines, but no SLURM and no folder that they share.

In the order in which a run comes to them: `ray_target` (what `on=` takes), `ray_job` (the notebook's side), `driver`
(a process beside the notebook, which alone speaks with Ray: `placement` says what fits where, `attempt` follows the
ranks), `rank_holder` (an actor per rank, which starts it), `mirror` (keeps the run directories of both ends equal).
The rest is `labkit.cluster`'s: on its node each rank finds a run directory of its own, and the notebook one of all.
"""
