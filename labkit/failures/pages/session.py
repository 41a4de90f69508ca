"""Reserved ranks (`labkit.Session`, `%%ranks`) are held by another run, or are gone.

One run at a time has a session's ranks. They end with `close()`, with their notebook, and when the
cell that made them is run again.

## An example

    run 'train' holds these ranks, for 0 s now. Wait for it (session.wait()), stop it (run.stop()), or reserve other ranks with labkit.Session(…)

## What to do

* Held: `ranks.wait()` waits until they are free. Was the run launched with `wait=False` and
  forgotten? `ranks.busy_with` has its name, `ranks.last` or your variable the run: `run.stop()`.
* Gone or closed: `ranks = labkit.Session(4)` makes new ones; variables of `%%ranks` cells are gone
  with the old. `ranks.why_over` says why.
"""
