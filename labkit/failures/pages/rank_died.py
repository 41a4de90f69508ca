"""A rank's process ended without a Python exception: by a signal, or by an exit in native code.

No traceback is left, because Python never had its turn. How the process ended is the message:
`SIGSEGV` is a crash below Python, `SIGABRT` native code that gave up, `SIGKILL` an end from
outside, "exit code 3" somebody's `os._exit(3)`. "vanished without a word" means that nobody is left
who saw the end: the machine may be gone. "Or later": log calls that follow each other quickly are
sent together, and the last ones may not have been sent.

## An example

    rank 0 died (SIGSEGV) and left no traceback, after logging step 5 or later

    rank 0 ended with SIGSEGV; no Python exception was reported.
    A segmentation fault happens in native code, below Python.
    rank 0 is in ctypes.string_at at failures.py, line 81
      failures.py, line 81, in segmentation_fault
        ctypes.string_at(0)
      failures.py, line 219, in work
        return ROWS[row].fails(worker)
      inside that, most recent first:
        <a library's lines>

## What to do

* `SIGKILL` is nearly always memory: see `labkit.failures.pages.out_of_memory`.
* `SIGSEGV`: the report shows your line that called native code. A library of another version, an
  array that was freed or resized under a tensor, and too small a stack are the usual reasons.
* `SIGABRT`: the rank's last output says why. Under NCCL it is most often the watchdog, after a
  collective that did not end in time: see `labkit.failures.pages.nccl_timeout`. Under gloo it means
  that ranks called different collectives: see `labkit.failures.pages.different_collectives`.
* `SIGBUS` is most often a full `/dev/shm`: see `labkit.failures.pages.shared_memory`.
* An exit code: look for `os._exit`, and for a library that ends its process where it should raise.
* Does it happen without other ranks? `labkit.launch(train, world_size=1)`. `run.output` has what
  the rank printed.
"""
