"""No rank logged, printed or returned anything for `stall_s` seconds, and the run was ended.

The report says where every rank was. The rank that *stands apart* is named first: it has not come to
the collective in which the others wait, or it is in another one. "call #2 of the
default group" counts a group's collectives from 1, as PyTorch's flight recorder does.

## An example

    no rank logged, printed or returned anything for 1.5 s (stall_s): rank 1 has not entered all_reduce #2 (float32 [1], default group; ranks 0 and 2 wait in it at workloads.py, line 157); its last was all_reduce #1, and it is in time.sleep at workloads.py, line 121

    Rank 1 stood apart; the others may be waiting for what never comes. Give a longer stall_s if such silence is expected.

    rank 1 is in time.sleep at workloads.py, line 121
      workloads.py, line 121, in sleeps
        time.sleep(1e6)
    …
    ranks 0 and 2 wait in all_reduce at workloads.py, line 157

## What to do

* Go to the line of the rank that stands apart, and ask why the others do not wait there: a
  collective inside `if worker.rank == 0:`, one rank with fewer batches, an exception that was
  caught, a group that not all ranks are in.
* It computes, or loads data? Then it is late and not stuck: `labkit.launch(…, trace=5)` and
  `run.trace` show what the others wait for. Give a longer `stall_s`, or log more often.
* "did not answer": the process is stopped, or native code holds the GIL. The others' lines
  still show what they wait for.
* "did not come to monitored_barrier": `torch.distributed.monitored_barrier` has reported the same by
  itself.
* Without `stall_s` a hang lasts until PyTorch gives up: with NCCL after 10 minutes, by ending the
  ranks that waited (`labkit.failures.pages.nccl_timeout`), with gloo after 30, or after
  `launch(…, pg_timeout_s=…)`. `run.stacks()` asks at any time, and ■ or `run.stop()` ends it. Lessons
  14 and 14c hang in nine ways on purpose.
"""
