"""What is said of a cluster is what was seen; what only may be so is said as a guess."""

from __future__ import annotations

import ast
import re

import pytest

from labkit.launchers.launcher_job import RanksSeen
from labkit.launchers.old_slurm import endings
from labkit.launchers.old_slurm import job as slurm_job
from labkit.launchers.old_slurm.queue import JobState
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.protocol import events
from tests.support.repository import ROOT

CANNOT_BE_SEEN = re.compile(
    r"crashed|machine (failed|is overloaded)|lost its connection(?! as a consequence)|connection is lost|"
    r"somebody|had precedence|lacked memory|cannot write there|"
    r"not (share|see) (the folder|\S+ directory)|is not seen here"
)
"""What nobody on the notebook's machine sees of another."""

MARKED = re.compile(r"\bperhaps\b|\bmay\b|\bmight\b|\bif\b|\bmust\b", re.IGNORECASE)

ROOMS = ("launchers", "session", "failures")


def sentences():
    """The sentences of all texts in the code that speak of ranks elsewhere, without docstrings."""
    for path in sorted(path for room in ROOMS for path in (ROOT / "labkit" / room).rglob("*.py")):
        if path.parent.name == "pages":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
            id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
        }
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "X directory" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | inner:
                text = node.value
            for sentence in re.split(r"(?<=[.:;])\s+|\n", text):
                yield f"{path.name}:{node.lineno}" if text else "", sentence


def test_what_cannot_be_seen_from_here_is_said_as_a_guess():
    found = [(where, said) for where, said in sentences() if CANNOT_BE_SEEN.search(said)]
    assert len(found) > 6, "the pattern finds what there is"
    assert not [each for each in found if not MARKED.search(each[1])]


STATES = [*endings.ENDINGS, "COMPLETED", "FAILED", "FORGOTTEN"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("ends", [(), (0,), (0, 1)], ids=["none has ended", "one has", "all have"])
def test_what_is_said_of_a_jobs_end_names_what_slurm_and_the_folder_have(state, ends, tmp_path, monkeypatch):
    monkeypatch.setattr(endings, "troubles", lambda *where: "")
    seen = RanksSeen({rank: events.Exit(rank, 0) for rank in ends}, [r for r in (0, 1) if r not in ends], set(ends))
    made = slurm_job.SlurmJob(2, RunDirectory(tmp_path), {})
    made.job_id, made._state = "5", JobState(state, "node1", "debug", "squeue no longer lists it, nor does sacct")
    made.settle()
    said = made.ending(seen)
    if said is None:
        assert state == "FORGOTTEN" or ends
        return
    assert said.headline.startswith("SLURM job 5 ")
    assert f"({state})" in said.headline
    assert "It was on node1" in said.cause
    if state in ("COMPLETED", "FORGOTTEN") and len(ends) < 2:
        assert f"{tmp_path} has the ends of {len(ends)} of 2 ranks" in said.cause
    assert ("squeue no longer lists it" in said.cause) == (state == "FORGOTTEN" and len(ends) < 2)
