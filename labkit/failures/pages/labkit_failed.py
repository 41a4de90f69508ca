"""labkit itself could not go on. No rank is to blame, and what had come from the ranks is kept.

The error is in this package, or in what it needs: a disk that is full, a folder that is gone. Ranks
of this machine have been ended; those of a SLURM job go on without the notebook.

A run's report may also say that one of labkit's own observers failed and was switched off: the one that
asks where ranks are, the one that follows their memory, and the like. The run went on without it, and its
results are not affected. The traceback was logged by the logger `labkit`.

## An example

    labkit could not follow the ranks any longer: OSError: [Errno 28] No space left on device

    The ranks were ended, for nobody follows them any longer. What had come from them is kept.

## What to do

* Is it the system's error (`OSError`, a disk, memory)? Mend that, and launch again. Of a run on
  SLURM `labkit.attach(folder)` follows the ranks again.
* Has labkit been updated (`git pull`, `pip install`) since the kernel imported it? Restart the kernel.
* Otherwise it is a mistake of labkit's. Please report it, with the whole message and the versions
  that `pip freeze` lists.
"""
