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

`ALL` has the strategies by title. `train` is what lessons launch: it takes one of them.
"""

from __future__ import annotations

from course.transformer.base import GPTStrategy
from course.transformer.base import counted as counted
from course.transformer.base import train as train
from course.transformer.combinations import DataParallelPipeline, DataPipelineTensorParallel, FSDP2TensorParallel
from course.transformer.context_parallel import ContextParallel, ContextParallelInOrder
from course.transformer.ddp import DDP
from course.transformer.expert_parallel import ExpertParallel
from course.transformer.fsdp import FSDP2, FSDP2Kept
from course.transformer.gpt import GPT as GPT
from course.transformer.gpt import IGNORED as IGNORED
from course.transformer.gpt import batches as batches
from course.transformer.gpt import mean_loss as mean_loss
from course.transformer.gpt import text as text
from course.transformer.gpt import words_share as words_share
from course.transformer.gpt import write as write
from course.transformer.mixed_precision import BF16
from course.transformer.pipelines import GPipe, Interleaved, OneFOneB, ZeroBubble
from course.transformer.recomputation import Recomputation
from course.transformer.sequence_parallel import SequenceParallel
from course.transformer.tensor_parallel import TensorParallel
from course.transformer.zero import ZeRO1

OneProcess = GPTStrategy

ALL: dict[str, type[GPTStrategy]] = {
    strategy.title: strategy
    for strategy in (
        *(OneProcess, DDP, FSDP2, FSDP2Kept, BF16, Recomputation, ZeRO1, SequenceParallel, TensorParallel),
        *(ContextParallel, ContextParallelInOrder, FSDP2TensorParallel, DataParallelPipeline),
        *(DataPipelineTensorParallel, GPipe, OneFOneB, Interleaved, ZeroBubble, ExpertParallel),
    )
}
"""Every strategy by its title."""
