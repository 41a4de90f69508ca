"""What a training would take of ranks that are not there: how long a step is, what a rank holds, which way to train.

`cost_model` says how long a step is on any number of ranks, and is fitted to a few measured ones. On the notebook's
side only; no rank needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.protocol.lazy import lazy_names

if TYPE_CHECKING:  # `as` tells type checkers that a name is public
    from labkit.scaling.cost_model import STRATEGIES as STRATEGIES
    from labkit.scaling.cost_model import CostModel as CostModel
    from labkit.scaling.cost_model import Fit as Fit
    from labkit.scaling.cost_model import Point as Point
    from labkit.scaling.cost_model import Prediction as Prediction
    from labkit.scaling.cost_model import fit as fit
    from labkit.scaling.cost_model import split as split

_HOMES = dict.fromkeys(("STRATEGIES", "CostModel", "Fit", "Point", "Prediction", "fit", "split"), "cost_model")

__all__ = sorted(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES, {})
