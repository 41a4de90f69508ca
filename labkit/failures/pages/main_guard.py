"""A child process ran the script again, because it has no `if __name__ == "__main__":`.

A process that is started by `spawn` (always on macOS, with CUDA also on Linux) imports
the script from which it comes. Without the guard that import starts the whole program once more, and
Python stops it: "An attempt has been made to start a new process before the current process has
finished its bootstrapping phase. This probably means that you are not using fork to start your child
processes and you have forgotten to use the proper idiom in the main module", and then something about
`freeze_support()`. It stands in the output, for the rank only sees that its child is gone. labkit's own ranks do not import the script;
what a script starts on a rank (a `DataLoader` with `spawn`, `mp.spawn`, a `Pool`) does.

## An example

    rank 1 failed: RuntimeError: DataLoader worker (pid <n>) exited unexpectedly with exit code 1. Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace.
…
    A child process of the rank imported the script, which then began to start processes again; run.output has its error.

## What to do

* *The script's last lines start the training at the top level*. Tell: they are not indented. Cure:
  put them into `def main():` and end with `if __name__ == "__main__": main()`. `freeze_support()`
  is for Windows programs that were packed; leave it out.
* *A `DataLoader` is made at the top level* of a module that children import. Tell: the traceback
  above the message has your `import` lines in it. Cure: make it inside the function.
* *The start method was changed* by a library or `set_start_method("spawn")`. Tell: it worked with
  `fork`. Cure: the guard; or `multiprocessing_context="fork"` for loaders that do not touch CUDA.
* Why it is so:
  https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods
"""
