"""The strip that says how far the reader is."""

from __future__ import annotations

import json

import course
from course import overview


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
    assert "predictions right" not in shown, "none was made"
