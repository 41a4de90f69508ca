"""Ranks that SLURM or Ray starts: one agent per node runs them there, as the notebook's engine does here.

In the order in which a run comes to them:

    slurm, ray      one launcher each: what `on=` takes, and its job
    remote          what every job promises, and the engine that brings what its ranks report to the run
    run_folder      the files, where nodes and notebook share some
    start, agent    one node: it starts its ranks, and looks after them (`ray_node`: as an actor of Ray's)
    attaching       `labkit.attach`
    job_events      what a launcher reports of all ranks
    environments    the variables by which a job's processes know it, which other jobs must not see
"""
