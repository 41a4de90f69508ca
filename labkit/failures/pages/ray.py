"""Ray did not take the ranks, or has lost them.

All ranks begin together, in one placement group: until there is room for all of them the run waits.

## An example

    Ray has lost ranks 2 and 3, on node 10.0.0.7

## What to do

* It waits on and on: compare what a node is to have, which the run shows, with what there is (`ray status`).
  `placement="PACK"` lets several of `nodes` share a machine; `cpus_per_node=…` asks for less.
* "no Ray cluster answers": none listens at that address (`ray start --head` prints it), or its Ray or
  Python is of another version than the notebook's.
* "could not start": the node has no labkit, or its runtime environment could not be made. Install
  labkit there, or send it along with `runtime_env`.
* "Package size … exceeds": `runtime_env={"working_dir": "."}` takes along what lies in the folder; leave
  out more with `"excludes": ["data", "labkit-runs"]`, as .gitignore has it.
* A node lost, a worker taken away: `labkit.Ray(…, max_restarts=3)` starts all ranks again, and
  a function with a `labkit.Checkpoint` on a disk that every node sees goes on from there.
"""
