"""The lessons' pictures, by their data, and the strip that says how far the reader is."""

from __future__ import annotations

import json

import pytest
import torch

import course
from course import overview, pictures


def test_a_grid_has_the_colour_of_the_rank_that_a_number_comes_from():
    panels = {"before": [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 0.0])], "after": [torch.tensor([11.0])] * 2}
    before, after = pictures.grids(panels, "sums").data
    assert [list(row) for row in before.z] == [[1, 1], [2, 0]], "0 is nothing, 1 + rank a rank's own"
    assert [list(row) for row in after.z] == [[3], [3]], "a sum over two ranks"
    assert [list(row) for row in before.text] == [["1", "2"], ["10", "0"]]


def test_who_saw_what_is_white_where_nobody_did():
    (heat,) = pictures.who_saw_what([[[0, 2], [1, 70]], [[1], [0]]], "dealt", first=4).data
    assert [[None if value != value else int(value) for value in row] for row in heat.z] == [
        [0, 1, 0, None],
        [1, 0, None, None],
    ]


def test_overlap_has_two_lanes_a_rank_and_marks_the_last_gradient():
    found = {"gradients": [0.010, 0.030], "calls": [(0.010, 0.025), (0.030, 0.040)]}
    figure = pictures.overlap([found, found], "one pass")
    compute, calls, *_ = figure.data
    assert list(zip(compute.base, compute.x, strict=True)) == [(0, 10), (10, pytest.approx(20))]
    assert list(zip(calls.base, calls.x, strict=True)) == [(10, pytest.approx(15)), (30, pytest.approx(10))]
    assert list(figure.layout.yaxis.categoryarray)[:2] == ["rank 0: compute", "rank 0: all-reduce"]
    assert figure.layout.shapes[0].x0 == pytest.approx(30)


def test_the_strip_says_how_far_each_lesson_was_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = {"output_type": "error"}
    cells = {"to do": [None, None], "begun": [1, None], "run to its end": [1, 2], "failed": [1, 2]}
    for number, (state, counts) in enumerate(cells.items()):
        code = [{"cell_type": "code", "execution_count": c, "outputs": []} for c in counts]
        code[0]["outputs"] = [error] if state == "failed" else []
        text = json.dumps({"cells": [{"cell_type": "markdown"}, *code]})
        (tmp_path / f"0{number}_a_lesson.ipynb").write_text(text)
    lessons = course.progress()
    assert list(lessons.values()) == list(cells)
    shown = course.strip(lessons)._repr_html_()
    assert all(color in shown for color in overview.COLORS.values())
    assert 'href="03_a_lesson.ipynb" title="a lesson: failed"' in shown
    assert "0 of 0 predictions right" in shown
