"""nn.DataParallel in one process: every GPU of this machine takes a part of each batch.

    python data_parallel.py digits.pt --epochs 1

Without a GPU nn.DataParallel runs the bare network, and says nothing; this script says so. digits.pt holds
(images, labels), as `torch.save` writes a tuple. The loss of every step is left in losses.pt.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10)),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="losses.pt")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda:0" if gpus else "cpu")
    torch.manual_seed(options.seed)
    model = nn.DataParallel(network().to(device))  # the original lies on the first of the devices
    print(f"{gpus} GPUs" if gpus else "no GPU: this is the bare network, in one process")
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    train_set = TensorDataset(*torch.load(options.data, weights_only=True))
    shuffling = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(
        train_set, options.batch_size, shuffle=True, drop_last=True, generator=shuffling
    )  # batch_size is that of all GPUs together
    losses = []
    began = time.perf_counter()
    for epoch in range(options.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # waits for the devices, so that the clock below is right
        rate = len(losses) * options.batch_size / (time.perf_counter() - began)
        of_epoch = losses[-len(loader) :]
        print(f"epoch {epoch}: loss {sum(of_epoch) / len(loader):.4f}, {rate:,.0f} images/s")
    for gpu in range(gpus):
        print(f"GPU {gpu}: {torch.cuda.max_memory_allocated(gpu) / 2**20:.1f} MiB at most")
    torch.save(losses, options.out)


if __name__ == "__main__":
    main()
