"""Ranks that SLURM or Ray starts; they and the notebook exchange files in a run directory.

In the order in which a run comes to them:

    slurm, ray             one launcher each: what `on=` takes, and its job
    launcher_job           what every job promises; `job_events` is what it reports about all ranks
    supervisor             starts one rank on its node, and stays beside it; `rank_entry` is what it starts
    run_directory          the files: `directory` names them, `sender` and `reader` write and read what ranks report
    directory_engine       brings what is written there to the run
    attaching              `labkit.attach`
"""
