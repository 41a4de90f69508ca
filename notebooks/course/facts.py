"""Facts that several lessons state: each is one sentence, kept here, and the lessons have it word for word.

`tests/lessons/test_facts.py` says where a lesson states one of them in other words, or not at all.
"""

from __future__ import annotations

from typing import NamedTuple


class Fact(NamedTuple):
    """A sentence, and how to find out that a text is about it."""

    sentence: str
    about: str
    """A regular expression. What it finds in a lesson's text must be part of the sentence."""
    places: frozenset[str]
    """The lessons that state it."""


FACTS = {
    "gloo's reduce-scatter": Fact(
        "gloo's reduce-scatter is a whole all-reduce, and each rank then keeps its part",
        r"gloo's reduce-scatter|reduce-scatter (?:counts|sends) (?:twice|as much)",
        frozenset({"07", "19", "20", "21"}),
    ),
    "bubble": Fact(
        "ranks idle for (p − 1) / (m + p − 1) of the time",
        r"\(p − 1\) / \(m \+ p − 1\)",
        frozenset({"06", "23"}),
    ),
}
