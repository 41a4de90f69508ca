"""torchrun, under which the ranks ran, has ended, and they with it.

Not a rank failed but what minds them: the agent on this machine, or the rendezvous with those of
other machines. The message ends with what torchrun wrote.

## An example

    torchrun was ended by SIGKILL, and its ranks with it

    It wrote nothing.

## What to do

* On several machines: was the command that the run shows started on each of the others, with the
  same number of machines? Does the name in `rdzv_endpoint` mean this machine there, and is the port
  open between them?
* "was ended by SIGKILL" or SIGTERM: somebody, or the system for want of memory, ended the agent.
* On one machine torchrun adds nothing: `labkit.launch(train, world_size=…)` without `on=`.
"""
