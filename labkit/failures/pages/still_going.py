"""The time that a call was to wait is over, and the run is not. It goes on.

`run.wait(timeout_s)` gives up waiting, not the run. `run.stop()` gives up a minute after the ranks
were to be gone: a cluster that cannot be reached, say. They are looked for on.

## An example

    run 'train' is still going after 0.01 s; wait again, or end it with run.stop()

## What to do

* Is it slow, or stuck? `run.stacks()` says where every rank stands, `run` in a cell shows it live.
* `run.wait()` waits again, `run.stop()` ends it with what it has, `run.stop(0)` ends it now.
* To have a run that makes no progress end by itself, launch it with `stall_s=60`: see
  `labkit.failures.pages.hang`.
* After `run.stop()` on a cluster: `run.notice` says what the cluster last said. `scancel` with the
  job's number ends a SLURM job from any of its machines.
"""
