"""What a training would take of ranks that are not there: how long a step is, what a rank holds.

    cost_model  how long a step is on any number of ranks, fitted to a few measured ones, or of named devices
    rank_memory what each rank holds of any `nn.Module`, by strategy; the largest batch, the fewest ranks

Below them, `counting` takes a step on tensors without memory, and `parameters` says who has which of them. On the
notebook's side; ranks need `split` at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.protocol.lazy import lazy_names
from labkit.scaling.splitting import split

if TYPE_CHECKING:  # `as` tells type checkers that a name is public
    from labkit.scaling.cost_model import STRATEGIES as STRATEGIES
    from labkit.scaling.cost_model import CostModel as CostModel
    from labkit.scaling.cost_model import Fit as Fit
    from labkit.scaling.cost_model import Point as Point
    from labkit.scaling.cost_model import Prediction as Prediction
    from labkit.scaling.cost_model import fit as fit
    from labkit.scaling.rank_memory import Memory as Memory
    from labkit.scaling.rank_memory import fewest_ranks as fewest_ranks
    from labkit.scaling.rank_memory import fits as fits
    from labkit.scaling.rank_memory import largest_batch as largest_batch
    from labkit.scaling.rank_memory import predict_memory as predict_memory

_HOMES = {
    **dict.fromkeys(("STRATEGIES", "CostModel", "Fit", "Point", "Prediction", "fit"), "cost_model"),
    **dict.fromkeys(("Memory", "fewest_ranks", "fits", "largest_batch", "predict_memory"), "rank_memory"),
}

__all__ = ["split", *_HOMES]

__getattr__ = lazy_names(__name__, _HOMES, {})
