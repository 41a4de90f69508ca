"""Ray did not take the ranks, can never place them, or has lost them.

All ranks begin together, in one placement group. If nodes are merely in use the run waits; if there
could never be room, it ends after `grow_s`.

## An example

    Ray can never place 3 ranks, each with 1 CPU, each on a node of its own

    The cluster has 4 CPU on 2 nodes, and did not grow within grow_s=60 s. Ask for less, add nodes, or wait longer for a cluster that grows.

## What to do

* Never placed: compare what a rank takes with what a node has (`ray status`). `placement="PACK"`
  lets several ranks share a node; `cpus_per_rank=0.5` counts less.
* "cannot be given to Ray": no cluster listens at that address (`ray start --head` prints it), or
  its Ray or Python is of another version than the notebook's.
* "could not begin": the node has no labkit, or its runtime environment could not be made. Install
  labkit there, or send it along with `runtime_env`.
* "Package size … exceeds": `runtime_env={"working_dir": "."}` takes along what lies in the folder. The
  runs' folders, notebooks and a few more stay here (`labkit.launchers.ray.working_dir`); leave out
  more with `"excludes": ["data"]`, as .gitignore has it.
* Node lost, drained, worker taken away: `labkit.Ray(…, max_restarts=3)` starts all ranks again, and
  a function with a `labkit.Checkpoint` on a disk that every node sees goes on from there.
"""
