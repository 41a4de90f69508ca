"""Reserved ranks: processes that stay, and do one job after another.

`session` is what the notebook holds (`labkit.Session`); `magic` hands it the notebook's cells (`%%ranks`), and `view`
shows it. `turns` sees to it that one run at a time has the ranks; `cell_runs` runs cells on them. `local_reserve` keeps
the processes of this machine; `cluster_reserve`, with `processes`, those under SLURM, torchrun or Ray, through files
(`directory`). There `supervisor` minds each rank, and `rank_entry` is what it runs; `cells` is what any rank does with
a cell.

A rank imports from here, too, so that nothing is imported in this file.
"""
