"""`course.check`: try a learner's answer, and say what was found."""

from __future__ import annotations

import ast
import difflib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from course import answers as kept
from course.exercises import progress
from course.exercises.base import Exercise, find, table
from course.exercises.result import PASSED, UNSOLVED, WRONG, Result
from course.exercises.trial import PATIENCE_S, Report, examine_here
from labkit.ui import kernel

if TYPE_CHECKING:
    from labkit import Run

TIMEOUT_S = 4.0
"""After so long ranks are ended that could not be stopped from within."""

COMPUTING = "of computing"
"""In what is told by the processor's clock, which a busy machine does not hurry."""

DOUBT = "; but the ranks waited for a core most of that time: when other programs leave them one, check again"
"""What is said besides where the clock speaks against an answer, and the machine was too busy to be sure."""

STARVED = 0.5
"""Of the patience: a rank that could not run for so long makes others believe that they wait in vain."""

ANSWERS = (None, "mine", "solution", "none")

CASE_CHARACTERS = 30
"""Of one value with which an answer was tried; a longer one says little."""

LOST = ("connection", "Connection", "gloo", "peer", "Broken pipe")
"""In errors of ranks that have lost another."""


def check(function: Callable[..., Any], answers: str | None = None) -> Result:
    """Try an answer to an exercise, found by the function's name, and return the `Result`, which shows itself.

    Args:
        function: what the learner has written.
        answers: "mine", the default: try the function; "solution": try the reference in its place, as the lessons' own
            tests do; "none": try nothing, and say that it is unsolved. `passed` is never True for the last two.

    The answer is tried with 1, 2, 3 and 4 ranks that the exercises keep for themselves, on inputs that the learner has
    not seen. The result is a diagnosis in any case: an answer that raises, hangs, exits or prints without end is wrong,
    and the next check works. What the clock on the wall says against an answer is believed if the ranks had cores to
    run on; if not, the answer is tried again, with thrice the patience.

    Raises ValueError if there is no exercise of this name, TypeError for what is no function, and AssertionError if the
    reference itself is refused.
    """
    if not callable(function) or not hasattr(function, "__name__"):
        raise TypeError(f"check() takes the function that you have written, got a {type(function).__name__}")
    if answers not in ANSWERS:
        raise ValueError(f"answers is {', '.join(map(repr, ANSWERS))}, got {answers!r}")
    exercise = _exercise_of(function)
    if answers == "none":
        return Result(exercise, UNSOLVED, "unsolved: the notebook runs with answers = 'none', so nothing was tried")
    if answers == "solution":
        result = try_answer(exercise, exercise.solution)
        result.is_reference = True
        if result.state != PASSED:  # so that a lesson without a reader is red
            raise AssertionError(f"the reference solution of {exercise.name} is refused: {result.message}")
        return result
    result = _unfinished(exercise, function) or try_answer(exercise, function)
    if result.passed:
        kept.passed[exercise.name] = function
    if kernel.is_interactive():
        progress.note(exercise.name, result.passed, kept.source_of(function) if result.passed else "")
    return result


def _exercise_of(function: Callable[..., Any]) -> Exercise:
    try:
        return find(function.__name__)
    except ValueError:
        near = difflib.get_close_matches(function.__name__, table(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"there is no exercise {function.__name__!r}{hint} An exercise is found by its function's name; there are "
            f"{', '.join(table())}"
        ) from None


def _unfinished(exercise: Exercise, function: Callable[..., Any]) -> Result | None:
    """Say so if the learner has not begun, or has left a `...` in."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    given = inspect.signature(function)
    wanted = inspect.signature(exercise.solution)
    if list(given.parameters) != list(wanted.parameters):
        return Result(
            exercise,
            WRONG,
            f"`{exercise.name}{given}` has other parameters than `{exercise.name}{wanted}`, as which it is called",
        )
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # no source: it is tried as it is
        return None
    dots = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is Ellipsis
    ]
    if not dots:
        return None
    line = code.co_firstlineno + dots[0] - 1
    return Result(exercise, UNSOLVED, f"not answered yet: write your answer in the place of `...` in line {line}")


def try_answer(exercise: Exercise, function: Callable[..., Any], patience_s: float = PATIENCE_S) -> Result:
    """Try an answer with each world size until something is wrong; the `Result` can try the others, for its report."""
    if not exercise.needs_ranks:
        return _try_here(exercise, function)
    reports: Sequence[Report] = []
    right: dict[int, int] = {}
    for world_size in exercise.world_sizes:
        attempt = _try_on(exercise, function, world_size, patience_s)
        right[world_size] = attempt.cases
        if attempt.state != PASSED:
            result = Result(exercise, attempt.state, attempt.message, printed=attempt.printed)
            break
        if world_size == max(exercise.world_sizes):
            reports = attempt.reports
    else:
        result = Result(exercise, PASSED, "", events=[report.events for report in reports], printed=attempt.printed)
    result.right_cases = right
    result.try_with = lambda world_size: _try_on(exercise, function, world_size, patience_s).cases
    return result


class _Attempt(NamedTuple):
    """An answer tried with one world size."""

    state: str
    message: str
    cases: int
    """How many were right before the first that was not."""
    reports: Sequence[Report]
    printed: Sequence[str]


def _try_on(exercise: Exercise, function: Callable[..., Any], world_size: int, patience_s: float) -> _Attempt:
    """Try an answer on so many ranks."""
    from course.exercises import ranks

    for patience in (patience_s, 3 * patience_s):
        run, starved_s = ranks.try_on_ranks(exercise.name, function, world_size, patience, patience + TIMEOUT_S)
        is_starved = starved_s > STARVED * patience and _is_by_the_clock(run)
        if not (is_starved or _is_unexplained(run)):
            break
    doubt = DOUBT if is_starved else ""
    if run.status == "stopped":
        return _Attempt(UNSOLVED, "interrupted: nothing is known of this answer", 0, [], run.output)
    if message := _what_was_wrong(exercise, function, run):
        found = [each.finding.case for each in run.results if isinstance(each, Report) and each.finding]
        all_reported = all(isinstance(each, Report) for each in run.results)
        cases = min(found) if found and all_reported else 0
        return _Attempt(WRONG, f"{_count(world_size)}, {message}{doubt}", cases, [], run.output)
    return _Attempt(PASSED, "", len(exercise.cases), run.results, run.output)


def _count(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def _try_here(exercise: Exercise, function: Callable[..., Any]) -> Result:
    """Try a plain function in this process. Whatever it raises, `exit()` included, is a diagnosis."""
    try:
        report = examine_here(exercise, function)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        trace, line = error.__traceback__, 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == function.__code__.co_filename:
                line = trace.tb_lineno
            trace = trace.tb_next
        what = _raised(type(error).__name__, str(error).partition("\n")[0])
        return Result(exercise, WRONG, f"{exercise.name} {what}{_line(function, line)}")
    if report.finding:
        case = exercise.cases[report.finding.case]
        result = Result(exercise, WRONG, f"{_case(case)}{report.finding.message}")
        result.right_cases = {0: report.finding.case}
        return result
    result = Result(exercise, PASSED, "")
    result.right_cases = {0: len(exercise.cases)}
    return result


def _case(case: Mapping[str, Any]) -> str:
    """Say with what an answer was tried: "with size=5: ". What is long is left out."""
    said = [text for name, value in case.items() if len(text := f"{name}={value}") <= CASE_CHARACTERS]
    return f"with {', '.join(said)}: " if said else ""


# What went wrong on the ranks, the first cause first


def _what_was_wrong(exercise: Exercise, function: Callable[..., Any], run: Run) -> str:
    """Return what to tell of a run; "" if nothing was wrong."""
    findings = [report.finding for report in run.results if isinstance(report, Report) and report.finding]
    raised, stuck, lost = [], [], []
    for failure in sorted((each for each in run.failures if each), key=lambda each: each.time_s):
        kind, _, text = failure.summary.partition(": ")
        kind = kind.rpartition(".")[2]
        if kind == "Hang":
            stuck.append((failure, text))
        elif kind.startswith(("RuntimeError", "DistBackendError")) and any(word in text for word in LOST):
            lost.append(failure)
        else:
            raised.append((failure, _raised(kind, text)))
    if raised:
        # Of ranks that raised alike the lowest, though another may have been quicker.
        failure, text = min((each for each in raised if each[1] == raised[0][1]), key=lambda each: each[0].rank)
        return f"rank {failure.rank} {text}{_line(function, _own_line(function, failure.frames))}"
    if run.error and run.error.rank is not None and run.failures[run.error.rank] is None:
        return _ended(run, function)  # it died, or would not stop
    if stuck:
        waits: dict[str, list[int]] = {}
        for failure, text in sorted(stuck, key=lambda each: each[0].rank):
            waits.setdefault(f"{text}{_line(function, _own_line(function, failure.frames))}", []).append(failure.rank)
        said = "; ".join(f"rank {' and '.join(map(str, who))} {text}" for text, who in waits.items())
        return f"a hang: {said}{_returned(run)}"
    if findings:
        first = min(findings, key=lambda each: (each.case, each.rank))
        return f"rank {first.rank}, {_case(exercise.cases[first.case])}{first.message}"
    if lost or run.error:
        return _ended(run, function)
    return ""


def _is_unexplained(run: Run) -> bool:
    """Whether ranks only lost each other, or waited for ranks of which nothing is known.

    On a busy machine one may have waited in vain for another to be scheduled.
    """
    reported = [failure.summary for failure in run.failures if failure]
    found = any(isinstance(report, Report) and report.finding for report in run.results)
    lost = [text for text in reported if any(word in text for word in LOST)]
    stuck = [text for text in reported if "Hang: " in text]
    is_known = len(stuck) + sum(run.returned) == run.world_size
    return bool(reported) and not found and len(lost) + len(stuck) == len(reported) and not is_known


def _is_by_the_clock(run: Run) -> bool:
    """Whether nothing but the clock on the wall was against the answer: a wait or a call that took too long."""
    if run.error and "(stall_s)" in run.error.diagnosis.headline:
        return True
    told = [each.summary for each in run.failures if each and not any(word in each.summary for word in LOST)]
    return bool(told) and all("Hang: " in text or "Endless: " in text and COMPUTING not in text for text in told)


def _raised(kind: str, text: str) -> str:
    """Say what an answer raised. What stopped it says so itself."""
    if kind in ("Forbidden", "Endless", "TooMuchPrinted"):
        return text
    if kind in ("SystemExit", "Left"):
        return "left by exit()"
    if kind == "Wrong":
        return text
    return f"raised {kind}: {text}" if text else f"raised {kind}"


def _returned(run: Run) -> str:
    done = [str(rank) for rank, returned in enumerate(run.returned) if returned]
    return f"; rank {' and '.join(done)} had returned" if done else ""


def _ended(run: Run, function: Callable[..., Any]) -> str:
    """Say how a rank died, or was ended because it could not be stopped from within."""
    assert run.error is not None
    diagnosis = run.error.diagnosis
    if "(stall_s)" in diagnosis.headline:
        return f"did not end, and the ranks had to be ended: {diagnosis.headline.partition('(stall_s): ')[2]}"
    return diagnosis.headline


def _own_line(function: Callable[..., Any], frames: Sequence[tuple[str, int, str]]) -> int:
    """Return the line of the learner's file in which something was raised; 0 if it was not there."""
    file = function.__code__.co_filename
    return next((line for where, line, _ in frames if where == file), 0)


def _line(function: Callable[..., Any], line: int) -> str:
    """Say a line of the learner's: " (line 7: `dist.send(tensor, 1)`)"."""
    if not line:
        return ""
    file = function.__code__.co_filename
    text = linecache.getline(file, line).strip()
    number = kernel.cell_numbers().get(file)
    where = f"{kernel.cell_title(number)}, line {line}" if number else f"line {line}"
    return f" ({where}: `{text}`)" if text else f" ({where})"
