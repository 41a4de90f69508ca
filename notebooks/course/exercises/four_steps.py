"""Exercise: `nn.DataParallel` by hand, its four steps in threads."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="02",
    title="DataParallel by hand",
    statement="""
    `four_steps` computes `network(inputs)` on several `devices`. *Replicate* and *apply* are written. Write *scatter*:
    `pieces` is a list of pieces of the rows, at most one for each device, and each on its device. And *gather*: return
    all outputs, in the order of the rows, in one tensor on the first device.
    """,
    hints=(
        "`inputs.chunk(n)` cuts the rows into at most n pieces.",
        "`zip` of the pieces and the devices ends with the shorter of them; each piece goes `.to` its device.",
        "`torch.cat` joins the outputs, once each of them is `.to(devices[0])`.",
    ),
    why="A copy made inside the graph is one more use of the original's weights, so autograd itself adds the "
    "gradients of all devices.",
    world_sizes=(),
    imports=(
        "import copy",
        "from concurrent.futures import ThreadPoolExecutor",
        "",
        "import torch",
        "from torch.func import functional_call",
    ),
    cases=({"rows": 6, "count": 2}, {"rows": 7, "count": 3}, {"rows": 1, "count": 2}),
    given={
        "body": """
        pieces = [inputs]  # scatter: a piece for each device, on that device
        ...

        modules = [copy.deepcopy(network) for _ in pieces]  # replicate: forward may set attributes
        tensors = dict(network.named_parameters()) | dict(network.named_buffers())
        copies = [tensors]  # the first device uses the original's weights and buffers
        for device in devices[1 : len(pieces)]:
            copies.append({name: tensor.to(device, copy=True) for name, tensor in tensors.items()})
        with ThreadPoolExecutor(len(pieces)) as threads:  # apply
            outputs = list(threads.map(functional_call, modules, copies, pieces))
        return outputs[0]  # gather: all of them
        """
    },
)


@EXERCISE.reference
def four_steps(network, inputs, devices):
    """Return `network(inputs)`, (rows, …), on the first device; each device computes its piece of the rows."""
    pieces = inputs.chunk(len(devices))
    modules = [copy.deepcopy(network) for _ in pieces]
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())
    copies = [tensors]
    for device in devices[1 : len(pieces)]:
        copies.append({name: tensor.to(device, copy=True) for name, tensor in tensors.items()})

    def apply(module, own, piece, device):
        return functional_call(module, own, (piece.to(device),))

    with ThreadPoolExecutor(len(pieces)) as threads:
        outputs = list(threads.map(apply, modules, copies, pieces, devices))
    return torch.cat([output.to(inputs.device) for output in outputs])


class Meeting:
    """Where threads meet: each waits until all of them have come."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.missed = False

    def __deepcopy__(self, memo: Any) -> Meeting:
        return self

    def wait(self) -> None:
        """Wait for the others, but not for ever."""
        try:
            self.barrier.wait(timeout=0.7)
        except threading.BrokenBarrierError:
            self.missed = True


class Network(nn.Module):
    """A small network with a buffer and a counter, in which the threads meet."""

    def __init__(self, meeting: Meeting | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.sums: torch.Tensor
        self.register_buffer("sums", torch.zeros(3))
        self.meeting, self.calls = meeting, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute, and note in the buffer what was seen."""
        self.calls += 1
        if self.meeting:
            self.meeting.wait()
        self.sums.add_(inputs.detach().sum(0))
        outputs: torch.Tensor = self.last(torch.tanh(self.linear(inputs)))
        return outputs


@EXERCISE.trial
def trial(t: Trial, rows: int, count: int) -> None:
    """Call it, and compare with the network itself."""
    inputs = t.numbers(rows, 3) / 100
    pieces = inputs.chunk(count)
    meeting = Meeting(len(pieces))
    network, plain = Network(meeting), Network(None)
    outputs = t.call(network, inputs, [torch.device("cpu")] * count)
    t.require(
        not meeting.missed, f"the pieces are computed one after another, or are not {len(pieces)}: each needs a thread"
    )
    t.require(not network.calls, "`network` itself was called: every device needs a copy of the modules")
    expected = plain(inputs)
    swapped = torch.cat([plain(piece) for piece in reversed(pieces)])
    t.equal("outputs", outputs, expected.detach(), known={"the pieces are in another order": swapped.detach()})
    plain.zero_grad()
    expected.square().sum().backward()
    alone = Network(None)
    alone(pieces[0]).square().sum().backward()
    t.require(outputs.requires_grad, "`outputs` has no graph: backward cannot reach the weights")
    outputs.square().sum().backward()
    mistakes = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, parameter in network.named_parameters():
        true, found = plain.get_parameter(name).grad, parameter.grad
        assert true is not None
        t.require(found is not None, f"`{name}.grad` is None: backward does not reach the original's weights")
        only = {"only the first piece's gradient has come": mistakes[name]} if len(pieces) > 1 else {}
        t.equal(f"{name}.grad", found, true, known=only)
    t.equal("network.sums", network.sums, pieces[0].sum(0), before=torch.zeros(3))
