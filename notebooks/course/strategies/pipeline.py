"""Pipelines of `torch.distributed.pipelining`: micro-batches fill the time in which stages would wait.

GPipe: Huang et al. 2019 (https://arxiv.org/abs/1811.06965). 1F1B: Narayanan et al. 2019
(https://arxiv.org/abs/1806.03377). https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from course.chain import split_stages
from course.strategies.base import StageStrategy


class GPipe(StageStrategy):
    """All micro-batches forward, then all backward."""

    title = "GPipe"
    schedule: ClassVar[str] = "ScheduleGPipe"
    MICRO_BATCHES = 4

    def prepare(self, network: nn.Module) -> nn.Module:
        """Return this rank's stage, and make the schedule."""
        from torch.distributed import pipelining

        mine = split_stages(network, self.worker.world_size)[self.worker.rank].to(self.device)
        mine.register_forward_hook(self._note_bytes)
        stage = pipelining.PipelineStage(mine, self.worker.rank, self.worker.world_size, self.device)
        stage.forward_one_chunk = self.clock.timed("forward", stage.forward_one_chunk)  # type: ignore[method-assign]
        stage.backward_one_chunk = self.clock.timed("backward", stage.backward_one_chunk)  # type: ignore[method-assign]
        self._schedule = getattr(pipelining, self.schedule)(stage, self.MICRO_BATCHES, loss_fn=self.loss)
        return mine

    def _note_bytes(self, module: nn.Module, inputs: Any, outputs: Tensor) -> None:
        size = outputs.numel() * outputs.element_size()
        self._out_bytes = size if self.worker.rank < self.worker.world_size - 1 else 0
        self._in_bytes = inputs[0].numel() * inputs[0].element_size() if self.worker.rank else 0

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Let the schedule run the micro-batches, (batch_size / 4, …) each, through the stages."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        last = self.worker.rank == self.worker.world_size - 1
        arguments = [inputs.to(self.device)] if self.worker.rank == 0 else []
        self._schedule.step(*arguments, **({"target": targets.to(self.device), "losses": losses} if last else {}))
        with self.clock("optimizer"):
            self.optimizer.step()
        return torch.stack(losses).mean().detach() if last else None

    def bytes_expected(self, batch_size: int) -> float:
        """What the stage sends on, and the gradients of what it received, for every micro-batch."""
        return self.MICRO_BATCHES * (self._out_bytes + self._in_bytes)


class OneFOneB(GPipe):
    """One forward, one backward in turn, so that no stage holds more micro-batches than there are stages."""

    title = "1F1B"
    schedule = "Schedule1F1B"
