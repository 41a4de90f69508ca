"""What a rank has of the notebook, as a script's rank has it of the script: a row each.

`tests/whole/test_twins.py` runs them every way.
"""

from __future__ import annotations

from tests.support.twins import CELLS, Twin

CARRIED = [
    # `__main__` is the script, or the notebook
    Twin(
        "sends objects of its own class to all ranks",
        """
from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class Part:
    rank: int


def main(worker):
    parts = [None] * worker.world_size
    dist.all_gather_object(parts, Part(worker.rank))
    first = [Part(7) if worker.rank == 0 else None]
    dist.broadcast_object_list(first, src=0)
    mine = [None]
    dist.scatter_object_list(mine, parts if worker.rank == 0 else None, src=0)
    print("rank", worker.rank, "has", len(parts), "parts")
    return [part.rank for part in (*parts, *first, *mine) if isinstance(part, Part)]
""",
    ),
    Twin(
        "saves a model with its class, which the notebook loads",
        """
import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)


def main(worker):
    if worker.rank == 0:
        torch.save(Net(), "net.pt")
    dist.barrier()
    return isinstance(torch.load("net.pt", weights_only=False), Net)
""",
        scripts=("torchrun",),  # a rank of mp.spawn saves it as __mp_main__.Net
        after="""print(isinstance(torch.load("net.pt", weights_only=False), Net))""",
    ),
    Twin(
        "counts in a global variable",
        """
calls = 0


def count():
    global calls
    calls += 1


def main(worker):
    import __main__

    for _ in range(3):
        count()
    return calls, __main__.calls
""",
        scripts=("torchrun",),  # in a rank of mp.spawn the script's variables are a copy of those of __main__
    ),
    Twin(
        "calls another rank's objects",
        """
import torch.distributed as dist
import torch.distributed.rpc as rpc


class Counter:
    def __init__(self, start):
        self.count = start

    def add(self, number):
        self.count += number
        return self.count


def main(worker):
    rpc.init_rpc(f"worker{worker.rank}", rank=worker.rank, world_size=worker.world_size)
    other = f"worker{1 - worker.rank}"
    counter = rpc.remote(other, Counter, args=(10 * worker.rank,))
    found = counter.rpc_sync().add(5)
    rpc.shutdown()
    return found
""",
        repeats=False,  # PyTorch has remote references until RPC is ended for the first time in a process
    ),
    *(
        Twin(
            f"starts processes of its own by {method}, which pickle by name",
            f"""
import pickle
from dataclasses import dataclass

import torch
import torch.multiprocessing as mp

table = torch.arange(5.0)


@dataclass
class Part:
    number: int


def work(index, queue):
    queue.put((pickle.dumps(Part(index)), Part(index), table.sum().item()))


def main(worker):
    context = mp.get_context("{method}")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(3, queue))
    child.start()
    pickled, part, total = queue.get()
    child.join()
    return [pickle.loads(pickled).number, part == Part(3), isinstance(part, Part), total, child.exitcode]
""",
            world_size=1,
            scripts=("spawn",),
            cells=cells,
        )
        for method, cells in (("fork", CELLS), ("spawn", ("cell",)), ("forkserver", ("reserved",)))
    ),
    Twin(
        "loads a data set of its own class in worker processes",
        """
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

SCALE = torch.tensor(3.0)


class Sample(NamedTuple):
    value: torch.Tensor


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Sample(index * SCALE)


def main(worker):
    batches = list(DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context="spawn"))
    return [type(batch) is Sample for batch in batches], [batch.value.tolist() for batch in batches]
""",
        world_size=1,
        scripts=("spawn",),
        cells=("cell",),
    ),
    Twin(
        "decorates functions with what pickles by name",
        """
import functools
import pickle

import torch


@functools.cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


class Lazy:
    @functools.cached_property
    def value(self):
        return fib(10)


def shout(function):
    @functools.wraps(function)
    def shouting(*args):
        return function(*args).upper()

    return shouting


@shout
def hello(name):
    return f"hello {name}"


@torch.no_grad()
def double(x):
    return 2 * x


def main(worker):
    by_name = [pickle.loads(pickle.dumps(f)) is f for f in (fib, hello)]
    doubled = double(torch.ones(1, requires_grad=True))
    return fib(30), Lazy().value, hello("you"), hello.__name__, doubled.requires_grad, by_name
""",
    ),
    # Tensors keep their storages
    Twin(
        "keeps its weights in one flat buffer",
        """
import torch

flat = torch.zeros(4000)
weights = [flat[:2000].view(2, 1000), flat[2000:]]


def main(worker):
    flat.add_(4)
    return [weight.unique().tolist() for weight in weights]
""",
    ),
    Twin(
        "trains one model in shared memory on all ranks",
        """
import torch
from torch import nn

model = nn.Linear(50, 50, bias=False)
nn.init.zeros_(model.weight)
model.share_memory()


def main(worker, model):
    with torch.no_grad():
        model.weight[worker.rank] += 1 + worker.rank
    return model.weight.is_shared()
""",
        args="(model,)",
        after="print(model.weight.sum(1)[:3].tolist())",
        repeats=False,
        scripts=("spawn",),
    ),
    # What a rank has of the notebook's settings
    Twin(
        "has chosen PyTorch's settings for the whole process",
        """
import torch

torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_float32_matmul_precision("high")
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.deterministic = True
torch.set_printoptions(precision=2)


def main(worker):
    print(torch.tensor(1 / 3))
    return [
        str(torch.ones(1).dtype),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    ]
""",
    ),
    Twin(
        "has set up logging",
        """
import logging

logging.basicConfig(level=logging.INFO)
logging.getLogger("quiet").setLevel(logging.ERROR)
logging.getLogger("detailed").setLevel(logging.DEBUG)


def main(worker):
    logging.info("step %d", worker.rank)
    logging.debug("not to be seen")
    logging.getLogger("quiet").warning("not to be seen")
    logging.getLogger("detailed").debug("loss")
""",
    ),
    Twin(
        "imports a module that sets up logging",
        """
def main(worker):
    import logging

    import project

    logging.info("step %d", worker.rank)
    return project.NAME
""",
        files={
            "project.py": "import logging, sys\n"
            'logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)\n'
            'NAME = "project"\n'
        },
    ),
    Twin(
        "finds modules by a relative path and changes the folder",
        """
import os
import sys

sys.path.insert(0, "lib")
import settings_of_lib

os.makedirs("work/lib", exist_ok=True)
with open("work/lib/settings_of_lib.py", "w") as file:
    file.write("name = 'another'")
with open("work/lib/more_of_lib.py", "w") as file:
    file.write("name = 'another'")
os.chdir("work")


def main(worker):
    import more_of_lib

    return settings_of_lib.name, more_of_lib.name
""",
        files={"lib/settings_of_lib.py": "name = 'mine'", "lib/more_of_lib.py": "name = 'mine'"},
        scripts=("torchrun",),
    ),
]
