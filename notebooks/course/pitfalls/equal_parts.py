"""Equal parts of what does not divide."""

from torch.utils.data import DistributedSampler

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="50,000 images for 3 and for 6 ranks",
    story="""
    `DistributedSampler` gives all ranks equally many of 50,000 images. How many images are
    drawn twice, at 3 and at 6 ranks?
    """,
    choices=(
        "none",
        "1 and 4",
        "3 and 6",
    ),
    shows=2,
    gives={3: 1, 6: 4},
    expects={3: 0, 6: 0},
)


def twice(ranks, **options):
    samplers = [DistributedSampler(range(50_000), ranks, rank, **options) for rank in range(ranks)]
    drawn = [index for sampler in samplers for index in sampler]
    return len(drawn) - len(set(drawn))


@EXHIBIT.broken
def equal_parts():
    return {n: twice(n) for n in (3, 6)}


@EXHIBIT.right
def right():
    """The sampler repeats images from the beginning of its order. That hardly matters in training;
    a test counts them twice (16f, `gathered_predictions`). `drop_last=True` drops the remainder
    instead: different images in each epoch, if `set_epoch` is called."""

    def dropped(epoch):
        samplers = [DistributedSampler(range(50_000), 3, rank, drop_last=True) for rank in range(3)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return set(range(50_000)).difference(*samplers)

    assert len(dropped(0)) == 2
    assert dropped(0) != dropped(1)
    return {n: twice(n, drop_last=True) for n in (3, 6)}
