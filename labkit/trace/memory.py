"""What a rank holds over one step: parameters, gradients, optimizer state, and activations kept for the backward pass.

Storages are counted (`labkit.profiling`), on a GPU as on a CPU, so that each byte has a part; a GPU's allocator says
besides how much it has given out in all. Counting slows the step down, so it is one that is not on the timeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from labkit.trace.profiling import activations, tensor_bytes
from labkit.trace.records import Held

if TYPE_CHECKING:
    from labkit.ui.charts import Chart

GRAIN_S = 2e-4
"""Least time between two looks while autograd keeps tensors and lets go of them."""

LOOKS = 2000
"""Of one step at most."""

PARTS = ("parameters", "gradients", "optimizer state", "activations")
ALLOCATED = "allocated on the GPU"


class MemoryWatch:
    """Looks at what an optimizer's parameters hold, from `start` to `stop`: `held`."""

    def __init__(self, optimizer: Any, device: torch.device, now: Callable[[], float]) -> None:
        self.held: list[Held] = []
        self._optimizer, self._device, self._now = optimizer, device, now
        self._kept = 0
        self._open = contextlib.ExitStack()

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def start(self) -> None:
        """Begin to look."""
        model: Any = SimpleNamespace(parameters=self._parameters)
        self._open.enter_context(activations(model, self._changed))
        self.look()

    def stop(self) -> None:
        """Look for the last time."""
        self.look()
        self._open.close()

    def _changed(self, kept: int) -> None:
        self._kept = kept
        if self._now() - self.held[-1].at_s >= GRAIN_S:
            self.look()

    def look(self) -> None:
        """Note what is held now."""
        if len(self.held) >= LOOKS:
            return
        model: Any = SimpleNamespace(parameters=self._parameters)
        found = {**tensor_bytes(model, self._optimizer), "activations": self._kept}
        if self._device.type == "cuda":
            found[ALLOCATED] = torch.cuda.memory_allocated(self._device)
        self.held.append(Held(self._now(), found))


def draw(held: tuple[Held, ...], title: str) -> Chart:
    """Draw what one rank holds over a step, the parts on top of each other."""
    import plotly.graph_objects as go

    from labkit.ui.charts import Chart, rank_color, style
    from labkit.ui.tables import INK

    most = max(sum(one.bytes[part] for part in PARTS) for one in held)
    unit, name = next((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes")) if most >= u)
    x = [1000 * (one.at_s - held[0].at_s) for one in held]
    figure = go.Figure()
    below = [0.0] * len(held)
    for index, part in enumerate(PARTS):
        below = [under + one.bytes[part] / unit for under, one in zip(below, held, strict=True)]
        fill = "tonexty" if index else "tozeroy"
        line = {"color": rank_color(index), "width": 1.2, "shape": "hv"}
        figure.add_scatter(x=x, y=below, name=part, mode="lines", fill=fill, line=line)
    if ALLOCATED in held[0].bytes:
        allocated = [one.bytes[ALLOCATED] / unit for one in held]
        line = {"color": INK, "width": 1.2, "dash": "dot", "shape": "hv"}
        figure.add_scatter(x=x, y=allocated, name=ALLOCATED, mode="lines", line=line)
    figure.update_xaxes(title_text="milliseconds").update_yaxes(title_text=f"{name}, one upon the other")
    return Chart(style(figure, title))
