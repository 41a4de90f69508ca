"""Ranks that SLURM, torchrun or Ray starts; they and the notebook exchange files in a run directory.

In the order in which a run comes to them:

    slurm, torchrun, ray   one launcher each: what `on=` takes, and its job
    launcher_job           what every job promises; `job_events` is what it reports about all ranks
    environments           by which variables a rank knows which it is: a table per launcher
    supervisor             starts one rank on its node, and stays beside it; `rank_entry` is what it starts
    run_directory          the files: `directory` names them, `sender` and `reader` write and read what ranks report
    directory_engine       brings what is written there to the run
    attaching              `labkit.attach`

Another launcher is one module with two classes, a `directory_engine.Launcher` and its `LauncherJob`, which has a
`supervisor` started for each rank, with `LABKIT_RANK` and its like in the environment; a page in
`labkit.failures.pages`; and a row in tests/test_engine_contract.py.
"""
