"""A sampler for data that differ."""

import torch

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="well_known",
    title="Random data, and a sampler of indices",
    story="""
    In PyTorch's own DDP series
    ([datautils.py](https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/datautils.py))
    every rank draws a random data set, and a `DistributedSampler` distributes the indices. Is
    index 0 the same sample on every rank?
    """,
    choices=(
        "yes",
        "no",
    ),
    shows=2,
    gives=False,
    expects=True,
)


@EXHIBIT.broken
def random_data_set(on_ranks):
    def first_sample(worker):
        torch.seed()  # as a fresh process is
        return torch.rand(8, 20)[0].tolist()

    samples = on_ranks(first_sample)
    return all(sample == samples[0] for sample in samples)


@EXHIBIT.right
def right(on_ranks, seed):
    """A sampler distributes indices. They mean the same samples only if all ranks have the same
    data: draw random data with a seed that all ranks share."""

    def first_sample(worker):
        return torch.rand(8, 20, generator=torch.Generator().manual_seed(seed))[0].tolist()

    samples = on_ranks(first_sample)
    return all(sample == samples[0] for sample in samples)
