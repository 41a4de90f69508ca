"""Tables of the lessons: those that a click on a heading sorts, and which way to be parallel suits what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.comparison.sorting import sortable

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["sortable", "which_way"]

WAYS = (
    ("fits on one device, should be faster", "DDP", "ddp", "the link is slow, or the batch small"),
    ("does not fit", "FSDP2", "fsdp", "it does fit: FSDP2 sends half as much again as DDP"),
    ("does not fit, nor does one layer", "tensor parallel", "", "links are slow: it sends in every layer (lesson 09)"),
    ("does not fit, the link is slow", "pipeline", "pipeline", "there are few micro-batches: stages idle"),
    ("does not fit, cut by hand", "model parallel", "model_parallel", "it should be faster: all but one stage wait"),
    ("is old code", "DataParallel", "data_parallel", "anything is written anew"),
)
"""What a model is like, which way suits it, whose figure is shown, and where that way is wrong."""


def which_way(**measured: str) -> pd.DataFrame:
    """Return the table of which way to be parallel suits what, each with what was measured of it, by `WAYS`' names."""
    import pandas as pd

    rows = [(model, way, measured.get(name, "in lesson 09"), wrong) for model, way, name, wrong in WAYS]
    return pd.DataFrame(rows, columns=["your model …", "take", "measured here", "wrong where"]).set_index(
        "your model …"
    )
