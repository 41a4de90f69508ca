"""A DataLoader's process met a bus error: there was no room left in shared memory, /dev/shm.

Workers of a `DataLoader` hand batches over in files of `/dev/shm`, which lie in memory. When it is
full, the process that writes next gets `SIGBUS`. Other words for the same are "unable to allocate
shared memory(shm) for file" and, in older PyTorch, "unable to write to file </torch_…>".

## An example

    rank 1 failed: RuntimeError: DataLoader worker (pid <n>) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.

## What to do

* *A container* has 64 MB there. Tell: `df -h /dev/shm` in the rank (`!df -h /dev/shm` in a
  notebook there). Cure: `docker run --shm-size=8g` or `--ipc=host`, `shm_size:` in a compose file;
  in Kubernetes an `emptyDir` with `medium: Memory`, mounted at `/dev/shm`.
* *Batches times workers times ranks* are more than there is: each worker holds `prefetch_factor`
  batches (2), on each rank. Tell: it gets through with `num_workers=0`, and with smaller batches.
  Cure: fewer workers, `prefetch_factor=1`, smaller types (`uint8` pictures, made into floats on the
  GPU).
* *Left over*: runs that were killed have left files there. Tell: `ls -lh /dev/shm` while nothing
  runs. Cure: delete your own `torch_*`, `nccl-*`, `psm_*`.
* Where it cannot be made larger: both sharing strategies of PyTorch use `/dev/shm`; `num_workers=0`
  does not.
  https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies
"""
