"""Reserved ranks (`labkit.Session`, `%%ranks`) are held by another run, or are gone.

One run at a time has a session's ranks. They end with `close()`, with their notebook, when the cell
that made them is run again, when nothing has run on them for `idle_s`, and with their cluster's
job.

## An example

    run 'train' holds these ranks, for 0 s now. Wait for it (session.wait()), stop it (run.stop()), or reserve other ranks with labkit.Session(…)

## What to do

* Held: `ranks.wait()` waits until they are free. Was the run launched with `wait=False` and
  forgotten? `ranks.busy_with` has its name, `ranks.last` or your variable the run: `run.stop()`.
* Held by another notebook: `labkit.attach(…)` there or here, and stop what runs.
* Gone or closed: `ranks = labkit.Session(4)` makes new ones; variables of `%%ranks` cells are gone
  with the old. `ranks.why_over` says why. For ranks that stay however long they idle:
  `labkit.Session(4, idle_s=None)`.
* "does not answer", "ended from outside": a node was lost or taken away. The session goes on once
  its cluster gives it nodes again; launch again then.
"""
