"""The folder through which ranks and notebook speak has gone: it was deleted or moved meanwhile.

Under SLURM and on Ray each run has a folder (`run.folder`). Ranks write there what they log,
print and return, and the notebook writes there that they are to stop. When it is deleted, nobody
can follow the ranks any longer, so they are ended.

## An example

    the run's folder /home/me/labkit-runs/20260301-101500-train-1f2e has gone

    It was deleted or moved while the ranks ran. They speak with the notebook through it, so they were ended. What had come from them is kept. Launch again, and leave the folder until the run is over.

## What to do

* Leave `labkit-runs` alone while a run goes on; afterwards a run's folder may be deleted. What
  cleans up by age (`/tmp`, a cluster's scratch) should not have it: give another with `folder=…`.
* A folder that cannot be read for a while ends nothing: `run.notice` says so after 30 s, with the
  system's own words, and it is looked for on.
* A disk that is full, or a quota used up, ends no training either. `run.warnings` says what could
  not be written; make room, and it is written later. Only a result waits five minutes at most.
"""
