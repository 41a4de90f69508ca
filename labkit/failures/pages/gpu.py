"""A GPU cannot be used, is shared, or has failed.

Ranks compute on a GPU each where there are enough, and else on the CPU (`launch`'s `device`).

## An example

    rank 0 failed: RuntimeError: The NVIDIA driver on your system is too old (found version 11040).

## What to do

* "The NVIDIA driver on your system is too old", "No CUDA GPUs are available": `nvidia-smi` says which
  CUDA the driver is for, `torch.version.cuda` which one PyTorch was built for. The driver's may be
  newer, never older. In a container `libcuda.so.1` must be there (`docker run --gpus all`). Until
  that is mended, `labkit.launch(…, device="cpu")`.
* "[…] writev […]: Bad address", or a rank killed by a signal in `send`, `recv`, FSDP2 or tensor parallel:
  ranks that share a GPU (`device="cuda"`) speak by gloo, which has no CUDA form of these. Launch a
  rank per GPU, or omit `device`: ranks that are too many for the GPUs compute on the CPU.
* "CUDA error: …", "cuDNN error": kernels report an error later, so the line that is named may be a
  later one; with `%env CUDA_LAUNCH_BLOCKING=1`, and new ranks, it is the right one. "device-side
  assert" has a page: `labkit.failures.pages.device_side_assert`.
* After such an error nothing more can be computed in that process. labkit ends it: reserved ranks
  (`labkit.Session`) get a new process for it, and what cells had put there is gone.
* *CUDA_VISIBLE_DEVICES is … now*: CUDA reads it once in each process. Set it before the ranks are
  made, with `%env` in a cell, and make a new session.
"""
