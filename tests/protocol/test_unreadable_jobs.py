"""A job that a rank cannot read: it reports that, ends, and says what to do."""

from __future__ import annotations

import re

import pytest

import labkit
from labkit.debugger import Debugger
from labkit.protocol.job import RankHook
from tests.conftest import LONG_S
from tests.support import workloads
from tests.support.agents import Agents


class Unreadable(RankHook):
    """What the kernel can pickle and a rank cannot read."""

    def __reduce__(self):
        return _missing, ()


def _missing():
    raise AttributeError("module 'labkit' has no attribute 'what_is_new'")


@pytest.mark.spawns
def test_ranks_that_cannot_read_their_job_end_the_run_say_to_restart_the_kernel_and_take_the_next(ranks, monkeypatch):
    begin = Debugger.begin
    with monkeypatch.context() as patch:
        patch.setattr(Debugger, "begin", lambda self, job: begin(self, job).with_hook(Unreadable()))
        run = labkit.launch(workloads.log_once, on=ranks, wait=False, live=False)
    assert run.over.wait(LONG_S)
    assert re.match(r"rank [01] .*\(exit code 1\)", str(run.error))
    assert "AttributeError: module 'labkit' has no attribute 'what_is_new'\n" in str(run.error)
    assert "Restart the kernel" in str(run.error)
    assert labkit.launch(workloads.log_once, on=ranks, live=False).status == "finished"


class UnreadableOnNodes:
    """The same, without a module of the tests, which makes a folder for temporary files."""

    def __reduce__(self):
        return eval, ("1 / 0",)


@pytest.mark.spawns
def test_nodes_that_cannot_read_a_job_end_the_run_and_say_why(tmp_path, monkeypatch):
    begin = Debugger.begin
    monkeypatch.setattr(Debugger, "begin", lambda self, job: begin(self, job)._replace(cells={"": UnreadableOnNodes()}))
    run = labkit.launch(workloads.log_once, on=Agents(2, folder=tmp_path / "runs"), wait=False, live=False)
    assert run.over.wait(LONG_S)
    said = str(run.error)
    assert "ZeroDivisionError: division by zero" in said
    assert "an agent has ended before its ranks" in said
    assert re.search(r"^node [01] \(.+\): ", said, re.MULTILINE), said
