"""Sixty faults drawn from the grammar of `tests/benchmarks/fault_grammar.py`: the right rank, on the right line.

And healthy programs with pauses, of which nothing is said.
"""

from __future__ import annotations

import ast
import random

import pytest

from labkit.failures.ledger import QUIET_S
from tests.benchmarks import fault_grammar, healthy_programs
from tests.support.hangs import is_recorded
from tests.support.tiers import few

SESSION_RANKS = 4

SEED, COUNT = 43, 60


def drawn():
    """The cases; those on new ranks and under torchrun are few, for they cost their start."""
    chance, elsewhere = random.Random(SEED), {0: ("new",), 10: ("torchrun",)}
    return [fault_grammar.draw(chance, elsewhere.get(number % 20, ("reserved",))) for number in range(COUNT)]


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


UNDER_TORCHRUN = [
    ("exits 0", "pipeline", "as libuv", 4, 1),  # its agent takes that for done, and lets the others wait
    ("a time limit passes", "default", "as NCCL", 3, 0),  # and ends a rank before anybody can ask where it is
    ("a time limit passes", "subgroup", "as NCCL", 3, 2),  # to which it may or may not belong
    ("a time limit passes", "subgroup", "as libuv", 2, 1),
    ("another dtype", "default", "as NCCL", 3, 2),
]


def of_each_transport():
    rows = [(row, transport) for row in ROWS for transport in fault_grammar.TRANSPORTS]
    here = few((fault_grammar.Case(*row, transport, 3, 1, "reserved") for row, transport in rows), 5)
    return [*here, *(pytest.param(fault_grammar.Case(*case, "torchrun")) for case in UNDER_TORCHRUN)]


@pytest.mark.spawns
@pytest.mark.skipif(not is_recorded(), reason="only PyTorch 2.15 or newer records calls of gloo")
@pytest.mark.parametrize("case", [*drawn(), *of_each_transport()], ids=str)
def test_a_fault_is_blamed_on_its_rank_and_line_whatever_carries_the_messages(case, ranks, tmp_path):
    found = fault_grammar.try_out(case, ranks, tmp_path)
    assert (found.rank, found.line) == (True, True), f"{case.source}\n{found.said}"


@pytest.mark.spawns
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_said_of_a_healthy_program_whatever_pauses_it_makes(seed, ranks):
    plan = healthy_programs.Plan(random.Random(seed), 3, longest_s=2 * QUIET_S)
    assert healthy_programs.try_out(plan, ranks) == ""
