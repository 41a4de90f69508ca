"""First load, then train: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import time

from torch.utils.data import DataLoader, Dataset

from labkit.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="First load, then train",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) loads with
    `num_workers=0` and augmentation. Below a batch takes 20 ms to load and 20 ms to train; both
    are sleeps, which stand for the work. Which part of the time does training wait for data?
    """,
    choices=(
        "almost none",
        "about half",
        "almost all",
    ),
    shows=2,
    kind="slow",
    needs="fork",
)


class Slow(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        began = time.perf_counter()
        time.sleep(0.02)
        return time.perf_counter() - began


def waiting_shares(num_workers):
    """The second pass over the data: what part of it, and of the loading, is waiting for the loader?"""
    more = {"persistent_workers": True, "multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoader(Slow(), batch_size=1, num_workers=num_workers, **more)
    for _ in range(2):
        waited, loaded, began = 0.0, 0.0, time.perf_counter()
        asked = began
        for seconds in loader:
            waited += time.perf_counter() - asked
            loaded += seconds.item()
            time.sleep(0.02)
            asked = time.perf_counter()
    return round(waited / (time.perf_counter() - began), 2), waited / loaded


@EXHIBIT.broken
def load_then_train():
    return waiting_shares(0)[0]


@EXHIBIT.symptom
def symptom(seen):
    return 0.35 < seen < 0.65


@EXHIBIT.right
def right():
    """With helpers the next batches are loaded while this one is trained."""
    share, of_loading = waiting_shares(2)
    assert of_loading < 0.8, "of the loading, some is hidden behind training"
    return share
