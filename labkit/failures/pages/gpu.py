"""A GPU cannot be used, is shared, or has failed.

Ranks compute on a GPU each where there are enough, and else on the CPU (`launch`'s `device`).

## An example

    labkit: this machine's GPU cannot be used: the driver is for CUDA 12.4, and this PyTorch is built for 13.2. The ranks compute on the CPU; update the driver, or install a PyTorch built for an older CUDA

## What to do

* *Cannot be used*: `nvidia-smi` says which CUDA the driver is for, `torch.version.cuda` which one
  PyTorch was built for. The driver's may be newer, never older. In a container both
  `nvidia-smi` and the library `libcuda.so.1` must be there (`docker run --gpus all`).
* *gloo's, which has no CUDA form of it*: ranks that share a GPU (`device="cuda"`) cannot use NCCL,
  and gloo neither sends CUDA tensors nor shards with them. Launch a rank per GPU, or leave
  out `device`: ranks that are too many for the GPUs compute on the CPU.
* "CUDA error: …", "cuDNN error": kernels report an error later, so the line that is named may be a
  later one; with `%env CUDA_LAUNCH_BLOCKING=1`, and new ranks, it is the right one. "device-side
  assert" has a page: `labkit.failures.pages.device_side_assert`.
* After such an error nothing more can be computed in that process. labkit ends it: reserved ranks
  (`labkit.Session`) get a new process for it, and what cells had put there is gone.
* *CUDA_VISIBLE_DEVICES is … now*: CUDA reads it once in each process. Set it before the ranks are
  made, with `%env` in a cell, and make a new session.
"""
