"""What labkit's errors mean, and what to do: a page for each kind, named by every message of that kind.

A message ends with the line that shows its page, wherever labkit is installed and with no network:

    What to do: help("labkit.failures.pages.hang")

* `labkit.failures.pages.rank_failed`: A rank's function raised an exception.
* `labkit.failures.pages.rank_died`: A rank's process ended without a Python exception: by a signal, or by
  an exit in native code.
* `labkit.failures.pages.out_of_memory`: The system, a cluster or a GPU had no memory left, and a rank was
  ended for it.
* `labkit.failures.pages.gpu`: A GPU cannot be used, is shared, or has failed.
* `labkit.failures.pages.returned_early`: A rank's function returned while another rank was still in a
  collective with it.
* `labkit.failures.pages.hang`: No rank logged, printed or returned anything for `timeout_s` seconds, and the run was
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
* `labkit.failures.pages.cannot_be_exported`: A function from a cell cannot be written as a script that runs
  without its notebook.
* `labkit.failures.pages.nobody_answers`: A rank is at `breakpoint()` or `input()`, and nobody could type
  the answer.
* `labkit.failures.pages.tpu`: TPUs are not supported: ranks compute on GPUs or on CPU cores.
* `labkit.failures.pages.checkpoint`: A checkpoint could not be written or read. What was saved before is as
  it was.
* `labkit.failures.pages.session`: Reserved ranks (`labkit.Session`, `%%ranks`) are held by another run, or
  are gone.
* `labkit.failures.pages.slurm`: SLURM did not take the job, or ended it: cancelled, out of time, out of
  memory, a node lost.
* `labkit.failures.pages.torchrun`: torchrun, under which the ranks ran, has ended, and they with it.
* `labkit.failures.pages.ray`: Ray did not take the ranks, can never place them, or has lost them.
* `labkit.failures.pages.run_folder`: The folder through which ranks and notebook speak has gone: it was
  deleted or moved meanwhile.
* `labkit.failures.pages.labkit_failed`: labkit itself could not go on. No rank is to blame, and what had
  come from the ranks is kept.

Each page is a module with nothing but its docstring.
"""
