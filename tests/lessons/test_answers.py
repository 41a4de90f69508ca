"""What a learner has written and was right is what the rest of the course runs."""

from __future__ import annotations

import json
import linecache
import shutil
import subprocess
import sys
import zlib
from base64 import b64decode

import pytest

import course
from course import answers, handout
from course.exercises import find, progress
from labkit.ui import kernel
from tests.tools.run_notebooks import FOLDER

MINE = '''
import math


def share(waits, works):
    return waits / (waits + works)


def bubble(stages, micro_batches):
    """Mine: with a helper, and an import."""
    return share(math.fsum([stages, -1]), micro_batches)


print(course.check(bubble))
'''


@pytest.fixture
def learner(monkeypatch, tmp_path):
    """A kernel in which nothing is solved yet, and a function that runs a cell in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answers, "passed", {})
    monkeypatch.setattr(kernel, "is_interactive", lambda: True)
    names = {"__name__": "__main__", "course": course}

    def run(text):
        file = f"/tmp/ipykernel_1/{len(text)}.py"
        monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(keepends=True), file))
        exec(compile(text, file, "exec"), names)
        return names

    return run


def test_a_right_answer_takes_the_references_place_and_unsolved_the_reference_runs(learner):
    assert course.mine("bubble") == (find("bubble").solution, "the reference")
    names = learner(MINE)
    assert course.mine("bubble") == (names["bubble"], "your code")
    for how in ("solution", "none"):
        assert course.mine("bubble", how) == (find("bubble").solution, "the reference")


def test_a_wrong_answer_does_not(learner):
    learner("def bubble(stages, micro_batches):\n    return 0.5\n\n\ncourse.check(bubble)\n")
    assert course.mine("bubble").whose == "the reference"


def test_another_kernel_has_it_from_its_kept_source_without_what_tried_it(learner, capsys):
    learner(MINE)
    answers.passed.clear()
    assert "print" not in progress.source("bubble")
    function, whose = course.mine("bubble")
    assert whose == "your code"
    assert function(4, 9) == 0.25
    assert "Mine" in function.__doc__


def test_an_answer_that_needs_another_cell_is_not_kept_and_one_that_cannot_be_built_is_told(learner, monkeypatch):
    learner("def less(stages):\n    return stages - 1\n")
    learner(
        "def bubble(stages, micro_batches):\n    return less(stages) / (micro_batches + less(stages))\n\n\n"
        "course.check(bubble)\n"
    )
    assert course.mine("bubble").whose == "your code", "in this kernel"
    answers.passed.clear()
    assert course.mine("bubble").whose == "the reference"
    monkeypatch.setattr(progress, "source", lambda name: "import nowhere_to_be_found")
    with pytest.warns(UserWarning, match="your bubble is kept, but cannot be used any more"):
        assert course.mine("bubble").whose == "the reference"


@pytest.mark.spawns
def test_lessons_of_a_handed_out_copy_go_on_with_references_that_are_not_read_by_accident(tmp_path):
    folder = handout.hand_out(tmp_path / "handout")
    assert {path.name for path in folder.glob("*.ipynb")} == {path.name for path in FOLDER.glob("*.ipynb")}
    assert not list(folder.rglob("__pycache__"))
    sealed = json.loads((folder / "course" / "exercises" / "sealed.json").read_text())
    assert {"average_gradients", "outer_step", "bubble", "zero1_step", "listen_for_stop", "zero_bubble"} <= set(sealed)
    for name, text in sealed.items():
        assert zlib.decompress(b64decode(text)).decode() == find(name).solution_source
        assert "return" not in text
    asked = "import course; print(course.mine('bubble').function(4, 9))"
    said = subprocess.run([sys.executable, "-c", asked], cwd=folder, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "0.25"
    shutil.rmtree(folder)


def test_no_lesson_runs_a_reference_past_what_the_learner_wrote():
    for file in FOLDER.glob("*.ipynb"):
        assert ").solution" not in file.read_text(), f"{file.name} calls a reference: course.mine(name, answers)"
