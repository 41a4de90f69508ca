"""A network cut over ranks, a stage each; and several such chains side by side."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course.chain import split_stages
from course.strategies.base import StageStrategy, equal_part


class ModelParallel(StageStrategy):
    """Each rank holds a stage; outputs travel forward, gradients travel back, and all but one rank wait."""

    title = "model parallel"

    def chain(self) -> tuple[int, int]:
        """Return the number of stages and the first rank of this rank's chain."""
        return self.worker.world_size, 0

    def prepare(self, network: nn.Module) -> nn.Module:
        """Return this rank's stage."""
        self.stages, first = self.chain()
        self.index = self.worker.rank - first
        self.previous = self.worker.rank - 1 if self.index else None
        self.next = self.worker.rank + 1 if self.index < self.stages - 1 else None
        self._received: Tensor | None = None
        return split_stages(network, self.stages)[self.index].to(self.device)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Pass the chain's batch through the stages and its gradients back. The last rank alone knows the loss."""
        inputs, targets = self.local_batch(inputs).to(self.device), self.local_batch(targets).to(self.device)
        self.optimizer.zero_grad()
        if self.previous is not None:
            inputs = self._receive_activations()
        with self.clock("forward"):
            outputs = self.forward(inputs)
            loss = self.loss(outputs, targets) if self.next is None else None
        if self.next is not None:
            gradient = self._pass_on(outputs)
        with self.clock("backward"):
            if loss is not None:
                loss.backward()
            elif outputs.requires_grad:  # not where this stage is frozen, which is the first
                outputs.backward(gradient)
        if self.previous is not None:
            with self.clock("communication"):
                assert inputs.grad is not None
                dist.send(inputs.grad, self.previous)
        with self.clock("optimizer"):
            self.optimizer.step()
        return None if loss is None else loss.detach()

    def _receive_activations(self) -> Tensor:
        assert self.previous is not None
        if self._received is None:  # the shape is sent once, and the type: inputs may be words, say
            box: list[Any] = [None, None]
            dist.recv_object_list(box, self.previous)
            self._received = torch.empty(box[0], dtype=box[1], device=self.device)
        received = torch.empty_like(self._received)
        dist.recv(received, self.previous)
        return received.requires_grad_()

    def _pass_on(self, outputs: Tensor) -> Tensor:
        """Send the outputs on; return their gradients, of the same shape, for which this rank waits."""
        assert self.next is not None
        with self.clock("communication"):
            if self._sent_bytes == 0:
                dist.send_object_list([outputs.shape, outputs.dtype], self.next)
                self._sent_bytes = outputs.numel() * outputs.element_size()
            dist.send(outputs.detach(), self.next)
        gradient = torch.empty_like(outputs)
        dist.recv(gradient, self.next)
        return gradient

    _sent_bytes = 0

    def bytes_expected(self, batch_size: int) -> float:
        """What the stage sends on, and the gradient of what it received."""
        received = 0 if self._received is None else self._received.numel() * self._received.element_size()
        return self._sent_bytes + received


class Hybrid(ModelParallel):
    """Two-stage chains side by side, each with a part of the batch; equal stages average with DDP, in a group each."""

    title = "DDP × model parallel"

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """At least two chains of two."""
        return max(4, world_size - world_size % 2)

    def chain(self) -> tuple[int, int]:
        """Two stages; the chains are ranks 0 and 1, 2 and 3, …"""
        return 2, self.worker.rank - self.worker.rank % 2

    def prepare(self, network: nn.Module) -> nn.Module:
        """Wrap the stage in DDP, together with the other chains' same stage."""
        stage = super().prepare(network)
        # Every rank makes every group, in the same order.
        groups = [dist.new_group(list(range(index, self.worker.world_size, 2))) for index in range(2)]
        self.wrapped = DistributedDataParallel(stage, process_group=groups[self.index])
        return stage

    def local_batch(self, batch: Tensor) -> Tensor:
        """Return the chain's part, (batch_size / chains, …)."""
        return equal_part(batch, self.worker.rank // 2, self.worker.world_size // 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the wrapped stage, which prepares the averaging."""
        outputs: Tensor = self.wrapped(inputs)
        return outputs

    def bytes_expected(self, batch_size: int) -> float:
        """What travels along the chain, and the ring all-reduce of the stage's gradients."""
        return super().bytes_expected(batch_size) + self.averaging_bytes(self.worker.world_size // 2)
