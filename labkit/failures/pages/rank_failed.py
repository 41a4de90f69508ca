"""A rank's function raised an exception.

The run has ended as `labkit.WorkerFailed`. The rank that failed *first* is named, with its own
traceback; the lines below it say what became of the others. They fail too when a rank they wait for
has gone, and that is not their fault.

## An example

    rank 0 failed: ValueError: bad batch (after logging step 5)

    Traceback (most recent call last):
      File "<project>/tests/support/failures.py", line 217, in work
        return ROWS[row].fails(worker)
      File "<project>/tests/support/failures.py", line 61, in raises
        raise ValueError("bad batch")
    ValueError: bad batch

## What to do

* Read the last line, and the last of *your* lines above it: it is an ordinary Python error, on one
  rank. "while starting" or "while receiving the function" means that your function had not begun:
  the ranks import what it uses.
* "(then sys.exit(1))": the function has caught the exception, and ended its process. `sys.exit(0)`
  and `sys.exit()` end a rank well; another code, or a text, fails it.
* Nothing is lost: `run = error.run` has the history, output and results until then. `error.frames`
  has your frames, with what the variables were.
* Only one rank fails? Ask what is different there: its share of the data (the last batch is
  smaller), its rank in an `if`. Then run that rank's work alone:
  `train(labkit.current())` in a cell raises in the notebook's own process, where `%debug` works.
  Or put `breakpoint()` above the line.
"""
