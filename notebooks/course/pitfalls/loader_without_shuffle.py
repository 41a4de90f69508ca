"""shuffle=False in the loader."""

from torch.utils.data import DataLoader, DistributedSampler

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="well_known",
    title="shuffle=False in the loader",
    story="""
    PyTorch's own DDP series
    ([multigpu.py](https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/multigpu.py))
    makes its training loader with `shuffle=False`, and a
    `DistributedSampler` with its defaults; `set_epoch` is called. Are the batches of epoch 2
    those of epoch 1?
    """,
    choices=(
        "yes",
        "no",
    ),
    shows=2,
    expects=False,
    why="""
    The sampler decides the order, and `DistributedSampler` shuffles by default. A loader
    with a sampler refuses `shuffle=True`.
    """,
)


@EXHIBIT.sound
def loader_without_shuffle(world_size, seed):
    sampler = DistributedSampler(range(100), world_size, 0, seed=seed)
    loader = DataLoader(range(100), 8, sampler=sampler, shuffle=False)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    return epochs[0] == epochs[1]
