"""When a rank calls its network, runs a backward pass and steps its optimizer: what a step is made of, and its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Phases:
    """Watches this thread's "forward", "backward" and "optimizer", whatever the training function looks like.

    `now()` is called when one begins, `mark(part, began)` when it has ended, with what `now` returned. `stepped` is
    called when the first optimizer that steps has stepped, each time: that ends a step.

    What the compiler traces is left alone: a mode that a hook turned on in a compiled optimizer ended the process.
    """

    def __init__(
        self, now: Callable[[], float], mark: Callable[[str, float], None], stepped: Callable[[], None]
    ) -> None:
        self._now, self._mark, self._stepped = now, mark, stepped
        self.models: dict[int, torch.nn.Module] = {}
        """Networks that the function calls itself, by id …"""
        self.optimizers: dict[int, Any] = {}
        """… and optimizers that it steps; the first one's steps count."""
        self.is_threaded = False
        """Whether other threads have called networks, as those of `nn.DataParallel` do."""
        self._thread = threading.get_ident()
        self._depth = 0
        self._began = {"forward": 0.0, "optimizer": 0.0}
        self._hooks = contextlib.ExitStack()
        self._first: int | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch everything that PyTorch does inside: phases until `let_go`, steps to the end."""
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            began = self._now()  # its own: one backward pass may be within another
            original(*args, **kwargs)
            self._mark("backward", began)

        def put_back() -> None:
            if torch.autograd.backward is backward:
                torch.autograd.backward = original

        # To the end: PyTorch is going through these hooks when a step ends.
        steps = register_optimizer_step_post_hook(lambda optimizer, *_: self._end_optimizer(optimizer))
        try:
            with self._hooks:
                for hook in (
                    register_module_forward_pre_hook(lambda module, _: self._enter_module(module)),
                    register_module_forward_hook(lambda *_: self._leave_module(), always_call=True),
                    register_optimizer_step_pre_hook(lambda *_: self._begin("optimizer")),
                ):
                    self._hooks.callback(hook.remove)
                torch.autograd.backward = backward
                self._hooks.callback(put_back)
                yield
        finally:
            steps.remove()
            self.let_go()

    def let_go(self) -> None:
        """Watch the ends of steps alone from now on."""
        self._hooks.close()
        self.models.clear()
        self.optimizers.clear()

    def _begin(self, part: str) -> None:
        if not torch.compiler.is_compiling():
            self._began[part] = self._now()

    def _enter_module(self, module: torch.nn.Module) -> None:
        if torch.compiler.is_compiling():
            return
        # The outermost call only, and not those of threads that it has call its copies.
        if threading.get_ident() != self._thread:
            self.is_threaded = True
            return
        self._depth += 1
        if self._depth == 1:
            self.models[id(module)] = module
            self._begin("forward")

    def _leave_module(self) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == self._thread:
            self._depth -= 1
            if self._depth == 0:
                self._mark("forward", self._began["forward"])

    def _end_optimizer(self, optimizer: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._first = self._first or id(optimizer)
        self.optimizers[id(optimizer)] = optimizer
        self._mark("optimizer", self._began["optimizer"])
        if self._first == id(optimizer):
            self._stepped()
