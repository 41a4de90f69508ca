"""Two samplers, one seed."""

from torch.utils.data import DistributedSampler

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="Two samplers, one seed",
    story="""
    The samplers of two ranks shuffle 100 samples with the same seed. How many samples do both
    ranks get?
    """,
    choices=(
        "none",
        "about 25",
        "50",
    ),
    shows=1,
    expects=0,
    why="""
    All ranks must shuffle in the same way: each then takes every second sample of the same
    order. With *different* seeds the ranks would share about 25.
    """,
)


@EXHIBIT.sound
def samplers_of_one_seed(seed):
    ours, theirs = (set(DistributedSampler(range(100), 2, rank, seed=seed)) for rank in range(2))
    return len(ours & theirs)
