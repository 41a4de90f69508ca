"""First load, then train: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import time

from torch.utils.data import DataLoader, Dataset

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="First load, then train",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) loads and
    augments its images with `num_workers=0`. Below, a batch takes 20 ms to load and 20 ms
    to train; both are sleeps, which stand for the work. For what part of the time does
    training wait for data?
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
        return began, time.perf_counter()


def second_pass(num_workers):
    """What part of it was waiting for the loader, and how many batches were loaded during a step."""
    more = {"persistent_workers": True, "multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoader(Slow(), batch_size=1, num_workers=num_workers, **more)
    for _ in range(2):
        waited, loads, steps = 0.0, [], []
        asked = start = time.perf_counter()
        for began, ended in loader:
            step = time.perf_counter()
            waited += step - asked
            time.sleep(0.02)
            asked = time.perf_counter()
            loads.append((began.item(), ended.item()))
            steps.append((step, asked))
    meanwhile = sum(any(a < end and begin < b for begin, end in steps) for a, b in loads)
    return round(waited / (time.perf_counter() - start), 2), meanwhile


@EXHIBIT.broken
def num_workers_0():
    return second_pass(0)[0]


@EXHIBIT.symptom
def symptom(seen):
    return 0.35 < seen < 0.8  # on a busy machine a batch's 20 ms last longer


@EXHIBIT.right
def right():
    """With helpers the next batches are loaded while this one is trained."""
    share, meanwhile = second_pass(2)
    assert meanwhile >= 5, f"of 20 batches {meanwhile} were loaded during a step"
    return f"{share}, and {meanwhile} of 20 batches were loaded during a step"
