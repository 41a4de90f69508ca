"""A training sampler that does not shuffle."""

from torch.utils.data import DataLoader, DistributedSampler

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="well_known",
    title="A training sampler, in epoch 2",
    story="""
    The guide of
    [Keras](https://github.com/keras-team/keras-io/blob/master/guides/distributed_training_with_torch.py)
    makes its training sampler with `shuffle=False`. Which images share a batch in epoch 2,
    compared with epoch 1?
    """,
    choices=(
        "the same",
        "different ones",
    ),
    shows=1,
    gives=True,
    expects=False,
)


@EXHIBIT.broken
def sampler_no_shuffle(world_size):
    sampler = DistributedSampler(range(100), world_size, 0, shuffle=False)
    loader = DataLoader(range(100), 8, sampler=sampler, shuffle=False)
    first, second = ([batch.tolist() for batch in loader] for epoch in range(2))
    return first == second


@EXHIBIT.right
def right(world_size, seed):
    """A `DistributedSampler` shuffles by default. Call `set_epoch` too."""
    sampler = DistributedSampler(range(100), world_size, 0, seed=seed)
    loader = DataLoader(range(100), 8, sampler=sampler)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    return epochs[0] == epochs[1]
