"""Exercises: every wrong answer gets its message, and no answer ends the check."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import signal
import sys
import textwrap
import types

import pytest
import torch
import torch.distributed as dist

import course
import labkit
from course import exercises, handout
from course.exercises import checking, predicting, progress, ranks
from course.exercises.base import Cost
from course.exercises.checking import try_answer
from course.exercises.result import PASSED, UNSOLVED, WRONG, Result, Text, in_steps, lanes
from course.exercises.traffic import Event
from labkit.ui import kernel
from tests.conftest import shared_session
from tests.lessons.test_notebooks import NOTEBOOKS
from tests.support.hangs import is_recorded
from tests.support.tiers import few
from tests.support.wrong_answers import wrong_answers

TABLE = exercises.table()
ON_RANKS = [name for name, exercise in TABLE.items() if exercise.needs_ranks]
BY_THEMSELVES = [name for name in TABLE if name not in ON_RANKS]

RUN_BASH = {"mended_line"}
"""Exercises whose answers are tried in a shell."""


def tried_here(name):
    """A case for an exercise whose answers are tried in this process; but some start a shell."""
    return pytest.param(name, marks=[pytest.mark.spawns] if name in RUN_BASH else [])


@pytest.fixture(scope="module")
def on_ranks():
    """The ranks that all these tests share."""
    with shared_session(ranks.RANKS) as session:
        ranks.use(session)
        for name in ON_RANKS[:1]:
            assert try_answer(TABLE[name], TABLE[name].solution).passed
        yield session
        ranks.use(None)


# What an exercise is


@pytest.mark.parametrize("name", TABLE)
def test_an_exercise_is_whole(name):
    exercise = TABLE[name]
    module = inspect.getmodule(exercise.solution)
    assert module.__name__ == f"course.exercises.{name}", "a file is named as its function"
    assert len(wrong_answers(name)) >= 4
    assert len(exercise.hints) >= 2
    assert exercise.why.endswith(".")
    assert exercise.cases
    lines = [line for part in exercise.statement.splitlines() for line in textwrap.wrap(part, 100)]
    assert 2 <= len(lines) <= 9
    assert exercise.solution.__doc__
    assert exercise.try_out is not None
    assert re.fullmatch(r"\d\d", exercise.lesson)


@pytest.mark.parametrize("name", TABLE)
def test_the_learners_cell_has_signature_and_docstring_but_not_the_answer(name):
    exercise = TABLE[name]
    *_, function = ast.parse(exercise.starter).body
    assert isinstance(function, ast.FunctionDef)
    assert function.name == name
    assert ast.get_docstring(function) == inspect.getdoc(exercise.solution)
    if exercise.given:
        assert len(function.body) > 1
    else:
        assert ast.unparse(function.body[1:]) == "..."
    assert exercise.solution_source not in exercise.starter
    assert str(exercises.solution(name)) == f"{exercise.solution_source}\n# {exercise.why}"


def test_who_asks_for_what_is_not_there_is_told_what_there_is():
    with pytest.raises(ValueError, match="there is no exercise 'ring'; there are mean_over_ranks"):
        exercises.find("ring")
    with pytest.raises(ValueError, match="there is no exercise 'trial'"):
        exercises.find("trial")

    def ring_allreduce(tensor, rank, world_size):
        """Misspelt."""

    with pytest.raises(ValueError, match="did you mean ring_all_reduce"):
        course.check(ring_allreduce)
    with pytest.raises(TypeError, match="takes the function that you have written, got a int"):
        course.check(3)
    with pytest.raises(ValueError, match="answers is None, 'mine', 'solution', 'none', got 'all'"):
        course.check(TABLE["bubble"].solution, answers="all")


@pytest.mark.parametrize("name", TABLE)
def test_a_lesson_shows_its_exercise_by_name_and_holds_the_code_to_complete(name):
    cells = [cell for cell in NOTEBOOKS[TABLE[name].lesson].cells if cell.cell_type == "code"]
    (place,) = (index for index, cell in enumerate(cells) if cell.source == f'course.exercises.statement("{name}")')
    answer, check = cells[place + 1 : place + 3]
    assert answer.source == TABLE[name].starter.rstrip("\n"), "kept once, in the exercise's file"
    assert answer.metadata.tags == ["exercise"]
    assert check.source == f"course.check({name}, answers)"


# Answers that are tried in the notebook's own process


@pytest.mark.parametrize("name", [*map(tried_here, BY_THEMSELVES)])
def test_a_plain_function_is_tried_without_ranks(name):
    exercise = TABLE[name]
    assert try_answer(exercise, exercise.solution).passed
    told_everything(exercise)


def said_in(message, said):
    """Whether a message says so. Before PyTorch 2.15 who waits for a rank that has returned is told that it has."""
    left = re.search(r"rank \d returned while rank \d was still in a collective", message)
    return said in message or bool(left and said.startswith("a hang: ") and not is_recorded())


def told_everything(exercise):
    """Every wrong answer gets the message that it must get."""
    tried = [(wrong, try_answer(exercise, wrong.function)) for wrong in wrong_answers(exercise.name)]
    missing = [
        f"{result.message!r} does not say {wrong.said!r}"
        for wrong, result in tried
        if not said_in(result.message, wrong.said)
    ]
    assert not missing, "\n".join(missing)
    assert not any(result.passed for _, result in tried)


def bubble_in_which(body):
    """An answer to the exercise that needs no ranks."""
    found = {}
    exec(f"import os, sys, time\ndef bubble(stages, micro_batches):\n    {body}", found)
    return found["bubble"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("exit()", "bubble left by exit() (line 3)"),
        ("1 / 0", "bubble raised ZeroDivisionError: division by zero (line 3)"),
        ("print('x' * 2_000_000)", "prints more than 1,000,000 characters (line 3)"),
        ("raise KeyError", "bubble raised KeyError (line 3)"),
    ],
)
def test_whatever_a_plain_function_does_is_a_verdict(body, said):
    result = course.check(bubble_in_which(body), answers="mine")
    assert not result.passed
    assert result.message == f"bubble {said.removeprefix('bubble ')}"
    assert course.check(TABLE["bubble"].solution, answers="mine").passed


def test_a_plain_function_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr("course.exercises.trial.COMPUTING_S", 0.2)
    monkeypatch.setattr("course.exercises.trial.LIMIT_S", 0.6)
    before = signal.getsignal(signal.SIGALRM)
    result = course.check(bubble_in_which("while True: pass"), answers="mine")
    assert "bubble has not ended after 0.2 s of computing (line 3)" in result.message
    result = course.check(bubble_in_which("time.sleep(1000)"), answers="mine")
    assert "bubble has not ended after 0.6 s (line 3)" in result.message
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize(
    ("told", "returned", "starved_s", "tries"),
    [
        ("traffic.Hang: waits in recv for rank 0", [True, False], 0.1, 1),
        ("traffic.Hang: waits in recv for rank 0", [False, False], 0.1, 2),
        ("traffic.Hang: waits in recv for rank 0", [True, False], 3.0, 2),
        ("traffic.Endless: has not ended after 3 s", [True, False], 3.0, 2),
        ("traffic.Endless: has not ended after 1.5 s of computing", [True, False], 3.0, 1),
        ("builtins.ValueError: no", [True, False], 3.0, 1),
    ],
)
def test_what_the_wall_clock_says_on_a_busy_machine_is_asked_again_with_more_patience(
    told, returned, starved_s, tries, monkeypatch
):
    def try_on_ranks(name, function, world_size, patience_s, stall_s):
        asked.append(patience_s)
        failure = types.SimpleNamespace(summary=told, time_s=0, rank=1, frames=[])
        failures = {"failures": [None, failure], "status": "failed", "error": None, "output": []}
        return types.SimpleNamespace(world_size=2, results=[None, None], returned=returned, **failures), starved_s

    asked = []
    monkeypatch.setattr(ranks, "try_on_ranks", try_on_ranks)
    result = try_answer(TABLE["broadcast_tree"], TABLE["broadcast_tree"].solution, 1.5)
    assert asked == [1.5, 4.5][:tries]
    assert result.state == WRONG
    assert ("check again" in result.message) == (starved_s > 2.25 and tries == 2), "it may still be the machine"


def test_dots_left_in_are_no_answer():
    def bubble(stages, micro_batches):
        """To do."""
        ...  # noqa: PIE790

    line = inspect.getsourcelines(bubble)[1] + 2
    result = course.check(bubble)
    assert result.state == UNSOLVED
    assert result.message == f"not answered yet: write your answer in the place of `...` in line {line}"


def test_other_parameters_are_named():
    def bubble(p, m):
        return (p - 1) / (m + p - 1)

    said = "`bubble(p, m)` has other parameters than `bubble(stages, micro_batches)`, as which it is called"
    assert course.check(bubble).message == said


def test_where_nobody_watches_it_is_the_readers_function_that_is_tried(monkeypatch):
    """Or every autograder gives full marks."""
    monkeypatch.setattr(kernel, "has_kernel", lambda: True)
    monkeypatch.setattr(kernel, "is_interactive", lambda: False)
    wrong = wrong_answers("bubble")[0].function
    wrong.__name__ = "bubble"
    assert not course.check(wrong).passed
    assert course.check(TABLE["bubble"].solution).passed


def test_the_reference_in_the_place_of_an_answer_is_no_pass_and_has_no_points():
    def bubble(stages, micro_batches):
        """To do."""

    assert course.check(bubble, answers="none").state == UNSOLVED
    assert "answers = 'none'" in course.check(bubble, answers="none").message
    result = course.check(bubble, answers="solution")
    assert not result.passed
    assert result.report.points == 0
    assert result.headline == "✔ bubble, the reference solution: right"


def test_a_report_has_a_point_for_each_case_and_nothing_of_the_solution():
    exercise = TABLE["bubble"]
    assert len(exercise.cases) > 1
    right = course.check(exercise.solution).report
    assert right.points == right.max_points == len(exercise.cases)
    assert right.score(4) == 4
    first = next(iter(exercise.cases[0].values()))

    def bubble(stages, micro_batches):
        """Right in the first case alone."""
        return (stages - 1) / (micro_batches + stages - 1) if stages == first else 2.0

    report = course.check(bubble).report
    assert 0 < report.points < report.max_points
    said = json.loads(json.dumps(report.as_dict()))
    assert (said["points"], said["state"], said["cases"][0]["passed"]) == (report.points, "wrong", True)
    assert exercise.solution_source.splitlines()[-1].strip() not in json.dumps(said)
    assert course.check(bubble_in_which("...")).report.points == 0


@pytest.mark.spawns
def test_a_report_tries_the_world_sizes_that_the_check_did_not_come_to(on_ranks):
    exercise = TABLE["mean_on_rank_0"]
    name, (first, *others) = exercise.name, exercise.world_sizes

    wrong = answer(name, f"if dist.get_world_size() == {first}:\n    return None\n" + _body_of(exercise))
    result = course.check(wrong)
    assert set(result.right_cases) == {first}, "a check ends at the first that is wrong"
    report = result.report
    passed = {case.world_size for case in report.cases if case.passed}
    assert passed == set(others)
    assert report.points == len(others) * len(exercise.cases)


def _body_of(exercise):
    """The reference's statements, without its docstring."""
    (function,) = ast.parse(exercise.solution_source).body
    return "\n".join(map(ast.unparse, function.body[1:]))


# Handing out


@pytest.mark.parametrize("name", TABLE)
def test_a_handed_out_exercise_has_all_but_the_solution(name):
    exercise = TABLE[name]
    source = handout.without_reference(inspect.getsource(inspect.getmodule(exercise.solution)))
    assert _body_of(exercise) not in source
    found = types.ModuleType(name)
    found.__file__ = inspect.getfile(inspect.getmodule(exercise.solution))
    exec(compile(source, found.__file__, "exec"), vars(found))
    assert inspect.signature(found.EXERCISE.solution) == inspect.signature(exercise.solution)
    assert found.EXERCISE.cases == exercise.cases
    with pytest.raises(NotImplementedError, match="withheld"):
        found.EXERCISE.solution(*[None] * len(inspect.signature(exercise.solution).parameters))


# Answers that are tried on ranks


@pytest.mark.spawns
@pytest.mark.parametrize("name", ON_RANKS)
def test_the_reference_is_right(on_ranks, name):
    result = try_answer(TABLE[name], TABLE[name].solution)
    assert result.passed, result.message
    assert len(result.events) == max(TABLE[name].world_sizes)
    assert any(result.events)
    assert "<svg" in result._repr_html_()


@pytest.mark.spawns
def test_a_ring_may_also_send_and_receive_one_by_one(on_ranks):
    def ring_all_reduce(tensor, rank, world_size):
        flat = tensor.reshape(-1)
        pieces = flat.tensor_split(world_size)
        for step in range(2 * (world_size - 1)):
            piece = pieces[(rank - step - 1) % world_size]
            arrived = torch.empty_like(piece)
            sending = dist.isend(pieces[(rank - step) % world_size], (rank + 1) % world_size)
            dist.irecv(arrived, (rank - 1) % world_size).wait()
            sending.wait()
            piece.copy_(piece + arrived if step < world_size - 1 else arrived)
        tensor.copy_(flat.view_as(tensor))

    result = try_answer(TABLE["ring_all_reduce"], ring_all_reduce)
    assert result.passed, result.message


@pytest.mark.spawns
@pytest.mark.parametrize("name", few(ON_RANKS, 3))
def test_every_wrong_answer_is_told_what_is_wrong(on_ranks, name):
    told_everything(TABLE[name])


def answer(name, body, imports="import os, signal, sys, time, torch"):
    """An answer to an exercise on ranks, as a cell defines it; its body begins in line 4."""
    found = {"__name__": "__main__"}
    head = f"def {name}{inspect.signature(TABLE[name].solution)}:"
    lines = textwrap.indent(body.strip(), "    ")
    exec(f"{imports}\nimport torch.distributed as dist\n{head}\n{lines}", found)
    return found[name]


def mean_on_rank_0_in_which(body):
    """An answer to the exercise that is asked for in the tests of what answers may do."""
    return answer("mean_on_rank_0", body)


HOSTILE = {
    "exit()": ("exit()", "2 ranks, rank 0 left by exit() (line 4)"),
    "endless": ("while True: pass", "rank 0 has not ended after 0.5 s of computing (line 4)"),
    "endless on one rank": (
        "while dist.get_rank() == 1: pass",
        "rank 1 has not ended after 0.5 s of computing (line 4)",
    ),
    "sleep": ("time.sleep(1000)", "rank 0 has not ended after"),  # 1 s, or 3 s where the machine is busy
    "print": ("while True: print('x' * 1000)", " prints more than 1,000,000 characters (line 4)"),
    "die": ("os._exit(3) if dist.get_rank() == 1 else dist.all_reduce(torch.ones(1))", "(exit code 3)"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "(SIGKILL)"),
    "swallow": (
        "while True:\n    try:\n        time.sleep(1000)\n    except BaseException: pass",
        "did not end, and the ranks had to be ended",
    ),
    "write": ("while True: os.write(1, b'x' * 100_000)", "has not ended after"),
    "break torch": ("torch.distributed.all_reduce = None\nreturn 1", "2 ranks, rank"),
}


@pytest.mark.spawns
@pytest.mark.parametrize("what", few(HOSTILE, 3))
def test_whatever_an_answer_does_the_check_ends_and_the_next_one_works(on_ranks, what, monkeypatch):
    body, said = HOSTILE[what]
    if "had to be ended" in said:
        monkeypatch.setattr(checking, "TIMEOUT_S", 2.0)
    # Where the time is told it is short; elsewhere a busy machine must not make a death look like a hang.
    patience_s = 0.5 if "not ended after" in said else checking.PATIENCE_S
    result = try_answer(TABLE["mean_on_rank_0"], mean_on_rank_0_in_which(body), patience_s)
    assert result.state == WRONG
    assert said in result.message
    assert result._repr_html_().count("<details") >= len(TABLE["mean_on_rank_0"].hints)
    again = try_answer(TABLE["mean_on_rank_0"], TABLE["mean_on_rank_0"].solution)
    assert again.passed, again.message


@pytest.mark.spawns
def test_what_an_answer_prints_is_shown_with_its_rank(on_ranks):
    result = try_answer(TABLE["mean_on_rank_0"], mean_on_rank_0_in_which("print('value', value < 100)"))
    assert "rank 1 printed: value True" in repr(result)
    assert "rank 1: value True" in result._repr_html_()


@pytest.mark.spawns
def test_a_call_imported_by_name_is_refused_too(on_ranks):
    function = answer("broadcast_tree", "all_reduce(tensor)", "from torch.distributed import all_reduce")
    result = try_answer(TABLE["broadcast_tree"], function)
    assert "rank 0 calls dist.all_reduce, which this exercise does not allow" in result.message


@pytest.mark.spawns
def test_torchs_own_functions_are_back_after_a_check(on_ranks):
    def look(worker):
        return dist.send.__module__, dist.all_reduce.__module__, sys.stdout.__class__.__name__

    try_answer(TABLE["broadcast_tree"], wrong_answers("broadcast_tree")[1].function)
    for found in labkit.launch(look, on=on_ranks, live=False).results:
        assert found == ("torch.distributed.distributed_c10d", "torch.distributed.distributed_c10d", "TextIOWrapper")


# What a result shows


def test_a_result_shows_one_hint_inside_the_other_and_no_solution():
    exercise = TABLE["bubble"]
    result = Result(exercise, WRONG, "it is <0.5>, expected `1`")
    page = result._repr_html_()
    assert page.index("Hint 1") < page.index("Hint 2")
    first, *_ = page.split("Hint 2")
    assert "</details>" not in first[first.index("Hint 1") :], "the second is inside the first"
    assert "&lt;0.5&gt;" in page
    assert "<code>1</code>" in page
    assert "return (stages - 1)" not in page
    assert repr(result).splitlines() == ["✘ bubble: wrong", "it is <0.5>, expected `1`"]
    assert "Why it is so" in Result(exercise, PASSED, "")._repr_html_()


def test_hints_come_one_after_another(monkeypatch):
    monkeypatch.setattr("course.exercises.result._hints_given", {})
    exercise = TABLE["bubble"]
    assert str(Result(exercise, WRONG, "no").hint()) == f"hint 1 of 2: {exercise.hints[0]}"
    assert str(Result(exercise, WRONG, "no").hint()) == f"hint 2 of 2: {exercise.hints[1]}", "also after another check"
    said = Result(exercise, WRONG, "no").hint()
    assert repr(said) == "no more hints; course.exercises.solution('bubble') shows the solution"
    assert isinstance(said, Text)


def test_messages_are_drawn_a_step_after_they_were_sent():
    sent, received = Event("send", 1, 4), Event("recv", 0, 4)
    both, wait = Event("all_reduce", None, 8), Event("wait", None, 0)
    placed = in_steps([[sent, both], [received, both, wait]])
    assert [[each.column for each in lane] for lane in placed] == [[0, 2], [1, 2, 3]]
    assert lanes([[sent, both], [received, both, wait]]).count("<line") == 3, "two lanes and one arrow"
    assert "the first 20 of 30 steps" in lanes([[both] * 30])


def test_the_cost_is_said_beside_the_least():
    exercise = TABLE["broadcast_tree"]
    events = [[Event("send", 1, 4)] * 3, [Event("recv", 0, 4)], [], []]
    result = Result(exercise, PASSED, "", events)
    assert (
        "Of 4 ranks each sent at most 12 B in 3 calls (150 µs by formula); the least is 8 B in 2 calls"
        in result.message
    )
    assert Cost(3, 1000).time_s(1e-3, 1e6) == pytest.approx(4e-3)


# Predictions and progress


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(predicting, "_asked", {})
    return tmp_path


def test_a_prediction_is_answered_by_the_run(in_a_folder):
    assert exercises.tally() is None, "nothing was asked"
    guess = course.predict("What will rank 1 print?", "0", "1", "nothing")
    assert repr(guess) == "predict: What will rank 1 print? 0 · 1 · nothing"
    assert "no prediction was made" in repr(guess.reveal("1"))
    guess = course.predict("What will rank 2 print?", "0", "1")
    guess.say("0")
    assert repr(guess.reveal(1)) == "What will rank 2 print? You said 0; it was 1: surprised?"
    guess.say("1")
    assert guess.said == "0", "too late"
    another = course.predict("And rank 3?", "yes", "no")
    another.say("yes")
    assert "right" in another.reveal("yes")._repr_html_()
    assert repr(exercises.tally()) == "you predicted 1 of 2 right, of 3 asked for"


def test_a_prediction_whose_answer_is_no_option_fails(in_a_folder):
    guess = course.predict("What will it print?", "a", "b")
    with pytest.raises(ValueError, match="the run gave 'c', which is none of the options a, b"):
        guess.reveal("c")
    with pytest.raises(ValueError, match="'c' is none of the options 'a', 'b'"):
        guess.say("c")
    with pytest.raises(ValueError, match="at least two different options"):
        course.predict("Why?", "a")
    assert repr(exercises.tally()) == "no predictions made, of 1 asked for"


def test_progress_survives_and_is_reset_on_request(in_a_folder):
    assert progress.load() == {"exercises": {}, "predictions": {}}
    progress.note("bubble", False)
    progress.note("bubble", True)
    progress.note("bubble", False)
    assert progress.solved() == {"bubble"}, "once solved, it stays so"
    assert progress.load()["exercises"]["bubble"]["tries"] == 3
    assert progress.of_lesson("06") == (1, 2)
    progress.note_prediction("Which?", True)
    progress.note_prediction("Which?", False)
    assert exercises.predicted() == (1, 1), "the first counts"
    assert "✔" in exercises.statement("bubble")._repr_markdown_()
    exercises.reset()
    assert progress.solved() == set()
    assert list(in_a_folder.iterdir()) == []
    (in_a_folder / progress.FILE).write_text("[")
    assert progress.solved() == set(), "a spoilt file is begun anew"


def test_in_a_folder_that_cannot_be_written_progress_is_kept_in_the_readers_own(in_a_folder, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(in_a_folder / "data"))
    monkeypatch.chdir("/proc")  # not even root writes there
    progress.note("bubble", True)
    assert progress.solved() == {"bubble"}
    assert [path.name for path in (in_a_folder / "data" / "labkit").iterdir()] == ["progress.json"]
    exercises.reset()
    assert progress.solved() == set()


def test_where_nothing_can_be_written_that_is_said(in_a_folder, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/nowhere")
    monkeypatch.chdir("/proc")
    with pytest.warns(UserWarning, match="what you have solved is not kept: .*/proc/nowhere/labkit"):
        progress.note("bubble", True)


def test_without_a_reader_nothing_is_kept(in_a_folder):
    assert course.check(TABLE["bubble"].solution, answers="mine").passed
    assert not os.listdir(in_a_folder)
