"""Charts as pictures, for notebooks that are run where nobody watches: saved, they have their charts all the same.

`drawing` does it, with Matplotlib, which a launch does without.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import plotly.graph_objects as go


def picture(figure: go.Figure) -> bytes | None:
    """Return a small PNG of a Plotly figure, or None if Matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from labkit.plugins.png import drawing

    return drawing.picture(figure)


def get_ready() -> None:
    """Import what the first picture needs."""
    if importlib.util.find_spec("matplotlib") is not None:
        importlib.import_module("matplotlib.backends.backend_agg")
        importlib.import_module("PIL.Image")
