"""A sampler for the test set."""

from torch.utils.data import DistributedSampler

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="A sampler for the test set",
    story="""
    1000 test images for 4 ranks: `DistributedSampler(…, shuffle=False)`, and no `set_epoch` in
    any epoch. What do the ranks evaluate together, in epoch 3?
    """,
    choices=(
        "some images several times, others never",
        "each image once",
        "the same quarter on each rank",
    ),
    shows=2,
    expects=True,
    why="""
    Without shuffling the order does not depend on the epoch, and 1000 is a multiple of 4. An
    evaluation needs each image once, in any order.
    """,
)


@EXHIBIT.sound
def test_sampler():
    samplers = [DistributedSampler(range(1000), 4, rank, shuffle=False) for rank in range(4)]
    epochs = [sorted(index for sampler in samplers for index in sampler) for _ in range(3)]
    return epochs[2] == list(range(1000))
