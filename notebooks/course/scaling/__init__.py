"""How long a step is on any number of ranks, fitted to a few measured steps: `cost_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.protocol.lazy import lazy_names

if TYPE_CHECKING:  # `as` tells type checkers that a name is public
    from course.scaling.cost_model import CostModel as CostModel
    from course.scaling.cost_model import Point as Point
    from course.scaling.cost_model import fit as fit

_HOMES = dict.fromkeys(("CostModel", "Point", "fit"), "cost_model")

__all__ = [*_HOMES]

__getattr__ = lazy_names(__name__, _HOMES, {})
