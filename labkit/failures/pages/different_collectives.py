"""Ranks met in different collectives, or in the same one with tensors of different sizes.

Calls have no names: a group's fifth call on one rank meets the fifth on the others, whatever it is.
Where they do not fit, gloo raises or ends the process; NCCL would hang, or mix the data up.

## An example

    ranks met in all_reduce with tensors of different sizes, call #6 of the default group: rank 1 is in all_reduce #6 (float32 [100000]) at failures.py, line 92; ranks 0 and 2 are in all_reduce #6 (float32 [1]) at failures.py, line 221

## What to do

* Compare the two lines that are named. All ranks must make the same calls, in the same order, with
  tensors of the same size and type.
* Sizes differ: is the last batch smaller on one rank? Then `drop_last=True`, pad, or exchange the
  sizes first.
* Kinds differ: is one of them inside an `if` on the rank, or has a rank left a loop earlier? Was a
  parameter not used on one rank, so that DDP has fewer gradients to average
  (`find_unused_parameters=True`)?
* Must two threads communicate? Give each a group of its own (`torch.distributed.new_group`).
* `TORCH_DISTRIBUTED_DEBUG=DETAIL` in the environment has PyTorch compare every call before it is
  made.
"""
