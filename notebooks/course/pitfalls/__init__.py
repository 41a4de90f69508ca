"""The museum of pitfalls: code about parallel PyTorch, most of it mistakes from texts, to predict, to run and to mend.

    museum = course.pitfalls.Museum("data")      a wing: its data, ranks that stay, what was predicted
    def partitioned_once(): …                    the reader's cell, below the exhibit's card
    museum.reveal(partitioned_once, "b")         run it: what comes of it, then the right form
    museum.mend(partitioned_once)                run the reader's change: mended, or what is still wrong
    museum.score(), museum.scoreboard()          predictions, and how mistakes show themselves

One file per exhibit, which has its card and its code; `tests/tools/hang_exhibits.py` writes both into the notebooks.
`base` defines an exhibit, `museum` runs them in a notebook, the exhibits' code imports `helpers`.
"""

from __future__ import annotations

from course.pitfalls.base import KINDS, WINGS, Exhibit, find, table
from course.pitfalls.museum import Museum, score

__all__ = ["KINDS", "WINGS", "Exhibit", "Museum", "find", "score", "table"]
