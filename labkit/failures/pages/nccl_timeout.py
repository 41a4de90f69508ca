"""NCCL's watchdog ended a rank: a collective did not end within the process group's time limit.

With NCCL a rank that waits for a collective reports nothing. A thread of PyTorch's, the watchdog,
looks at it, and after 10 minutes (gloo: 30) ends the process by `SIGABRT`. It ends the ranks that
*waited*, so the rank to look at is one that it did not end, or that it ended in another collective;
labkit's first line names it. Older PyTorch writes the same without `SeqNum`, or without `NumelIn` and
`NumelOut`.

## An example

    rank 1 did not come to all_reduce #6463 within 600 s, where rank 0 waited
…
    [rank0]:[E1003 18:37:01.832146912 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6463, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600097 milliseconds before timing out.

## What to do

* Most often one rank *never comes*: it is in an `if rank == 0:` with a collective inside, it has
  fewer batches, or it waits elsewhere. Tell: the report names the rank and what it was in, or each
  rank's `SeqNum` and `OpType` differ. Cure: all ranks make the same calls; see
  `labkit.failures.pages.hang`.
* One rank *comes late*: rank 0 evaluates, saves a checkpoint, downloads or tokenises while the
  others wait. Tell: it happens at the end of an epoch or before the first step, and the rank is at
  work in its own lines. Cure: do it on all ranks, or before the process group is joined; or give
  more time: `dist.new_group(timeout=datetime.timedelta(hours=1))` for that wait, or
  `labkit.launch(…, pg_timeout_s=3600)` for all.
* A *GPU or the network* is stuck. Tell: all ranks are in the same call, with the same `SeqNum`.
  Cure: run again with `NCCL_DEBUG=INFO`, look for Xid lines in `dmesg`; `NCCL_P2P_DISABLE=1` or
  `NCCL_IB_DISABLE=1` tell which path it is.
* `labkit.launch(…, stall_s=60)` finds a hang within a minute and says where each rank is.
  https://docs.pytorch.org/docs/stable/distributed.html#debugging-torch-distributed-applications
"""
