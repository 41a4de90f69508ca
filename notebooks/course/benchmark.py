"""Train by a strategy and measure it: the same function for every strategy, so that runs can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from labkit.comparison.differences import buffer_names, greatest, largest_difference, portable
from labkit.comparison.held import most_held
from labkit.comparison.measured import Measured
from labkit.comparison.program import Recorder
from labkit.comparison.timed import LoadMeter, Timed
from labkit.trace.profiling import Clock, counted_sent, trace

if TYPE_CHECKING:
    from course.strategies.base import Strategy
    from labkit.comparison.comparison import Comparison
    from labkit.rank.worker import Worker
    from labkit.run import Run
    from labkit.session.session import Session


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the greatest difference of any weight, NaN if one is NaN.

    Raises ValueError if they do not have the same weights.
    """
    if one.keys() != other.keys():
        raise ValueError(f"these weights are in one network only: {', '.join(sorted(one.keys() ^ other.keys()))}")
    return greatest(largest_difference(one[name].cpu(), other[name].cpu()) for name in one)


def run_strategy(
    worker: Worker,
    strategy: type[Strategy],
    network: Callable[[], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    batches: Callable[[torch.device], Iterator[tuple[Tensor, Tensor]]],
    steps: int = 20,
    check_after: int = 5,
) -> Measured:
    """Train by a strategy and measure it. To be launched: `labkit.launch(benchmark.run_strategy, DDP, network, …)`.

    Args:
        worker: the rank.
        strategy: the class; see `Strategy` of `course.strategies`.
        network: makes the whole network, with the same weights on every rank: (n, …) inputs → (n, …) outputs.
        loss: of (n, …) outputs and (n, …) targets: the mean over the n samples, shape ().
        optimizer: a `functools.partial` of an optimizer class: what all takes but the parameters.
        batches: of a device: yields whole batches, (inputs, targets) of (batch_size, …) each, the same on every rank,
            for ever.
        steps: how many to take; the first quarter warms up and is not measured.
        check_after: after how many steps the weights are kept.
    """
    if not 0 < check_after <= steps or steps < 4:
        raise ValueError(f"steps must be at least 4 and check_after between 1 and steps, got {steps} and {check_after}")
    clock = Clock(worker.device)
    whole_network = network().to(worker.device)
    strategy.check(whole_network, next(batches(worker.device))[0])
    try:
        trainer = strategy(worker, whole_network, loss, optimizer, clock)
    except Exception as error:
        raise ValueError(f"{strategy.title} cannot train this network: {type(error).__name__}: {error}") from error
    del whole_network  # a stage keeps its part
    stream = batches(worker.device)
    warm = steps // 4
    worker.expect(steps)

    def one_step() -> tuple[int, Tensor | None]:
        with clock.step():
            with clock("data"):
                inputs, targets = next(stream)
            return len(inputs), trainer.step(inputs, targets)

    sent, meter = 0.0, LoadMeter()
    for count in range(1, steps + 1):
        sent_before = counted_sent()
        batch_size, value = one_step()
        if count > warm:
            sent += counted_sent() - sent_before
        logged: dict[str, Any] = {} if value is None else {"loss": value}
        worker.log(samples=batch_size / worker.world_size, **logged)
        if count == check_after:
            weights = {name: portable(tensor, copy=True) for name, tensor in trainer.weights().items()}
    load = meter.load(worker.device)
    steps_s = tuple(marks[0].end_s - marks[0].start_s for marks in clock.steps[warm:])
    traced = trace(clock, one_step)
    with most_held(trainer.model, trainer.optimizer) as memory:
        one_step()
    recorder = Recorder()
    with recorder.recording():
        one_step()
    return Measured(
        weights,
        Timed([marks[0] for marks in traced], [mark for marks in traced for mark in marks[1:]]),
        steps_s,
        recorder.program(),
        sent / (steps - warm),
        memory,
        is_on_gpu=worker.device.type == "cuda",
        buffers=buffer_names(trainer.model.modules()),
        load=load,
        exact=trainer.exact,
        bytes_expected=trainer.bytes_expected(batch_size),
    )


def every_strategy(
    strategies: Iterable[type[Strategy]],
    network: Callable[[], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    batches: Callable[[torch.device], Iterator[tuple[Tensor, Tensor]]],
    world_size: int = 2,
    steps: int = 8,
    on: Session | None = None,
    live: bool = True,
) -> Comparison:
    """Train by each strategy, one after the other on reserved ranks, and return what `labkit.compare` says of them.

    Args:
        strategies: the classes; `OneProcess` is a good first one to compare with.
        network, loss, optimizer, batches, steps: as `run_strategy` takes them.
        world_size: ranks of each; a strategy may take another number (`Strategy.ranks`).
        on: has the ranks to launch on; by default they are reserved here, and released.
        live: show the comparison while they run; else only when it is the last expression of a cell.
    """
    from labkit.comparison.comparison import Comparison
    from labkit.comparison.launching import grow, reserved
    from labkit.launcher import launch

    chosen = {strategy.title: strategy for strategy in strategies}
    comparison = Comparison({}, to_come=chosen)

    def launching(strategy: type[Strategy], session: Session) -> Callable[[], Run]:
        call = (run_strategy, strategy, network, loss, optimizer, batches, steps)
        ranks = strategy.ranks(world_size)
        return lambda: launch(*call, on=session, world_size=ranks, name=strategy.title, live=False, wait=False)

    with reserved(on, (strategy.ranks(world_size) for strategy in chosen.values())) as session:
        grow(comparison, {title: launching(strategy, session) for title, strategy in chosen.items()}, live)
    return comparison
