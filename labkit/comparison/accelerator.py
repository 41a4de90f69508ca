"""A virtual accelerator: each rank computes on a device of its own, by the clock, though all share the same cores.

The problem: ranks that compute on shared cores fight for them, so that a ranking of their step times is a ranking of
how they fight. What does not work: dividing the time by the ranks, which loses what overlaps and what idles.

So values are calculated as ever, but a layer *lasts* as long as its multiplications would take on a device of so many
GFLOP/s, twice that in the backward pass; what calculating takes less than this is slept through. Cores are then idle
most of the time, and what ranks send each other travels meanwhile, as beside a GPU. What a rank waited for is kept,
what it calculated is replaced: the thread's own CPU time tells one from the other.

What this leaves out: everything that has no weight matrix (activations, norms, attention's products, the optimizer's
step) takes no time, and the devices are as far apart as processes of this machine. A machine that calculates a layer
slower than the device would stays what is measured.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from labkit.profiling import local

GFLOPS = 5.0
"""Of a virtual device, unless told otherwise: a sixth or so of what one core does, so that cores are idle meanwhile."""


def multiplications(module: nn.Module, outputs: Any) -> int:
    """Return how often a layer's weights are multiplied for these outputs, (n, …, features) or (n, channels, …)."""
    weight = getattr(module, "weight", None)
    is_layer = isinstance(weight, Tensor) and isinstance(outputs, Tensor) and not isinstance(module, nn.Embedding)
    if not is_layer or weight.dim() < 2 or outputs.dim() < 2:  # type: ignore[union-attr]
        return 0
    each = outputs.shape[-1] if weight.dim() == 2 else outputs.shape[1]  # type: ignore[union-attr]
    return local(weight).numel() * outputs.numel() // max(1, each)  # type: ignore[arg-type]


class Timeline:
    """When a device will have done what it was given, on the clock of `time.perf_counter`. Of one thread."""

    def __init__(self, is_alone: bool) -> None:
        self._is_alone = is_alone
        self.due_s = self._seen_s = time.perf_counter()
        self._cpu_s = time.thread_time()

    def compute(self, seconds: float) -> None:
        """Give the device so many seconds of work, and sleep until it is done."""
        # What passed since the last call without CPU time was waiting: for a message, for another rank. Who is alone
        # waits for nobody: then it was another program that had the core.
        waited_s = time.perf_counter() - self._seen_s - (time.thread_time() - self._cpu_s)
        self.due_s += (0.0 if self._is_alone else max(0.0, waited_s)) + seconds
        self.sleep()
        self._seen_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def sleep(self) -> None:
        """Sleep until the device has done what it was given."""
        time.sleep(max(0.0, self.due_s - time.perf_counter()))


class VirtualDevices:
    """Within `with VirtualDevices():` the layers of every network last as long as on a device of the rank's own.

    Threads that compute copies of a network, as `nn.DataParallel`'s do, have a device each.
    """

    def __init__(self, gflops: float = GFLOPS) -> None:
        self._flops_per_s = 1e9 * gflops
        self.given_s = 0.0
        """What the rank's devices were given to compute so far, in seconds of theirs."""
        self._backward_began_s: float | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> VirtualDevices:
        self._is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._of_thread = threading.local()
        # Helpers' CPU time is not this thread's, and would be taken for waiting.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._line()
        self._hooks = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)
        for hook in self._hooks:
            hook.remove()

    def _line(self) -> Timeline:
        if not hasattr(self._of_thread, "line"):
            self._of_thread.line = Timeline(self._is_alone)
        line: Timeline = self._of_thread.line
        return line

    def _before_forward(self, *_: Any) -> None:
        self._line()  # from now on a thread's time is its device's

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        seconds = 2 * multiplications(module, outputs) / self._flops_per_s
        if not seconds:
            return
        line = self._line()
        self.given_s += seconds
        line.compute(seconds)
        if outputs.requires_grad:
            # Gradients of weights, and of inputs where anything wants those.
            passes = 2 if any(isinstance(each, Tensor) and each.requires_grad for each in inputs) else 1
            outputs.register_hook(lambda _: self._before_backward(line, passes * seconds))

    def _before_backward(self, line: Timeline, seconds: float) -> None:
        self.given_s += seconds
        if line is self._line():
            line.compute(seconds)
            return
        # Another thread's device. PyTorch runs the backward passes of all CPU threads in this one, one after the other;
        # the devices run them at the same time, and this thread waits at the end for the last of them.
        if self._backward_began_s is None:
            self._backward_began_s = time.perf_counter()
        line.due_s = max(line.due_s, self._backward_began_s) + seconds

        def wait() -> None:
            self._backward_began_s = None
            line.sleep()

        torch.autograd.Variable._execution_engine.queue_callback(wait)
