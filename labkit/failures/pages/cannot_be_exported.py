"""A function from a cell cannot be written as a script that runs without its notebook.

`labkit.export` writes the function and all that it uses as source. What has no source cannot go
along: a thing that a cell has computed, a lambda, a module that only the notebook has. The message
names it. Before anything is written, the job's definitions run once in a fresh process and are
compared with the notebook's: what has changed since its cell ran is written as it is now, and what
no source gives is named.

## An example

    train cannot be exported: train uses 'LOCK', a lock, which cannot be written as source. Make it inside train, or pass what it is made from

## What to do

* A value that a cell has computed: pass it as an argument, which becomes an option of the script,
  or compute it in the function.
* Something of the notebook's (`get_ipython`, magics, `!ls`, widgets): keep it to other cells.
* "is … in the notebook, but its source now gives …": something that the definition used has changed
  since its cell ran, a base class or a decorator. Run that cell again, and those that use it. What
  is another value each time belongs in the function.
* "cannot be defined in a fresh process": run all cells in a new kernel to see the same error.
* "was not written by export()": give a folder that is new, or that an export wrote before. Files
  that you have changed there are kept.
* A package of your own that is installed with `-e` only: install it, or move what is used into a
  cell.
"""
