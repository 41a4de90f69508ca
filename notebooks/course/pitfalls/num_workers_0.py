"""First load, then train."""

import time

from torch.utils.data import DataLoader, Dataset

from course.pitfalls.base import Exhibit, Expected

EXHIBIT = Exhibit(
    wing="data",
    title="num_workers=0",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) loads and
    augments its images with `num_workers=0`. Below, a batch takes 20 ms to load and 20 ms
    to train; both are sleeps, which stand for the work. For what part of the time does
    training wait for data? (The second number is how many of 20 batches are loaded during a
    step.)
    """,
    choices=(
        "almost none",
        "about half",
        "almost all",
    ),
    shows=2,
    # On a busy machine a batch's 20 ms last longer.
    gives=Expected("half of the time", lambda seen: 0.35 < seen[0] < 0.8 and seen[1] == 0),
    expects=Expected("at least 5 of 20 batches loaded during a step", lambda found: found[1] >= 5),
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
    more = {"persistent_workers": True, "multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoader(Slow(), batch_size=1, num_workers=num_workers, **more)
    for _ in range(2):
        loads, steps, start = [], [], time.perf_counter()
        for load in loader:
            begin = time.perf_counter()
            time.sleep(0.02)
            loads.append(load)
            steps.append((begin, time.perf_counter()))
    training = sum(end - begin for begin, end in steps)
    meanwhile = sum(any(a < end and begin < b for begin, end in steps) for a, b in loads)
    return round(1 - training / (steps[-1][1] - start), 2), meanwhile


@EXHIBIT.broken
def num_workers_0():
    return second_pass(0)


@EXHIBIT.right
def right():
    """Loader workers load the next batches during the step."""
    return second_pass(2)
