"""Lessons hold with another seed and more ranks."""

from __future__ import annotations

import pytest

from tests.tools.run_notebooks import LESSONS, execute

OTHER = {
    **dict.fromkeys(("00", "01", "03", "04", "08", "10", "11", "14", "17", "18", "26"), {"world_size": 3}),
    **dict.fromkeys(("07", "15", "19", "20", "21", "24"), {"world_size": 4}),
    **dict.fromkeys(("12", "13"), {"world_size": 4, "odd": 2}),
    "02": {"devices": 3},
    "09": {"batch_size": 100, "repeats": 3},
    "16": {"batch_size": 65, "epochs": 2, "trials": 2},
    "22": {"world_size": 2},
    "25": {"sequence": 64},
}
"""By lesson: what is another in its second run, besides the seed."""


@pytest.mark.notebook
@pytest.mark.parametrize(
    "lesson",
    [
        pytest.param(each, id=each.stem, marks=pytest.mark.wide if each.stem[:2] in ("00", "07") else pytest.mark.long)
        for each in LESSONS
    ],
)
def test_a_lesson_holds_with_another_seed_and_more_ranks(lesson, tmp_path):
    execute(lesson, tmp_path, {"seed": 1, **OTHER.get(lesson.stem[:2], {})})
