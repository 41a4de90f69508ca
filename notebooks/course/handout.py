"""The lessons as students get them, without the reference solutions: `python -m course.handout FOLDER`, in notebooks/.

`notebooks/TEACHING.md` says how to grade what comes back.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
from pathlib import Path

from course import answers, exercises

WITHHELD = "the reference solution is withheld from this copy of the course"

LEFT_OUT = ("__pycache__", ".*_cache", ".ipynb_checkpoints", ".labkit-progress*")


def hand_out(folder: Path) -> Path:
    """Write the notebooks, and the course that they import, into a new folder; return it.

    References that a lesson goes on with (`course.mine`) are there, but sealed.

    Of each exercise the statement, the hints, the cases and what tries them are there; the reference's body is not.
    Raises FileExistsError if the folder is there.
    """
    ours = Path(__file__).parent
    shutil.copytree(ours.parent, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for file in sorted((folder / ours.name / "exercises").glob("*.py")):
        file.write_text(without_reference(file.read_text("utf-8")), "utf-8")
    lessons = [file.read_text("utf-8") for file in folder.glob("*.ipynb")]
    used = {name for text in lessons for name in re.findall(r'course\.mine\(\\"(\w+)\\"', text)}
    sealed = {name: answers.seal(exercises.find(name).solution_source) for name in sorted(used)}
    (folder / ours.name / "exercises" / answers.SEALED.name).write_text(json.dumps(sealed, indent=1), "utf-8")
    return folder


def without_reference(source: str) -> str:
    """Return an exercise's source without the body of its reference solution."""
    lines = source.splitlines()
    for each in ast.parse(source).body:
        if isinstance(each, ast.FunctionDef) and "EXERCISE.reference" in map(ast.unparse, each.decorator_list):
            lines[each.body[0].end_lineno : each.end_lineno] = [f'    raise NotImplementedError("{WITHHELD}")']
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the folder that is named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder")
    print(hand_out(parser.parse_args().folder))


if __name__ == "__main__":
    main()
