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
        "loads a file with a class that it does not mention",
        """
import pickle
from dataclasses import dataclass

WIDTH = 3


@dataclass
class Base:
    rows: int


class Config(Base):
    def size(self):
        return self.rows * WIDTH


def main(worker):
    with open("config.pkl", "rb") as file:
        return pickle.load(file).size()
""",
        files={"config.pkl": "c__main__\nConfig\n(I5\ntR."},
    ),
    Twin(
        "looks up names that only annotations mention",
        """
import dataclasses
import typing
from enum import Enum
from typing import Optional


class Optimizer(Enum):
    SGD = "sgd"


@dataclasses.dataclass
class Arguments:
    steps: int = 3
    optimizer: "Optional[Optimizer]" = None


def step(arguments: "Arguments", size: "float"):
    pass


def main(worker):
    hints = {**typing.get_type_hints(Arguments), **typing.get_type_hints(step)}
    return {name: str(hint) for name, hint in hints.items()}
""",
        scripts=("torchrun",),  # in a rank of mp.spawn the module is called __mp_main__
    ),
    Twin(
        "finds a class by its name",
        """
import sys


class Net:
    depth = 3


class Other:
    depth = 4


def main(worker, name):
    return [globals()[name].depth, getattr(sys.modules[__name__], "Other").depth, eval(name).depth]
""",
        args="('Net',)",
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
        cells=("cell", "reserved"),
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


@functools.singledispatch
def size(x):
    return 1


@size.register
def _(x: list):
    return sum(map(size, x))


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
    by_name = [pickle.loads(pickle.dumps(f)) is f for f in (fib, size, hello)]
    doubled = double(torch.ones(1, requires_grad=True))
    return fib(30), size([1, [2, 3]]), Lazy().value, hello("you"), hello.__name__, doubled.requires_grad, by_name
""",
    ),
    Twin(
        "calls a compiled function",
        """
import torch


@torch.compile(backend="eager")
def triple(x):
    return 3 * x


def main(worker):
    return triple(torch.ones(2)).tolist()
""",
        world_size=1,
    ),
    Twin(
        "uses a module that was loaded from a path",
        """
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("tools", "elsewhere/tools.py")
tools = importlib.util.module_from_spec(spec)
sys.modules["tools"] = tools
spec.loader.exec_module(tools)
unregistered = importlib.util.module_from_spec(spec)
spec.loader.exec_module(unregistered)
double = tools.double


def main(worker):
    import tools as imported

    return double(4), tools.Tool().size, unregistered.double(5), imported.double(6)
""",
        files={"elsewhere/tools.py": "def double(x):\n    return 2 * x\n\n\nclass Tool:\n    size = 3\n"},
    ),
    Twin(
        "uses a module that was made by hand",
        """
import sys
import types

settings = types.ModuleType("settings")
exec("width = 3\\ndef size(n):\\n    return n * width\\n\\nclass Box:\\n    pass", vars(settings))
sys.modules["settings"] = settings


def main(worker):
    import pickle

    import settings as imported

    box = pickle.loads(pickle.dumps(settings.Box()))
    return settings.size(2), imported.size(3), imported is settings, type(box) is settings.Box
""",
    ),
    Twin(
        "has objects that pickle by their names",
        """
import pickle
import typing

import torch.distributed as dist

UserId = typing.NewType("UserId", int)
P = typing.ParamSpec("P")
T = typing.TypeVar("T")


class Missing:
    def __reduce__(self):
        return "MISSING"


MISSING = Missing()


class Row(typing.Generic[T]):
    def __init__(self, user: UserId, value=MISSING):
        self.user, self.value = user, value


def main(worker):
    rows = [None] * worker.world_size
    dist.all_gather_object(rows, Row(UserId(worker.rank)))
    hints = typing.get_type_hints(Row.__init__)
    by_name = [pickle.loads(pickle.dumps(one)) is one for one in (UserId, MISSING)]
    return [row.value is MISSING for row in rows], hints["user"] is UserId, P.__name__, by_name
""",
    ),
    Twin(
        "has hooks on weights and steps, and weights that are computed",
        """
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(0)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


model = nn.Sequential(weight_norm(nn.Linear(2, 3)), nn.Linear(3, 3))
parametrize.register_parametrization(model[1], "weight", Symmetric())
free = torch.ones(2, requires_grad=True)
free.register_hook(lambda gradient: gradient * 3)
handle = model[0].bias.register_hook(lambda gradient: gradient * 100)
model[1].bias.register_hook(lambda gradient: gradient * 10)
seen = []
model[1].bias.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.tolist()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_post_hook(lambda *_: seen.append("step"))
second = torch.optim.LBFGS([free], lr=0.1)


def main(worker):
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    second.step(lambda: free.sum())
    free.sum().backward()
    is_symmetric = torch.equal(model[1].weight, model[1].weight.T)
    return [seen, model[0].bias.tolist(), free.grad.tolist(), is_symmetric, isinstance(model[0], nn.Linear)]
""",
        repeats=False,
        note="What a rank returns has no hooks.",
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
        cells=("cell", "reserved"),
    ),
    Twin(
        "has an array and a tensor in the same memory",
        """
import numpy as np
import torch

array = np.zeros(3000)
tensor = torch.from_numpy(array)


def main(worker):
    array[1] = 7
    tensor[2] = 8
    return tensor[:3].tolist(), array[:3].tolist()
""",
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
torch.set_grad_enabled(False)


def main(worker):
    print(torch.tensor(1 / 3))
    return [
        str(torch.ones(1).dtype),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.is_grad_enabled(),
    ]
""",
    ),
    Twin(
        "has chosen Python's settings for the whole process",
        """
import decimal
import locale
import os
import socket
import time

import numpy as np
import torch

os.umask(0o027)
os.environ["TZ"] = "Asia/Tokyo"
time.tzset()
decimal.getcontext().prec = 5
socket.setdefaulttimeout(17)
locale.setlocale(locale.LC_ALL, "C.UTF-8")
np.seterr(divide="raise")
torch.autograd.set_multithreading_enabled(False)


def main(worker):
    with open(f"file-{worker.rank}", "w"):
        pass
    try:
        divided = np.float64(1) / np.float64(0)
    except FloatingPointError:
        divided = "raises"
    return [
        oct(os.stat(f"file-{worker.rank}").st_mode),
        time.strftime("%Z"),
        str(decimal.Decimal(1) / 3),
        socket.getdefaulttimeout(),
        locale.setlocale(locale.LC_ALL),
        str(divided),
        torch.autograd.is_multithreading_enabled(),
    ]
""",
        scripts=("torchrun",),
    ),
    Twin(
        "lets torch.load make objects of its own class",
        """
from dataclasses import dataclass

import torch


@dataclass
class Config:
    lr: float


torch.serialization.add_safe_globals([Config])


def main(worker):
    name = f"checkpoint-{worker.rank}.pt"
    torch.save({"config": Config(0.5), "weight": torch.ones(2)}, name)
    return torch.load(name)["config"].lr
""",
        scripts=("torchrun",),  # a rank of mp.spawn saves it as of __mp_main__
    ),
    Twin(
        "has set up logging",
        """
import logging
import sys

logging.basicConfig(level=logging.INFO, format="%(name)s says %(message)s", stream=sys.stdout)
logging.getLogger("quiet").setLevel(logging.ERROR)
detailed = logging.getLogger("detailed")
detailed.setLevel(logging.DEBUG)
detailed.propagate = False
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("-- %(message)s"))
detailed.addHandler(handler)


def main(worker):
    logging.info("step %d", worker.rank)
    logging.debug("not to be seen")
    logging.getLogger("quiet").warning("not to be seen")
    detailed.debug("loss")
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
        "lets only rank 0 print",
        """
import builtins


def only_on_rank_0(rank):
    really = builtins.print

    def print(*args, force=False, **options):
        if rank == 0 or force:
            really(*args, **options)

    builtins.print = print


def main(worker):
    print("before", worker.rank)
    only_on_rank_0(worker.rank)
    print("after", worker.rank)
""",
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
