"""Pipelines: some blocks on each rank, micro-batches in flight. The schedules of `torch.distributed.pipelining`.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019; interleaved: Narayanan et al. 2021
(https://arxiv.org/abs/2104.04473). Zero bubble: Qi et al. 2023 (https://arxiv.org/abs/2401.10241).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.transformer.base import GPTStrategy, counted
from course.transformer.gpt import GPT, mean_loss, stage


class GPipe(GPTStrategy):
    """All micro-batches forward, then all backward."""

    title = "GPipe"
    schedule: ClassVar[str] = "ScheduleGPipe"
    micro_batches: ClassVar[int] = 4
    stages_per_rank: ClassVar[int] = 1

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """As many as are asked for."""
        return world_size

    @staticmethod
    def timed(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called for a kind of pass of a stage: "forward", "backward" or "weights"."""
        return call

    def cut(self, network: GPT) -> nn.Module:
        """Keep this rank's stages, and make the schedule."""
        return self.make_pipeline(network, self.worker.rank, self.worker.world_size, None)

    def make_pipeline(self, network: GPT, index: int, length: int, group: dist.ProcessGroup | None) -> nn.Module:
        """Make a pipeline over `length` ranks, of which this is number `index`; return this rank's stages."""
        from torch.distributed import pipelining

        self.length, self.total = length, length * self.stages_per_rank
        # Looped: rank 0 has stage 0, rank 1 stage 1, …, and then rank 0 again.
        self.numbers = [index + length * turn for turn in range(self.stages_per_rank)]
        parts = [stage(copy.deepcopy(network), number, self.total) for number in self.numbers]
        stages: list[Any] = []
        for part, number in zip(parts, self.numbers, strict=True):
            one: Any = pipelining.PipelineStage(part, number, self.total, self.worker.device, group=group)
            one.forward_one_chunk = self.timed("forward", self._placed(part, one.forward_one_chunk))
            one.backward_one_chunk = self.timed("backward", one.backward_one_chunk)
            one.backward_weight_one_chunk = self.timed("weights", one.backward_weight_one_chunk)
            stages.append(one)
        kind = getattr(pipelining, self.schedule, None) or getattr(pipelining.schedules, self.schedule)
        given = stages if issubclass(kind, pipelining.schedules.PipelineScheduleMulti) else stages[0]
        self.pipeline = kind(given, self.micro_batches, loss_fn=self._share_of_loss)
        return nn.ModuleList(parts)

    def _placed(self, part: GPT, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Have a stage's layers know which samples a micro-batch is made of."""

        def placed(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            part.place.step = self.place.step
            assert self.place.samples is not None
            part.place.samples = self.place.samples.chunk(self.micro_batches)[micro_batch]
            return forward(micro_batch, *args, **kwargs)

        return placed

    def _share_of_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's loss, such that the mean over micro-batches is the whole batch's."""
        return mean_loss(logits, targets) * self.micro_batches * counted(targets) / self._counted

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Let the schedule run the micro-batches, (batch_size / micro_batches, time) each, through the stages."""
        if len(inputs) % self.micro_batches:
            raise ValueError(f"a batch of {len(inputs)} cannot be cut into {self.micro_batches} equal micro-batches")
        self.set_place(inputs)
        self._counted = counted(targets) / self.averaged_over
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        is_last = self.total - 1 in self.numbers
        arguments = [self.local_batch(inputs)] if 0 in self.numbers else []
        rest = {"target": self.local_batch(targets), "losses": losses} if is_last else {}
        self.pipeline.step(*arguments, **rest)
        self.communicate()
        self.optimizer.step()
        return torch.stack(losses).mean().detach() if is_last else None

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of this rank's stages, by the whole network's names."""
        assert isinstance(self.model, nn.ModuleList)
        return {name: tensor for part in self.model for name, tensor in part.state_dict().items()}


class OneFOneB(GPipe):
    """One forward, one backward in turn, so that no stage holds more micro-batches than there are stages."""

    title = "1F1B"
    schedule = "Schedule1F1B"


class Interleaved(GPipe):
    """1F1B with two stages of half the size on each rank: a bubble half as long, twice as much to send."""

    title = "interleaved 1F1B"
    schedule = "ScheduleInterleaved1F1B"
    stages_per_rank = 2


class ZeroBubble(GPipe):
    """The backward pass in two: the inputs' gradients, for which the stage before waits, and, later, the weights'."""

    title = "zero bubble"
    schedule = "ScheduleInterleavedZeroBubble"
    stages_per_rank = 2
