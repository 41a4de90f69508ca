"""SLURM did not take the job, or ended it: cancelled, out of time, out of memory, a node lost.

What stands in capitals is SLURM's own word (https://slurm.schedmd.com/squeue.html, "job state
codes"). No rank is to blame, so none is named, unless it was the one that ran out of memory. What
was logged until then is kept, and the run's folder (`run.folder`) has what SLURM wrote.

## An example

    SLURM job 5 reached its time limit (TIMEOUT)

    Ask for more with time=…, or let the function keep checkpoints (labkit.Checkpoint) and launch it again.

## What to do

* Not taken: the message ends with what `sbatch` said. "sbatch is not on this machine": run the
  notebook on a login or compute node.
* "does not take array", or another option: a run is one job, in which labkit starts each rank once.
  What else the option was for is named there.
* Out of time: `labkit.Slurm(…, time="04:00:00")`. With `labkit.Checkpoint` in the function,
  launching it again goes on from the last step; catch `labkit.Stopped` to save one more before the
  end. `signal="USR1@60"` has SLURM send the ranks a signal a minute before, for a handler of your own.
* "was asked to end, and its ranks stopped": somebody sent the job SIGTERM, and SLURM did not start
  it again.
* Out of memory: `mem="32G"`; see `labkit.failures.pages.out_of_memory`.
* Node lost, preempted: SLURM puts the job back into its queue, unless `requeue=False`; the run
  follows it there.
* "before any rank did": the node cannot see the run's folder, or has not this Python. Give a
  `folder=…` that every node shares, and a `setup="module load …"` line.
* "srun in the allocation … has ended": the allocation is over, or has no room for the ranks;
  `squeue` says which.
* "is not the folder of a run", "ended with its notebook": `labkit.attach` takes the number of a job
  that SLURM still knows, or `run.folder`; only what runs as a job of its own can be followed again.
"""
