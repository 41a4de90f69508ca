"""An operation got plain tensors and sharded ones (`DTensor`) at once.

After `fully_shard` or `parallelize_module` a model's parameters are `DTensor`s: one tensor that lies
in pieces on all ranks. A plain tensor is this rank's alone, and PyTorch will not guess which part of
the whole it is. The operation is named before the words.

## An example

    rank 1 failed: RuntimeError: aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators! Please see https://docs.pytorch.org/docs/main/distributed.tensor.html#mixed-tensor-and-dtensor-operations for more details.

## What to do

* *An input or a mask is plain* in a model that runs under tensor parallelism. Tell: your line is in
  `forward`. Cure: say in the plan how inputs come (`PrepareModuleInput`), or
  `distribute_tensor(x, mesh, [Replicate()])`.
* *Weights are used outside of the wrapped call*: a tied embedding, `model.module.weight @ x`, a
  layer that was called directly, so that FSDP did not gather it. Tell: the line does not go through
  `model(…)`. Cure: call the module; for figures of a weight `weight.full_tensor()`, on all ranks.
* *The optimizer or the clipping has both kinds*: some parameters sharded and some not. Tell: the
  operation is `aten._foreach_…` or `aten.stack`, in `clip_grad_norm_` or `optimizer.step`. Cure: two
  parameter groups, or `foreach=False`; make the optimizer after the sharding.
* How to convert:
  https://docs.pytorch.org/docs/main/distributed.tensor.html#mixed-tensor-and-dtensor-operations
"""
