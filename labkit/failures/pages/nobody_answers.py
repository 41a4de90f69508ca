"""A rank is at `breakpoint()` or `input()`, and nobody could type the answer.

It raises at once, because a rank that waits for ever would keep the others waiting too. The message
says why nobody can answer: the notebook runs headless, the ranks are on a cluster, nobody waits for
the run.

## An example

    rank 0 is at breakpoint() in test_errors.py, line 12, and nobody can answer: the notebook runs headless. One rank alone can be debugged anywhere that takes input: on=labkit.Here(), or launch it from JupyterLab on this machine

## What to do

* In a notebook that somebody watches, with ranks on this machine: launch it from a cell. The
  question comes below the cell.
* On a cluster, under torchrun, headless: take the call out, or set `PYTHONBREAKPOINT=0`. For one
  rank's work use `labkit.launch(train, on=labkit.Here())`.
* In a `DataLoader`'s worker: `num_workers=0`.
* Is it a value that you want to ask for? Pass it to launch as an argument.
"""
