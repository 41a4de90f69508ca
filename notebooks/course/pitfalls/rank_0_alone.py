"""Evaluation on rank 0 only."""

from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit, Expected
from course.pitfalls.helpers import accuracy, part_of, steps_of

EXHIBIT = Exhibit(
    wing="learning",
    title="Evaluation on rank 0 only",
    story="""
    After training with DDP, only rank 0 evaluates, by `model.module`, while the others go on.
    What comes of rank 0?
    """,
    choices=(
        "it waits for the others until a timeout",
        "an accuracy",
        "an error",
    ),
    shows=2,
    expects=Expected(
        "an accuracy from rank 0 only", lambda found: 0 <= found[0] <= 1 and not any(found[1:])
    ),
    why="""
    `model.module` is the network inside: its forward pass calls no collective. `model(images)`,
    DDP's own, may: it broadcasts buffers such as BatchNorm's statistics.
    """,
)


@EXHIBIT.sound
def rank_0_alone(on_ranks, images, labels):
    def evaluate(worker):
        model = DistributedDataParallel(course.models.linear(images[0].numel()))
        steps_of(model, part_of(worker, images), part_of(worker, labels))
        return accuracy(model.module, images, labels) if worker.rank == 0 else None

    return on_ranks(evaluate)
