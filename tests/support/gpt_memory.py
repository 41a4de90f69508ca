"""Compare what `course.scaling.predict_memory` predicts with what ranks really hold, by part, for every strategy.

Parameters, gradients and optimizer state by `labkit.profiling.tensor_bytes`, activations by
`labkit.profiling.Activations`; buffers of communication are what is handed to collectives and messages (`Buffers`), and
the gradients that zero bubble keeps between its two backward passes are counted with the activations. In float64; bf16
in float32.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import _backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import labkit
from course.scaling import Memory, predict_memory
from course.transformer import BF16, GPT, ExpertParallel, GPTStrategy, Recomputation, batches, text
from labkit import profiling
from labkit.steps.counting import local
from tests.support.gpt_training import OPTIMIZER

BATCH_SIZE, TIME = 8, 32
PARTS = ("parameters", "gradients", "optimizer state", "activations", "communication")


class Buffers(TorchDispatchMode):
    """Counts the bytes in tensors that were handed to a collective or a message and are still there, at their most.

    Parameters, gradients and what autograd keeps count elsewhere; whole parameters that FSDP2 has gathered count here.
    Beside that, the most bytes that are kept for backward passes, with the gradients from which `stage_backward_weight`
    begins.
    """

    def __init__(self, model: torch.nn.Module, kept: Any) -> None:
        super().__init__()
        self.model, self.kept = model, kept
        self.sharded = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
        self.handed: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = self.most_kept = 0
        self.split: list[list[dict[str, Any]]] = []
        """Of each backward pass whose second half is still to come: layers with weights, and their gradients."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            for tensor in tree_leaves((args, kwargs, result)):
                if isinstance(tensor, Tensor) and not tensor.is_sparse:
                    storage = local(tensor).untyped_storage()
                    self.handed[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.look()
        return result

    def __enter__(self) -> Buffers:
        self._of_layers = _backward.get_param_groups
        _backward.get_param_groups = self.noted
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *failure: Any) -> None:
        _backward.get_param_groups = self._of_layers
        super().__exit__(*failure)

    def noted(self, *args: Any) -> list[dict[str, Any]]:
        """Do what `get_param_groups` does, and keep the lists in which gradients will be."""
        self.split.append(self._of_layers(*args))
        return self.split[-1]

    def waiting(self) -> list[Tensor]:
        """Return the gradients that wait for the second half of a backward pass, which deletes them."""
        self.split = [groups for groups in self.split if any("intermediates" in group for group in groups)]
        grads = [of_layer for groups in self.split for group in groups for of_layer in group.get("grads") or ()]
        return [grad for of_layer in grads for grad in of_layer or () if grad is not None]

    def gathered(self) -> list[Tensor]:
        """Return the whole parameters of FSDP2; those that it has forgotten have no bytes."""
        groups = [group for state in self.sharded for group in _groups(state)]
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        return [p._unsharded_param for p in parameters if hasattr(p, "_unsharded_param")]

    def look(self) -> None:
        """Add up what is there now."""
        self.handed = {key: found for key, found in self.handed.items() if not found[0].expired()}
        own = {key(t) for p in self.model.parameters() for t in (p, p.grad) if t is not None}
        live = {at: size for at, (_, size) in self.handed.items() if at not in own and at not in self.kept}
        live |= {key(t): local(t).untyped_storage().nbytes() for t in self.gathered()}
        self.most = max(self.most, sum(live.values()))
        waiting = {key(t): t.untyped_storage().nbytes() for t in self.waiting()}
        between = sum(size for at, size in waiting.items() if at not in self.handed and at not in self.kept)
        self.most_kept = max(self.most_kept, between + sum(max(sizes) for sizes in self.kept.values()))


def key(tensor: Tensor) -> int:
    """Return what tells a tensor's storage from others, as long as it is there."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    return local(tensor).untyped_storage()._cdata


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # before PyTorch 2.12


def network(strategy: type[GPTStrategy], depth: int) -> GPT:
    """Return the network that is trained."""
    torch.manual_seed(0)
    model = GPT(depth, 32, 4, experts=4 if issubclass(strategy, ExpertParallel) else 0)
    return model if issubclass(strategy, BF16) else model.double()


def predicted(strategy: type[GPTStrategy], ranks: int, depth: int) -> list[Memory]:
    """Return what each rank is to hold."""
    return predict_memory(network(strategy, depth), strategy, ranks, BATCH_SIZE, TIME, "float64")


def held(worker: labkit.Worker, strategies: Sequence[type[GPTStrategy]], depth: int) -> dict[str, dict[str, int]]:
    """Return what this rank holds in the third step of each strategy, in bytes by part."""
    found = {}
    for strategy in strategies:
        trainer = strategy(worker, network(strategy, depth), OPTIMIZER)
        inputs, targets = next(itertools.islice(batches(text(), BATCH_SIZE, TIME), 1))
        trainer.step(inputs, targets)
        gc.collect()
        gc.freeze()  # what is here already need not be looked through again and again
        counted = profiling.Activations(trainer.model.parameters())
        with counted, Buffers(trainer.model, counted.kept) as buffers:
            trainer.step(inputs, targets)  # DDP's buckets stay, and are known from here on
            buffers.most = 0
            trainer.step(inputs, targets)
        most = max(counted.most, buffers.most_kept)
        if strategy is Recomputation:
            most = max(most, recomputing(trainer, inputs))
        sizes = profiling.tensor_bytes(trainer.model, trainer.optimizer)
        found[strategy.title] = {**sizes, "activations": most, "communication": buffers.most}
        gc.unfreeze()
        dist.barrier()
    return found


def recomputing(trainer: GPTStrategy, inputs: Tensor) -> int:
    """Return the bytes of all blocks' inputs and of what one block keeps, which checkpoint's own hooks hide."""
    features = trainer.network.embedding(trainer.local_batch(inputs)).detach().requires_grad_()  # type: ignore[misc]
    block: Any = trainer.network.blocks["0"]
    with profiling.Activations(trainer.model.parameters()) as own:
        result = type(block).forward(block, features)
    del result
    return (len(trainer.network.blocks) - 1) * profiling.size_bytes([features]) + own.most
