"""DDP got a parameter's gradient twice in one backward: the parameter was used again after it counted as ready.

DDP averages a gradient as soon as it is there. The message gives three reasons; it cannot tell which
one it is. `TORCH_DISTRIBUTED_DEBUG=DETAIL` prints the parameter's name instead of its number.

## An example

    Parameter at index 3 has been marked as ready twice. This means that multiple autograd engine  hooks have fired for this particular parameter during this iteration. You can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to print parameter names for further debugging.

## What to do

* *Activation checkpointing*, of the reentrant kind: it runs a backward inside the backward. Tell:
  `torch.utils.checkpoint` or `gradient_checkpointing_enable()` in the model. Cure:
  `checkpoint(…, use_reentrant=False)`; in Hugging Face
  `gradient_checkpointing_kwargs={"use_reentrant": False}`.
* *`find_unused_parameters=True`* marked it as unused, and then its gradient came. Tell: the error
  goes away without it. Cure: leave it away, where all parameters are used.
* *Parameters are used outside of `forward`*, or in two forwards before one backward: `model.module`
  beside `model`, weights that two wrapped models share. Tell: look for the parameter's name in the
  lines that call the model. Cure: one call of the wrapped model a step, or `static_graph=True` if
  each step does the same.
* The reasons in full:
  https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""
