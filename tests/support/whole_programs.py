"""Whole programs, small, of the forms that public ones have, in our own words: a row each, as `tests/support/idioms.py`
has.

`tests/support/foreign.py` has public ones, where somebody has them in a folder.
"""

from __future__ import annotations

from tests.support.twins import Twin

TRAIN = '''
"""Trains a tiny language model: everything at the top, and settings that the command line changes."""

import os
import sys
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

out_dir = "out"
backend = "nccl"
device = "cuda"
max_iters = 1000
accumulation_steps = 8
batch_size, block_size, vocabulary = 4, 8, 17
learning_rate = 1e-2

for word in sys.argv[1:]:
    name, _, value = word.removeprefix("--").partition("=")
    globals()[name] = type(globals()[name])(value)

is_ddp = int(os.environ.get("RANK", -1)) != -1
if is_ddp:
    init_process_group(backend=backend)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_master = rank == 0
    accumulation_steps //= world_size
else:
    is_master, rank = True, 0

if is_master:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + rank)
tokens = np.random.default_rng(0).integers(vocabulary, size=1000).astype(np.uint16)


def get_batch():
    at = torch.randint(len(tokens) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(tokens[i : i + block_size].astype(np.int64)) for i in at])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + block_size].astype(np.int64)) for i in at])
    return x.to(device), y.to(device)


model = nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, vocabulary)).to(device)
context = nullcontext() if "cpu" in device else torch.autocast("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if is_ddp:
    model = DistributedDataParallel(model)
raw_model = model.module if is_ddp else model
x, y = get_batch()
for step in range(max_iters):
    for micro_step in range(accumulation_steps):
        if is_ddp:
            model.require_backward_grad_sync = micro_step == accumulation_steps - 1
        with context:
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / accumulation_steps
        x, y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if is_master:
        print(f"iter {step}: loss {loss.item() * accumulation_steps:.4f}")
if is_master:
    torch.save({"model": raw_model.state_dict(), "step": step}, os.path.join(out_dir, "ckpt.pt"))
if is_ddp:
    destroy_process_group()
'''

PROGRAMS = [
    Twin(
        "a train.py with everything at its top, as nanoGPT's",
        """
import runpy
import sys

sys.argv = ["train.py", "--backend=gloo", "--device=cpu", "--max_iters=3", "--accumulation_steps=4"]


def main(worker):
    runpy.run_path("train.py", run_name="__main__")
""",
        files={"train.py": TRAIN},
        joins=False,
    ),
    Twin(
        "a main_worker(gpu, …) for mp.spawn, with argparse and --dist-url, as PyTorch's ImageNet example",
        """
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description="Trains a classifier")
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=8, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--world-size", default=2, type=int)
parser.add_argument("--dist-url", default="", help="where ranks meet")
parser.add_argument("--dist-backend", default="gloo")
best = 0.0


def train(loader, model, optimizer):
    total = 0.0
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def validate(loader, model):
    right = torch.tensor([0.0, 0.0])
    for x, y in loader:
        right += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main_worker(gpu, args):
    global best
    url = args.dist_url or f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group(args.dist_backend, init_method=url, world_size=args.world_size, rank=gpu)
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size // args.world_size, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train(loader, model, optimizer)
        accuracy = validate(loader, model)
        best = max(best, accuracy)
        print(f"epoch {epoch}: loss {loss:.4f} accuracy {accuracy:.3f}")
        if gpu == 0:
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "best": best}, "checkpoint.pth.tar")
    return best


def main(gpu):
    return main_worker(gpu, parser.parse_args())
""",
        joins=False,
        takes="rank",
        launched="lambda worker: main(worker.rank)",
    ),
    Twin(
        "a Trainer with snapshots, as PyTorch's DDP tutorials",
        """
import os
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    epochs: int = 3
    batch_size: int = 4
    snapshot_path: str = "snapshot.pt"


class Squares(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.tensor([index / 32])
        return x, x**2


class Trainer:
    def __init__(self, config, model, data):
        self.config, self.model = config, model
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        self.loader = DataLoader(data, config.batch_size, shuffle=False, sampler=DistributedSampler(data))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.epochs_run = 0
        if os.path.exists(config.snapshot_path):
            snapshot = torch.load(config.snapshot_path)
            self.model.load_state_dict(snapshot["model"])
            self.epochs_run = snapshot["epoch"] + 1
            print(f"[rank {self.rank}] resumes at epoch {self.epochs_run}")
        self.model = DDP(self.model)

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for x, y in self.loader:
            loss = nn.functional.mse_loss(self.model(x), y)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        print(f"[rank {self.rank}] epoch {epoch} loss {loss.item():.5f}")

    def train(self):
        for epoch in range(self.epochs_run, self.config.epochs):
            self._run_epoch(epoch)
            if self.local_rank == 0:
                snapshot = {"model": self.model.module.state_dict(), "epoch": epoch, "config": asdict(self.config)}
                torch.save(snapshot, self.config.snapshot_path)


def main(worker):
    init_process_group(backend="gloo")
    torch.manual_seed(0)
    trainer = Trainer(TrainerConfig(), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), Squares())
    trainer.train()
    destroy_process_group()
    return trainer.epochs_run
""",
        joins=False,
        repeats=False,  # it would go on where the first has ended
    ),
    Twin(
        "FSDP2 and tensor parallelism on a device mesh, as PyTorch's examples",
        """
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.rand(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return losses, full


def main(worker):
    mesh = init_device_mesh("cpu", (worker.world_size,))
    torch.manual_seed(0)
    sharded = nn.Sequential(Block(), Block())
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    by_data, full = train(sharded)
    if worker.rank == 0:
        torch.save(full, "model.pt")
    torch.manual_seed(0)
    parallel = nn.Sequential(Block(), Block())
    for block in parallel:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    by_tensors, _ = train(parallel)
    return [by_data, by_tensors]
""",
        joins=False,
    ),
    Twin(
        "a trainer and a parameter server by RPC, as PyTorch's RNN example",
        """
import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from layers import Remote


def _run_trainer():
    torch.manual_seed(0)
    model = Remote("ps")
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.05)
    for epoch in range(3):
        with dist_autograd.context() as context:
            loss = nn.functional.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 1))
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        print(f"epoch {epoch} loss {loss.item():.4f}")


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = os.environ["FREE_PORT"]
    if rank == 1:
        rpc.init_rpc("trainer", rank=rank, world_size=world_size)
        _run_trainer()
    else:
        rpc.init_rpc("ps", rank=rank, world_size=world_size)
    rpc.shutdown()


def main(rank):
    run_worker(rank, 2)
""",
        files={
            "layers.py": '''
import torch
import torch.distributed.rpc as rpc
from torch import nn


def _parameters(layer):
    return [rpc.RRef(parameter) for parameter in layer.local_value().parameters()]


def _layer():
    torch.manual_seed(1)
    return nn.Linear(4, 1)


class Remote(nn.Module):
    """A layer that another process holds."""

    def __init__(self, holder):
        super().__init__()
        self.holder = holder
        self.layer = rpc.remote(holder, _layer)

    def forward(self, x):
        return self.layer.rpc_sync().forward(x)

    def parameter_rrefs(self):
        return rpc.rpc_sync(self.holder, _parameters, (self.layer,))
'''
        },
        joins=False,
        takes="rank",
        launched="lambda worker: main(worker.rank)",
        scripts=("spawn",),
        needs_port=True,
        repeats=False,
        note="Remote references, RRefs, work in the first launch on reserved ranks only, as PyTorch has them in a "
        "process only once.",
    ),
    Twin(
        "Hogwild: processes that share a model's memory, as PyTorch's MNIST example",
        """
import torch
import torch.multiprocessing as mp
from torch import nn


def train(rank, model):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(50):
        x = torch.randn(16, 4)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(worker):
    mp.set_start_method("spawn", force=True)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model.share_memory()
    processes = []
    for rank in range(2):
        process = mp.Process(target=train, args=(rank, model))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    x = torch.eye(4)
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item() < 0.05
""",
        joins=False,
        world_size=1,
        repeats=False,
    ),
]
