"""Reserved ranks: processes of this machine that stay, and do one job after another.

`session` is what the notebook holds (`labkit.Session`); `magic` hands it the notebook's cells (`%%ranks`), and `view`
shows it. `reserve` keeps the processes, and `turns` sees to it that one run at a time has them; `cell_runs` runs cells
on them. `cells` is what a rank does with a cell.

A rank imports from here, too, so that nothing is imported in this file.
"""
