"""The museum of pitfalls: mistakes from texts about parallel PyTorch, each to predict, to run, and to put right.

    museum = course.pitfalls.Museum("data")   a wing: its data, ranks that stay, what was predicted
    museum.card("partitioned_once")           the exhibit: what is done, and what might come of it
    def partitioned_once(): …                 the reader's cell, his to change; `find(…).cell` holds it
    museum.reveal(partitioned_once)           run it: what happens, then the right form
    museum.scoreboard()                       which mistakes speak up

One file per exhibit. `base` says what an exhibit is, `museum` shows them in a notebook, `helpers` is what their code
imports.
"""

from __future__ import annotations

from course.pitfalls.base import WINGS, Exhibit, find, table
from course.pitfalls.museum import Museum

__all__ = ["WINGS", "Exhibit", "Museum", "find", "table"]
