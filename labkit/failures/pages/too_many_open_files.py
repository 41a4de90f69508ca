"""A process had as many files open as it may: `ulimit -n`, often 1,024.

Sockets, pipes and shared memory count as files. A `DataLoader` sends each tensor through one, which
stays open as long as the tensor is kept. "received 0 items of ancdata" is the same error in other
words.

## An example

    rank 1 failed: RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the limit using `ulimit -n` in the shell or change the sharing strategy by calling `torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your code
…
    Each tensor that a DataLoader worker or another process sends keeps a file open.

## What to do

* *Tensors from workers are kept*: batches or labels are put into a list. Tell: the error comes after
  as many steps as the limit. Cure: append `label.item()` or `tensor.clone()`; or
  `torch.multiprocessing.set_sharing_strategy("file_system")` at the beginning.
* *The limit is low*, and many workers on many ranks need more. Tell: `ulimit -n` says 256 (macOS) or
  1,024, and it fails at the first step. Cure: `ulimit -n 65536` in the shell that starts Jupyter or
  the job; in the function `resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))`.
* *Files are opened and never closed*: `open(…)` or `h5py.File(…)` in `__getitem__`. Tell: `lsof -p`
  with the rank's process (`run.pids`) lists the same names again and again. Cure: `with open(…)`.
* Both ways in which tensors are sent:
  https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies
"""
