"""Whose images."""

from course.pitfalls.base import Exhibit, above

EXHIBIT = Exhibit(
    wing="well_known",
    title="Whose images?",
    story="""
    A script of the University of Amsterdam's course
    ([single_layer.py](https://github.com/phlippe/uvadlc_notebooks/blob/master/docs/tutorial_notebooks/DL2/High-performant_DL/Multi_GPU/scripts/single_layer.py))
    lets a rank take 128 images from `world_size * rank` on. How many of them do two ranks
    share?
    """,
    choices=(
        "none",
        "two",
        "nearly all",
    ),
    shows=3,
    gives=above(100),
    expects=0,
)


def shared(ours, theirs):
    """Count the images that are in both."""
    return int((ours[:, None] == theirs[None]).flatten(2).all(2).any(1).sum())


@EXHIBIT.broken
def whose_images(on_ranks, images):
    def take(worker):
        first = worker.world_size * worker.rank
        return images[first : first + 128]

    rank_0, rank_1, *_ = on_ranks(take)
    return shared(rank_0, rank_1)


@EXHIBIT.right
def right(on_ranks, images):
    """Rank r begins at image 128 r."""

    def take(worker):
        first = 128 * worker.rank
        return images[first : first + 128]

    rank_0, rank_1, *_ = on_ranks(take)
    assert len(rank_0) == len(rank_1) == 128
    return shared(rank_0, rank_1)
