"""What the learner has done: exercises tried and solved, predictions. One small file beside the notebooks."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

FILE = ".labkit-progress.json"
"""In the notebooks' folder; git ignores it."""


def _file() -> Path:
    return Path.cwd() / FILE


def load() -> dict[str, Any]:
    """Return {"exercises": {name: {"tries", "solved"}}, "predictions": {question: right}}, or empty ones."""
    kept: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, ValueError, OSError):  # half written by hand: begun anew
        kept = json.loads(_file().read_text("utf-8"))
    return {key: kept[key] if isinstance(kept.get(key), dict) else {} for key in ("exercises", "predictions")}


def _save(kept: dict[str, Any]) -> None:
    # Renamed into its place, so that another notebook never reads half of it.
    part = _file().with_name(f"{FILE}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a folder that cannot be written to: nothing is kept
        part.write_text(json.dumps(kept, indent=1, sort_keys=True), "utf-8")
        part.replace(_file())


def note(name: str, passed: bool) -> None:
    """Keep that an exercise was tried; once solved, it stays so."""
    kept = load()
    about = kept["exercises"].setdefault(name, {"tries": 0, "solved": ""})
    about["tries"] += 1
    if passed:
        about["solved"] = about["solved"] or time.strftime("%Y-%m-%d %H:%M")
    _save(kept)


def note_prediction(question: str, right: bool) -> None:
    """Keep whether a prediction was right. The first counts."""
    kept = load()
    kept["predictions"].setdefault(question, right)
    _save(kept)


def solved() -> set[str]:
    """Return the names of the exercises that were solved."""
    return {name for name, about in load()["exercises"].items() if isinstance(about, dict) and about.get("solved")}


def predicted() -> tuple[int, int]:
    """Return how many predictions were right, in all notebooks, and how many were made."""
    made = load()["predictions"]
    return sum(map(bool, made.values())), len(made)


def of_lesson(lesson: str) -> tuple[int, int]:
    """Return how many of a lesson's exercises are solved, and how many there are."""
    from labkit.exercises.base import table

    names = {name for name, exercise in table().items() if exercise.lesson == lesson}
    return len(names & solved()), len(names)


def reset() -> None:
    """Forget what was solved and predicted."""
    with contextlib.suppress(FileNotFoundError):
        _file().unlink()
