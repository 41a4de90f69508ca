"""A rank is at `breakpoint()`, and nobody could type what its debugger reads.

It raises at once, because a rank that waits for ever would keep the others waiting too. The message
says why nobody can answer: the notebook runs headless, the ranks are on a cluster, nobody waits for
the run.

## An example

    rank 0 is at breakpoint() in test_errors.py, line 12, and nobody can answer: the notebook runs headless

## What to do

* In a notebook that somebody watches, with ranks on this machine: launch it from a cell that waits,
  without `wait=False`. The question comes below the cell.
* On a cluster, headless: take the call out, or set `PYTHONBREAKPOINT=0`.
* In a `DataLoader`'s worker: `num_workers=0`.
* With an editor's debugger, anywhere: `import debugpy; debugpy.listen(("127.0.0.1", 5678 +
  worker.rank)); debugpy.wait_for_client()` where the rank should wait.
"""
