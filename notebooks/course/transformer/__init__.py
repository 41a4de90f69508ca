"""One small GPT, and every way to train it in parallel: a strategy a file, each the step of one process.

    gpt                 the model, its text, its loss, what it writes; `experts` a mixture of experts in it
    base                what its strategies have in common: parts of batch and sequence, losses over ragged sequences
    ddp, zero, fsdp     the whole network on every rank; its optimizer's state shared out; everything shared out
    tensor_parallel     layers cut, by heads, units and vocabulary; `sequence_parallel` what lies between them, too
    context_parallel    the sequence cut; `ring_attention` is how it still sees all of itself
    recomputation       activations computed twice rather than kept; `mixed_precision` products of 16 bits
    pipelines           blocks in a row over the ranks: GPipe, 1F1B, interleaved, zero bubble
    expert_parallel     experts shared out
    combinations        two at once, on a square of ranks, and three, on a cube

`ALL` has the strategies by title, in the order in which the lessons meet them: those of every file of this folder that
has a `LESSON`. Each is a name of this package, too. They are `labkit.Strategy`s, for `labkit.benchmark.run_strategy`.
"""

from __future__ import annotations

from typing import Any

from course.registry import strategies
from course.transformer.base import GPTStrategy
from course.transformer.gpt import GPT, IGNORED, batches, mean_loss, text, words_share, write

OneProcess = GPTStrategy

ALL = strategies(__name__, __path__, OneProcess)
"""Every strategy by its title, or its slug."""

_BY_NAME = {strategy.__name__: strategy for strategy in ALL.values()}

__all__ = [
    "ALL",
    "GPT",
    "IGNORED",
    "OneProcess",
    "batches",
    "mean_loss",
    "text",
    "words_share",
    "write",
    *_BY_NAME,
]


def __getattr__(name: str) -> Any:
    if name not in _BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return _BY_NAME[name]
