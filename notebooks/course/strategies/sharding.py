"""Less on every rank: the optimizer's state (ZeRO-1), parameters and gradients too (FSDP2), or layers cut across.

ZeRO: Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054). FSDP: Zhao et al. 2023
(https://arxiv.org/abs/2304.11277). Tensor parallel: Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.chain import blocks, has_parameters
from course.strategies.base import DataParallelStrategy, equal_part
from course.strategies.ddp import DDP
from labkit.comparison.program import backend_for
from labkit.rank.worker import Worker
from labkit.trace.profiling import local, size_bytes


def zero_redundancy(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return PyTorch's `ZeroRedundancyOptimizer` of what is a `functools.partial` of an optimizer's class."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind: Any = optimizer
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind.func, **kind.keywords)


def one_by_one(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return an optimizer that steps each parameter by itself, where some are cut (DTensors) and others are whole.

    On a GPU the default, `foreach`, steps all of them in a few kernels, and raises where the two are mixed.
    """
    return optimizer(model.parameters(), foreach=False)


class ZeRO1(DDP):
    """DDP whose optimizer keeps state for a part of the parameters on each rank and broadcasts what it has stepped."""

    title = "ZeRO-1"

    def make_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Shard the optimizer, which must be a `functools.partial` of its class."""
        return zero_redundancy(self.model, optimizer)

    def bytes_expected(self, batch_size: int) -> float:
        """DDP's, and every parameter, frozen ones too, once from its owner to n − 1 ranks: the mean over ranks."""
        n = self.worker.world_size
        return super().bytes_expected(batch_size) + (n - 1) / n * self.parameter_bytes


class FSDP2(DataParallelStrategy):
    """`fully_shard`: a part of every parameter on each rank, gathered layer by layer when it is needed."""

    title = "FSDP2"

    def prepare(self, network: nn.Module) -> nn.Module:
        """Shard every child, then what is left of the whole."""
        self.units = shard(network, self._mesh("dp"))
        return network

    def _mesh(self, *names: str) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.worker.world_size,) if len(names) == 1 else (self.worker.world_size // 2, 2)
        return init_device_mesh(self.worker.device.type, shape, mesh_dim_names=names)

    def weights(self) -> dict[str, Tensor]:
        """Gather the whole weights."""
        return {name: whole(tensor) for name, tensor in self.model.state_dict().items()}

    def bytes_expected(self, batch_size: int) -> float:
        """All-gather before forward and backward, reduce-scatter after: (n − 1) / n of the padded whole each."""
        return fsdp_bytes(self.units, self.worker.world_size)


class CutLayers(FSDP2):
    """What both strategies have in common that cut linear layers: before the first step they check that it is right.

    Which layers follow one another in pairs is guessed by their order. So one batch goes through the whole network and
    through what was made of it, before anything is trained.
    """

    def __init__(self, worker: Worker, network: nn.Module, *others: Any) -> None:
        self._whole: nn.Module | None = copy.deepcopy(network).to(worker.device)
        super().__init__(worker, network, *others)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Take a step; before the first one, check that the network is still what it was."""
        if self._whole is not None:
            self._check(self._whole, self.local_batch(inputs))
            self._whole = None
        return super().step(inputs, targets)

    def _check(self, uncut: nn.Module, inputs: Tensor) -> None:
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            with torch.no_grad():
                expected, found = uncut.eval()(inputs), self.model.eval()(inputs)
                # What is on its way from other ranks is awaited by whatever computes with it.
                is_same = torch.allclose(expected, whole(found), rtol=1e-4, atol=1e-6)
            why = "" if is_same else "its outputs are others then"
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        for module, is_training in modes:
            module.training = is_training
        if why:
            raise ValueError(
                f"{self.title} cannot train this network: its linear layers are cut in pairs, in the order in which "
                f"they stand, and {why}"
            )


class TensorParallel(CutLayers):
    """`parallelize_module`: linear layers in pairs, the first cut by columns, the second by rows.

    Every rank sees the whole batch. An all-reduce of the second's outputs forward and one of the gradients of the
    first's inputs backward make it whole.
    """

    title = "tensor parallel"

    def make_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Have it step each parameter by itself; see `one_by_one`."""
        return one_by_one(self.model, optimizer)

    def prepare(self, network: nn.Module) -> nn.Module:
        """Cut the linear layers over all ranks."""
        self.travels = split_linear_layers(network, self._mesh("tp"))
        return network

    def local_batch(self, batch: Tensor) -> Tensor:
        """Return the whole batch, (batch_size, …)."""
        return batch

    def bytes_expected(self, batch_size: int) -> float:
        """Two all-reduces for each pair: of its outputs, and of its inputs' gradients."""
        n = self.worker.world_size
        return 2 * (n - 1) / n * batch_size * self.travels * self.itemsize


class FSDP2TensorParallel(CutLayers):
    """Tensor parallel in pairs of ranks, FSDP2 over the pairs: a 2-D mesh."""

    title = "FSDP2 × tensor parallel"

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """At least 2 × 2."""
        return max(4, world_size - world_size % 2)

    def prepare(self, network: nn.Module) -> nn.Module:
        """Cut the linear layers within a pair, then shard over the pairs."""
        mesh = self._mesh("dp", "tp")
        self.travels = split_linear_layers(network, mesh["tp"])
        self.units = shard(network, mesh["dp"])
        return network

    def local_batch(self, batch: Tensor) -> Tensor:
        """Return the pair's part, (batch_size / pairs, …)."""
        return equal_part(batch, self.worker.rank // 2, self.worker.world_size // 2)

    def bytes_expected(self, batch_size: int) -> float:
        """FSDP2's over the pairs, of what this rank holds when gathered; and a pair's all-reduces."""
        pairs = self.worker.world_size // 2
        within_pairs = batch_size / pairs * self.travels * self.itemsize
        return fsdp_bytes(self.units, pairs) + within_pairs


def reduce_scatters(network: nn.Module) -> int:
    """How many (n − 1) / n of the network's gradients a reduce-scatter sends: 1, but gloo does it by an all-reduce."""
    return 2 if backend_for(network.parameters(), dist.get_backend_config()) == "gloo" else 1


class Unit:
    """A part of a network that FSDP2 gathers at once.

    Args:
        module: to which `fully_shard` is applied.
        parameters: the module's that no other unit has.
        parts: ranks that share them out, by rows, padded to parts of equal size.
        reshard: whether gathered parameters are dropped after the forward pass.
    """

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter], parts: int, reshard: bool) -> None:
        padded = {p: -(-len(local(p)) // parts) * parts * size_bytes([local(p)[0]]) for p in parameters}
        self.gathered_bytes = sum(padded.values())
        self.trained_bytes = sum(size for parameter, size in padded.items() if parameter.requires_grad)
        self.module, self.reshard = module, reshard
        self.is_in_backward = False
        """Whether the last backward pass came to it: not where it and all before it are frozen."""
        module.register_forward_hook(self._note_outputs)

    def _note_outputs(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.is_in_backward = isinstance(outputs, Tensor) and outputs.requires_grad


def shard(
    network: nn.Module, mesh: Any, parts: Iterable[nn.Module] | None = None, reshard: bool | None = None
) -> list[Unit]:
    """Apply `fully_shard` to every child that has parameters, of lists to their elements, then to the whole.

    Args:
        network: is changed in place.
        mesh: the ranks, of one dimension.
        parts: what is sharded instead of the children.
        reshard: `reshard_after_forward` of the parts. The whole is not told: its own parameters are the last in the
            forward pass and the first in the backward pass, so PyTorch's default keeps them, and does not gather
            them twice in a row.

    Returns the units, in the order of the forward pass's ends.
    """
    from torch.distributed.fsdp import fully_shard

    found: dict[nn.Module, list[nn.Parameter]] = {}
    taken: set[nn.Parameter] = set()
    for module in (*(blocks(network) if parts is None else parts), network):
        if has_parameters(module):
            found[module] = [parameter for parameter in module.parameters() if parameter not in taken]
            taken.update(found[module])
    units = []
    for module, parameters in found.items():
        is_dropped = module is not network and reshard is not False
        units.append(Unit(module, parameters, mesh.size(), is_dropped))
        fully_shard(module, mesh=mesh, reshard_after_forward=None if module is network else reshard)
    return units


def fsdp_bytes(units: list[Unit], parts: int) -> float:
    """Return what a rank sends in a step: (parts − 1) / parts of what is gathered and reduce-scattered.

    Units are gathered before forward; before backward again, if they were dropped and it comes to them, or to the next
    one, with which PyTorch gathers them ahead of time. Gradients are reduce-scattered of what is trained.
    """
    sent = 0
    for unit, next_one in zip(units, [*units[1:], None], strict=True):
        is_in_backward = unit.is_in_backward or (next_one is not None and next_one.is_in_backward)
        gathers = 2 if unit.reshard and is_in_backward else 1
        sent += gathers * unit.gathered_bytes + reduce_scatters(unit.module) * unit.trained_bytes
    return (parts - 1) / parts * sent


def split_linear_layers(network: nn.Module, mesh: Any) -> int:
    """Cut linear layers in pairs over a mesh; return how many numbers per sample their all-reduces carry, in all."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    linear = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    plan: dict[str, Any] = {}
    travels = 0
    for (first, a), (second, b) in zip(linear[::2], linear[1::2], strict=False):
        # What lies between the two must know that it has a shard: of 50 columns, 4 ranks do not have equal ones.
        plan |= {first: ColwiseParallel(use_local_output=False), second: RowwiseParallel()}
        travels += b.out_features + (a.in_features if _is_trained_before(network, a) else 0)
    if len(linear) % 2:
        name, layer = linear[-1]
        plan[name] = ColwiseParallel(output_layouts=Replicate())
        travels += layer.in_features if _is_trained_before(network, layer) else 0
    parallelize_module(network, mesh, plan)
    return travels


def _is_trained_before(network: nn.Module, layer: nn.Linear) -> bool:
    """Whether a layer's inputs want a gradient: the data, and what frozen layers make of it, want none."""
    before = itertools.takewhile(lambda parameter: parameter is not layer.weight, network.parameters())
    return any(parameter.requires_grad for parameter in before)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that is sharded over ranks, in its whole shape. Called on all ranks at once."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
