"""A GPU had no memory left: "CUDA out of memory".

The message says how much was asked for, who else is on the GPU, and what PyTorch holds itself. Older
PyTorch has the figures in brackets, and not the other processes: "(GPU 0; 23.70 GiB total capacity;
21.50 GiB already allocated; …)".

## An example

    rank 1 failed: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 14.57 GiB of which 1.58 GiB is free. Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch memory, this process has 966.00 MiB memory in use. Of the allocated memory 734.07 MiB is allocated by PyTorch, and 33.93 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)
…
    Process 2493055 holds 12.02 GiB on the same GPU. If it is one of run.pids, ranks share the GPU; if not, it is another program, or left over.

## What to do

* *On all ranks alike: it is too much for a GPU.* Tell: each rank fails at the same line, alone on its
  GPU. Cure: a smaller batch on each rank with gradients accumulated, activation checkpointing,
  `bfloat16`; then sharding (`fully_shard`), where *more* ranks hold less each. Fewer ranks help
  nobody who has a GPU of its own. Lesson 26 counts beforehand what a rank will hold.
* *On one rank, mostly rank 0: the others are on its GPU, too.* Tell: the message names processes that
  are in `run.pids`, `nvidia-smi` shows several on GPU 0. Cure: `worker.device`, or
  `torch.cuda.set_device(local_rank)` first of all, instead of `.cuda()` or `"cuda:0"`;
  `torch.load(path, map_location="cpu")`, which otherwise puts each rank's copy where it was saved
  from; evaluation and saving that gather the whole model on rank 0.
* *Somebody else's, or left over.* Tell: processes that are not in `run.pids`, before the first step.
  Cure: end them by their number; a notebook that holds a model is one (restart its kernel).
* *In pieces (fragmentation).* Tell: "reserved by PyTorch but unallocated" is more than was asked for.
  Cure: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` in the environment before the ranks start.
* It grows from step to step? Something is kept: a loss in a list (append `loss.item()`).
  https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
"""
