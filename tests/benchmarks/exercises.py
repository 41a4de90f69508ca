"""Measure how soon the exercises answer: the reference, and every wrong answer, on ranks that have done both before.

python -m tests.benchmarks.exercises --repeat 7
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from course import exercises
from course.exercises.base import Exercise, table
from course.exercises.checking import try_answer


def seconds(exercise: Exercise, answer: Callable[..., Any], repeat: int) -> list[float]:
    """Return how long the check of an answer took, each time."""
    took = []
    for _ in range(repeat):
        start = time.perf_counter()
        try_answer(exercise, answer)
        took.append(time.perf_counter() - start)
    return took


def main() -> None:
    """Print a line for each exercise: medians and the longest answers, in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7, help="how often the reference is checked (default: 7)")
    repeat = parser.parse_args().repeat
    right: list[float] = []
    wrong: list[float] = []
    print("| exercise | right: median, longest (ms) | wrong answers | median, longest (ms) |\n|---|---|---|---|")
    for name, exercise in table().items():
        try_answer(exercise, exercise.solution)  # the ranks are there, and have imported what it needs
        good = seconds(exercise, exercise.solution, repeat)
        bad = [s for answer in exercise.wrong_answers for s in seconds(exercise, answer.function, 1)]
        right, wrong = right + good, wrong + bad
        figures = [f"{1000 * statistics.median(each):.0f}, {1000 * max(each):.0f}" for each in (good, bad)]
        print(f"| {name} | {figures[0]} | {len(bad)} | {figures[1]} |", flush=True)
    print(
        f"all: right {1000 * statistics.median(right):.0f} ms, wrong {1000 * statistics.median(wrong):.0f} ms (medians)"
    )
    exercises.close()


if __name__ == "__main__":
    main()
