"""More predictions than images."""

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from course.pitfalls.base import Exhibit, above

EXHIBIT = Exhibit(
    wing="well_known",
    title="gather, on a test set that does not divide",
    story="""
    Accelerate's page on
    [notebooks](https://huggingface.co/docs/accelerate/basic_tutorials/notebook) gathers
    predictions with `gather`, and divides by their number. Here the size of the test set is not
    a multiple of the number of ranks, and rank 0 gathers: how many predictions too many does it
    get?
    """,
    choices=(
        "none",
        "one or more",
    ),
    shows=2,
    gives=above(0),
    expects=0,
)


def gathered(worker, count):
    """The images that each prediction belongs to, as they come back from all ranks."""
    mine = list(DistributedSampler(range(count), worker.world_size, worker.rank, shuffle=False))
    parts = [None] * worker.world_size
    dist.all_gather_object(parts, mine)
    return [index for together in zip(*parts, strict=True) for index in together]


@EXHIBIT.broken
def gathered_predictions(on_ranks, world_size):
    count = 10 * world_size + 1
    return len(on_ranks(lambda worker: gathered(worker, count))[0]) - count


@EXHIBIT.right
def right(on_ranks, world_size):
    """The sampler repeats images from the beginning. Cut the gathered predictions, in the set's
    order, to its size, or use `gather_for_metrics`, which does."""
    count = 10 * world_size + 1
    found = on_ranks(lambda worker: gathered(worker, count))[0][:count]
    assert found == list(range(count))
    return len(found) - count
