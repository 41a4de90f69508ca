"""A rank's function returned while another rank was still in a collective with it.

A collective (`all_reduce`, `barrier`, the `backward` of a DDP model) ends only when every rank of
the group has called it. The rank that returned, or left its group by `destroy_process_group`, will
never call it, so the others can only fail. Not every transport tells them: NCCL and the one on macOS
does not. labkit ends such a run by itself, once it has seen that the others wait. It does
not end a `%%ranks` cell, whose ranks hold your variables: it prints the message, and you interrupt.

## An example

    rank 0 returned while rank 1 was still in a collective with it: every rank must take part in the same collectives

## What to do

* Did one rank have fewer batches? Give all as many: `DistributedSampler` does. Where that cannot
  be, there is DDP's `join()`.
* Is there a `return`, `break` or `if worker.rank == 0:` around a collective? All ranks must decide
  alike: `broadcast` or `all_reduce` the decision first.
* Evaluation on rank 0 only: call the bare model (`model.module`), not DDP's, whose `forward` may
  communicate.
"""
