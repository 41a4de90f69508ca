"""Sixty faults drawn from the grammar of `tests/support/fault_grammar.py`: the right rank, on the right line.

And healthy programs with pauses, of which nothing is said.
"""

from __future__ import annotations

import ast
import random

import pytest

from labkit.monitor.asking import QUIET_S
from tests.support import fault_grammar, healthy_programs
from tests.support.hangs import is_recorded
from tests.support.tiers import few

SESSION_RANKS = 4

SEED, COUNT = 43, 60


def drawn():
    """The cases; those on new ranks are few, for they cost their start."""
    chance = random.Random(SEED)
    return [fault_grammar.draw(chance, ("reserved",) if number % 10 else ("new",)) for number in range(COUNT)]


def test_every_program_of_the_grammar_can_be_pasted_and_marks_its_lines():
    chance = random.Random(SEED)
    for case in (fault_grammar.draw(chance) for _ in range(1000)):
        ast.parse(case.source)
        assert case.odd in case.members
        assert case.right <= set(case.members)
        marks = [mark for mark in ("FAULT", "WAIT") if f"# {mark}\n" in case.source]
        assert fault_grammar.FAULTS[case.fault].line in (*marks, "")


ROWS = [
    *((fault, "default") for fault in ("returns", "leaves", "SIGKILL", "exits 0", "a time limit passes")),
    ("returns", "subgroup"),  # and the ranks outside it have returned
    ("another order", "default"),
    ("sends more than is received", "pipeline"),
    ("is deep in a recursion", "default"),
    ("is missed in another thread", "default"),
    ("fails in a thread", "default"),
    ("fails in a communication hook", "default"),
]
"""What was once told wrongly: the fault, and the group."""


def of_each_transport():
    """Each fault over each transport; in `make test` over one, by turns."""
    transports = fault_grammar.TRANSPORTS
    usual = {
        fault_grammar.Case(*row, transport, 3, 1, "reserved"): transport == transports[number % len(transports)]
        for number, row in enumerate(ROWS)
        for transport in transports
    }
    return few(usual, usual.get)


@pytest.mark.spawns
@pytest.mark.skipif(not is_recorded(), reason="only PyTorch 2.15 or newer records calls of gloo")
@pytest.mark.parametrize("case", [*few(drawn(), 3), *of_each_transport()], ids=str)
def test_a_fault_is_blamed_on_its_rank_and_line_whatever_carries_the_messages(case, ranks, tmp_path):
    found = fault_grammar.try_out(case, ranks, tmp_path)
    assert (found.rank, found.line) == (True, True), f"{case.source}\n{found.said}"


@pytest.mark.spawns
@pytest.mark.parametrize("seed", few(range(4), 4))
def test_nothing_is_said_of_a_healthy_program_whatever_pauses_it_makes(seed, ranks):
    plan = healthy_programs.Plan(random.Random(seed), 3, longest_s=2 * QUIET_S)
    assert healthy_programs.try_out(plan, ranks) == ""
