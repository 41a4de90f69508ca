"""Strategies: ways to train in parallel, one short file each, with the same small interface (`base.Strategy`).

`ALL` has them by title, in the order in which the lessons meet them. None launches or draws: a rank makes one and calls
`step`; see `course.benchmark.run_strategy`.
"""

from __future__ import annotations

from course.strategies.base import Strategy
from course.strategies.data_parallel import DataParallel
from course.strategies.ddp import DDP, DDPAccumulated, DDPFp16
from course.strategies.hogwild import Hogwild
from course.strategies.manual_allreduce import ManualAllReduce, OneBuffer
from course.strategies.model_parallel import Hybrid, ModelParallel
from course.strategies.pipeline import GPipe, OneFOneB
from course.strategies.sharding import FSDP2, FSDP2TensorParallel, TensorParallel, ZeRO1

OneProcess = Strategy

ALL: dict[str, type[Strategy]] = {
    strategy.title: strategy
    for strategy in (
        *(OneProcess, Hogwild, DataParallel, ManualAllReduce, OneBuffer, DDP, DDPAccumulated, DDPFp16),
        *(ModelParallel, Hybrid, GPipe, OneFOneB, ZeRO1, FSDP2, TensorParallel, FSDP2TensorParallel),
    )
}
"""Every strategy by its title."""
