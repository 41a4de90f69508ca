"""What the learner has done: exercises tried and solved, predictions. One small file beside the notebooks.

Where that folder is read-only, a course's at a university, say, the file is in the learner's own data folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

FILE = ".labkit-progress.json"
"""In the notebooks' folder; git ignores it."""


def _files() -> list[Path]:
    """Return where the file may be, the first that can be written first."""
    found = [Path.cwd() / FILE]
    with contextlib.suppress(RuntimeError):  # a user without a home
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        found.append(Path(data) / "labkit" / FILE.removeprefix(".labkit-"))
    return found


def load() -> dict[str, Any]:
    """Return {"exercises": {name: {"tries", "solved"}}, "predictions": {question: right}}, or empty ones."""
    kept: dict[str, Any] = {}
    for file in _files():
        with contextlib.suppress(OSError, ValueError):  # half written by hand: begun anew
            if file.exists():
                kept = json.loads(file.read_text("utf-8"))
                break
    return {key: kept[key] if isinstance(kept.get(key), dict) else {} for key in ("exercises", "predictions")}


def _save(kept: dict[str, Any]) -> None:
    """Keep it in the first folder that can be written to; warns once where none can."""
    why = ""
    for file in _files():
        # Renamed into its place, so that another notebook never reads half of it.
        part = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            if file.parent != Path.cwd():
                file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(kept, indent=1, sort_keys=True), "utf-8")
            part.replace(file)
            return
        except OSError as error:
            why = f"{error.strerror}: {file.parent}"
    warnings.warn(
        f"what you have solved is not kept: neither this folder nor your own can be written to ({why})", stacklevel=2
    )


def note(name: str, passed: bool, source: str = "") -> None:
    """Keep that an exercise was tried; once solved, it stays so. Of what was right, the last source."""
    kept = load()
    about = kept["exercises"].setdefault(name, {"tries": 0, "solved": ""})
    about["tries"] += 1
    if passed:
        about["solved"] = about["solved"] or time.strftime("%Y-%m-%d %H:%M")
        about["source"] = source
    _save(kept)


def note_prediction(question: str, right: bool) -> None:
    """Keep whether a prediction was right. The first counts."""
    kept = load()
    kept["predictions"].setdefault(question, right)
    _save(kept)


def source(name: str) -> str:
    """Return the source of an answer that was right; "" if there is none, or it cannot stand alone."""
    about = load()["exercises"].get(name)
    found = about.get("source", "") if isinstance(about, dict) else ""
    return found if isinstance(found, str) else ""


def solved() -> set[str]:
    """Return the names of the exercises that were solved."""
    return {name for name, about in load()["exercises"].items() if isinstance(about, dict) and about.get("solved")}


def predicted() -> tuple[int, int]:
    """Return how many predictions were right, in all notebooks, and how many were made."""
    made = load()["predictions"]
    return sum(map(bool, made.values())), len(made)


def of_lesson(lesson: str) -> tuple[int, int]:
    """Return how many of a lesson's exercises are solved, and how many there are."""
    from course.exercises.base import table

    names = {name for name, exercise in table().items() if exercise.lesson == lesson}
    return len(names & solved()), len(names)


def reset() -> None:
    """Forget what was solved and predicted."""
    for file in _files():
        with contextlib.suppress(OSError):
            file.unlink()
