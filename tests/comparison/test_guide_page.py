"""The skeleton for a model of one's own, as the page of the guide has it."""

from __future__ import annotations

import re

import pytest

import labkit
from tests.conftest import shared_session
from tests.support.repository import ROOT

PAGE = ROOT / "notebooks" / "guide" / "compare.md"


@pytest.mark.spawns
def test_the_pages_skeleton_runs_and_differs_by_its_batch_norm_alone(tmp_path, monkeypatch):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    functions, call = code.split("comparison = labkit.compare(")
    defined = {"__name__": "__main__"}
    exec(compile(functions, "<the page>", "exec"), defined)
    monkeypatch.chdir(tmp_path)
    with shared_session(2) as ranks:
        defined["compare"] = lambda runs, **options: labkit.compare(runs, on=ranks, live=False, **options)
        exec(compile(f"comparison = compare({call}", "<the page>", "exec"), defined)
    frame = defined["comparison"].frame()
    assert frame["error"].tolist() == ["", "", ""]
    assert frame["difference"]["two stages"] < 0.01, "rounded to 16 bits between the stages"
    assert frame["difference"]["DDP"] > 0.01, "other statistics"
    assert (tmp_path / "page.html").stat().st_size > 1_000_000, "it needs no network"
