"""A collective got a tensor on a device that the process group has no backend for.

NCCL takes tensors of GPUs alone, gloo those of the CPU. A group may have one for each:
`backend="cpu:gloo,cuda:nccl"`, which is what PyTorch makes if no backend is named.

## An example

    rank 1 failed: RuntimeError: No backend type associated with device type cpu

## What to do

* *A tensor was made without a device* and reduced: `torch.tensor(loss.item())`, a counter, a metric.
  Tell: the traceback's last line of yours is an `all_reduce` or `broadcast`. Cure:
  `torch.tensor(…, device=worker.device)`, or `.to(worker.device)` before the call.
* *The model or a buffer stayed on the CPU*: DDP broadcasts parameters and buffers as it is made.
  Tell: the error is raised in `DistributedDataParallel(…)`, or in loading a checkpoint. Cure:
  `model.to(worker.device)` first.
* *CPU tensors are meant*: objects, offloaded weights, `torch.distributed.checkpoint`. Tell: a
  library calls it. Cure: a group for them, `dist.new_group(backend="gloo")`; in a script of your own
  `init_process_group()` without a backend, or with `"cpu:gloo,cuda:nccl"`.
* What each backend can do:
  https://docs.pytorch.org/docs/stable/distributed.html#backends
"""
