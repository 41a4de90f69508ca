"""DDP waited for gradients that never came: parameters did not take part in the loss of the last step.

DDP averages a gradient for each parameter. One that gets none in a step leaves the step unfinished,
and the *next* `forward` raises. The numbers count the parameters with `requires_grad`, in the order
of `model.named_parameters()`; `TORCH_DISTRIBUTED_DEBUG=DETAIL` prints their names.

## An example

    rank 1 failed: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss. You can enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by
…
    Parameter indices which did not receive grad for rank 0: 2 3

## What to do

* *A layer is made and never used*, or frozen half way. Tell: the same numbers in each run, on all
  ranks. Cure: delete it, or `requires_grad_(False)` before the model is wrapped.
* *A branch*: `forward` uses other layers from step to step, or from rank to rank (a mixture of
  experts, a dropped layer, a batch without labels). Tell: the numbers differ between ranks or steps.
  Cure: `DistributedDataParallel(model, find_unused_parameters=True)`, which costs one more walk
  through the graph in each step.
* *An output is not in the loss*, or `forward` was called by another way than `model(…)`. Tell:
  "find_unused_parameters=True is enabled" in the message. Cure: add it, if only as
  `loss + 0 * other.sum()`; call the wrapped model once a step.
* With `static_graph=True` the message is "Your training graph has changed in this iteration": take
  it out, or use the same parameters in each step.
  https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""
