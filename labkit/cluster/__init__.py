"""Ranks that SLURM or torchrun starts; they and the notebook speak through files in a run directory.

In the order in which a run comes to them: `slurm`, `torchrun` (what `on=` takes), `launcher_job` (what both promise),
`job_events` (what it says of all ranks), `slurm_job`, `supervisor` (minds a rank), `rank_entry` (what it runs),
`run_directory`, `directory_engine` (brings what is written there to the run). `slurm_commands`, `slurm_queue` and
`slurm_endings` read what SLURM answers; `attaching` is `labkit.attach`.
"""
