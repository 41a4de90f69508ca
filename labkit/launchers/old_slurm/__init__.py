"""Ranks as the tasks of a SLURM job.

`target` is what `on=` takes, and writes the batch script; `job` submits, follows and cancels it; `commands`, `queue`
and `endings` run SLURM's commands and read their answers.
"""
