"""What labkit's errors mean, and what to do: a page for each kind, named by every message of that kind.

A message ends with the line that shows its page, wherever labkit is installed and with no network:

    What to do: help("labkit.failures.pages.hang")

* `labkit.failures.pages.rank_failed`: A rank's function raised an exception.
* `labkit.failures.pages.rank_died`: A rank's process ended without a Python exception: by a signal, or by
  an exit in native code.
* `labkit.failures.pages.out_of_memory`: The system or a cluster had no memory left, and a rank was
  ended for it.
* `labkit.failures.pages.gpu`: A GPU cannot be used, is shared, or has failed.
* `labkit.failures.pages.returned_early`: A rank's function returned while another rank was still in a
  collective with it.
* `labkit.failures.pages.hang`: No rank logged, printed or returned anything for `stall_s` seconds, and the run was
  ended.
* `labkit.failures.pages.different_collectives`: Ranks met in different collectives, or in the same one with
  tensors of different sizes.
* `labkit.failures.pages.not_a_number`: A rank logged NaN or infinity in a run that was launched with
  `watch="nan"`.
* `labkit.failures.pages.still_going`: The time that a call was to wait is over, and the run is not. It goes
  on.
* `labkit.failures.pages.bad_argument`: A launch or a session was given something of no use. No process has
  been started.
* `labkit.failures.pages.cannot_be_sent`: A function, an argument or a result cannot travel between notebook
  and ranks.
* `labkit.failures.pages.nobody_answers`: A rank is at `breakpoint()`, and nobody could type what its
  debugger reads.
* `labkit.failures.pages.checkpoint`: A checkpoint could not be written or read. What was saved before is as
  it was.
* `labkit.failures.pages.session`: Reserved ranks (`labkit.Session`, `%%ranks`) are held by another run, or
  are gone.
* `labkit.failures.pages.slurm`: SLURM did not take the job, or ended it: cancelled, out of time, out of
  memory, a node lost.
* `labkit.failures.pages.ray`: Ray did not take the ranks, or has lost them.
* `labkit.failures.pages.labkit_failed`: labkit itself could not go on. No rank is to blame, and what had
  come from the ranks is kept.

Messages that people search for have a page each; it is found by the text of what ended the rank.

* `labkit.failures.pages.gpu_out_of_memory`: A GPU had no memory left: "CUDA out of memory".
* `labkit.failures.pages.device_side_assert`: A CUDA kernel met a value that cannot be, most often
  an index or a label out of range.
* `labkit.failures.pages.nccl_timeout`: NCCL's watchdog ended a rank: a collective did not end
  within the process group's time limit.
* `labkit.failures.pages.nccl_system_error`: NCCL's "unhandled system error": a system call of
  NCCL's failed, most often over the network or in /dev/shm.
* `labkit.failures.pages.duplicate_gpu`: Two ranks use the same GPU, and NCCL takes one rank for
  each GPU.
* `labkit.failures.pages.no_backend_for_device`: A collective got a tensor on a device that the
  process group has no backend for.
* `labkit.failures.pages.unused_parameters`: DDP waited for gradients that never came: parameters
  did not take part in the loss of the last step.
* `labkit.failures.pages.marked_ready_twice`: DDP got a parameter's gradient twice in one backward:
  the parameter was used again after it counted as ready.
* `labkit.failures.pages.module_keys`: A state dict does not fit, because one side is wrapped: its
  keys begin with `module.` or `_orig_mod.`.
* `labkit.failures.pages.shared_memory`: A DataLoader's process met a bus error: there was no room
  left in shared memory, /dev/shm.
* `labkit.failures.pages.too_many_open_files`: A process had as many files open as it may: `ulimit
  -n`, often 1,024.
* `labkit.failures.pages.address_in_use`: Another process already listens on the port that a rank
  wanted: "Address already in use", EADDRINUSE.
* `labkit.failures.pages.main_guard`: A child process ran the script again, because it has no `if
  __name__ == "__main__":`.

Each page is a module with nothing but its docstring.
"""
