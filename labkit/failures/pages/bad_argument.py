"""A launch or a session was given something of no use. No process has been started.

The message says what was found and what was expected. Everything is checked before any rank begins,
because a mistake that is found on a rank costs seconds, and comes as many times as there are ranks.

## An example

    world_size must be at least 1, got 0

## What to do

* "cannot be called as …": the function's first parameter is the worker,
  `def train(worker, steps):`. Launch passes on every argument that is not its own:
  `labkit.launch(train, steps=100)`.
* "takes a number first, 'rank'": the function was written for `mp.spawn`, which passes the rank.
  Call the parameter `worker` and write `worker.rank`, or wrap it:
  `labkit.launch(lambda worker, *args: train(worker.rank, *args), 0.1)`.
* "has a parameter called 'name'": launch keeps that word for itself. Rename yours, or bind it:
  `functools.partial(train, name=…)`.
* "needs a GPU of its own for each": NCCL takes one rank per GPU. `backend="gloo"`, or fewer ranks.
* `on=labkit.Slurm(…)` and the like say themselves how many ranks there are; leave out
  `world_size`.
* `help(labkit.launch)` lists all arguments.
"""
