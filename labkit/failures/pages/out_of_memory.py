"""The system or a cluster had no memory left, and a rank was ended for it.

Linux ends the process that is largest (`SIGKILL`), at any line, without a traceback. SLURM does the
same to a job that takes more than it was given (`OUT_OF_MEMORY`). A GPU that is full raises
`torch.OutOfMemoryError` instead: see `labkit.failures.pages.gpu_out_of_memory`.

## An example

    rank 1 was killed by the system for want of memory (SIGKILL), after logging step 5 or later

    rank 1 ended with SIGKILL because memory had run out: the machine's, or what its container or job may take. Its memory was seen to peak at 11.50 GiB. Try a smaller batch or a smaller model.

## What to do

* "Perhaps" means that only the whole machine's count of such kills has grown: another user's process
  may have been the one. `dmesg` names it.
* All ranks of a machine share its memory. What takes less: a smaller batch, with gradients
  accumulated over several; data that is read as it is needed. Fewer ranks on the machine take less
  where each holds a whole model and its own copy of the data (DDP on CPU cores). Where the model is
  sharded (FSDP) they do not: each then holds a larger part.
* `run.peak_bytes` says what each rank took. Does it grow from step to step? Then something is kept: a
  loss in a list (append `loss.item()`), outputs, results that are returned at the end.
* At the start only: each rank loads the whole checkpoint. `torch.load(path, mmap=True)` reads it as
  it is needed.
* Data that every rank loads is there as many times as there are ranks; so is each `DataLoader`
  worker's copy.
* Lessons 09, 21 and 26 are about holding less, and lesson 26 about counting beforehand what a rank will
  hold. PyTorch's own `torch.distributed._tools.mem_tracker.MemTracker` counts a step of your model under
  `torch._subclasses.FakeTensorMode`, without allocating it.
* On SLURM ask for more: `labkit.Slurm(…, mem="32G")`.
"""
