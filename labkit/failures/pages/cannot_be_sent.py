"""A function, an argument or a result cannot travel between notebook and ranks.

A function from a cell goes to the ranks by value, with everything of the notebook that it uses; its
result comes back the same way. What pickle refuses cannot: open files, sockets, locks, generators,
running threads and CUDA streams belong to their process. The message names the value, also where it
lies deep inside another.

## An example

    uses_a_lock cannot be sent to the ranks: 'LOCK', which uses_a_lock uses, is a lock, which cannot be pickled (cannot pickle '_thread.lock' object). Make it inside the function instead, or pass what it is made from

## What to do

* Make the thing inside the function: open the file there, build the `DataLoader` there. Pass a
  path, a seed or a configuration, from which it is made.
* Named is a global that you hardly use? The function uses it, perhaps through another function;
  move that line out.
* A class of yours: leave the part out in `__getstate__`, or make it when it is first used.
* A result: return numbers, tensors or a `state_dict()`, not the worker or an iterator. Tensors of a GPU
  arrive as tensors of the CPU, a DDP model without its wrapper; of a sharded model return the full
  state dict (`torch.distributed.checkpoint.state_dict.get_model_state_dict`). What was logged has
  arrived in any case.
* A result that was sent but cannot be loaded in the notebook, because a module is missing there, say,
  is no failure: the run is finished, its result is the exception that loading raised, and
  `run.results[rank].load()` tries again.
"""
