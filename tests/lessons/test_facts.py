"""One fact is one sentence in all lessons; no formula is typed twice; each of the texts' 83 mistakes has its place."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed.distributed_c10d

from course import formulas as formula_module
from course.facts import FACTS
from tests.lessons.test_notebooks import NOTEBOOKS
from tests.tools.run_notebooks import FOLDER


def texts():
    """Every text that states facts, with its place: the lessons' Markdown."""
    for lesson, notebook in NOTEBOOKS.items():
        yield from ((lesson, " ".join(c.source.split())) for c in notebook.cells if c.cell_type == "markdown")


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_of_several_lessons_is_one_sentence(name):
    fact = FACTS[name]
    states = re.compile(re.escape(fact.sentence[1:]))  # the first letter may begin a sentence
    found = {place for place, text in texts() if states.search(text)}
    assert found == fact.places
    elsewhere = [(place, text) for place, text in texts() if re.search(fact.about, states.sub("", text), re.IGNORECASE)]
    assert elsewhere == [], "in other words"
    assert re.search(fact.about, fact.sentence, re.IGNORECASE)
    assert len(fact.places) > 1


class _Anonymous(ast.NodeTransformer):
    """Names by the order in which they come, so that a formula is the same whatever its variables are called."""

    def __init__(self):
        self.names = {}

    def visit_Name(self, node):  # noqa: N802
        return ast.Name(self.names.setdefault(node.id, f"v{len(self.names)}"))


def is_unit(node):
    """Whether an operation turns bytes into KiB, numbers into bytes, or seconds into ms."""
    is_number = isinstance(node.right, ast.Constant) and node.right.value in (4, 8, 1000, 1024)
    return is_number and isinstance(node.op, (ast.Mult, ast.Div))


def formulas(source):
    """The arithmetic of a cell that is long enough to be a formula: three operators and two variables at least."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.BinOp):
            continue
        parts = list(ast.walk(node))
        arithmetic = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.expr_context)
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        if sum(isinstance(part, ast.BinOp) and not is_unit(part) for part in parts) < 3 or len(names) < 2:
            continue
        if all(isinstance(part, arithmetic) for part in parts):
            yield ast.unparse(_Anonymous().visit(ast.parse(ast.unparse(node), mode="eval").body))


def code(notebook):
    """The cells of Python, and of no magic."""
    for cell in notebook.cells:
        with contextlib.suppress(SyntaxError):
            if cell.cell_type == "code" and ast.parse(cell.source):
                yield cell


def test_no_formula_is_typed_in_two_lessons():
    where = defaultdict(set)
    for lesson, notebook in NOTEBOOKS.items():
        for formula in (formula for cell in code(notebook) for formula in formulas(cell.source)):
            where[formula].add(lesson)
    assert {formula: lessons for formula, lessons in where.items() if len(lessons) > 1} == {}


def test_a_formula_of_the_course_is_typed_in_the_lesson_that_derives_it_and_in_no_other():
    where = {
        formula: lesson for lesson, nb in NOTEBOOKS.items() for cell in code(nb) for formula in formulas(cell.source)
    }
    for function, exercise in ((formula_module.all_reduce_bytes, "ring_all_reduce"), (formula_module.bubble, "bubble")):
        (formula, *_) = formulas(textwrap.dedent(inspect.getsource(function)))
        asked = f'course.exercises.statement("{exercise}")'  # where you write it yourself
        lesson = where.get(formula) or next(n for n, nb in NOTEBOOKS.items() if asked in [c.source for c in nb.cells])
        assert f"Derived in lesson {lesson}." in function.__doc__


def test_every_mistake_of_the_five_texts_has_its_place():
    counts = {0: 14, 1: 26, 2: 16, 3: 17, 4: 10}
    page = (FOLDER / "guide" / "mistakes.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d\.\d+) \| ([^|]{15,}) \| ([^|]{3,}) \| ([^|]+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == [f"{text}.{n}" for text, count in counts.items() for n in range(1, count + 1)]
    for *_, place in rows:
        lesson = re.fullmatch(r"here|\[(\w+)\]\(\.\./(\w+)\.ipynb\)(?:, (\d+))?", place)
        assert lesson, place
        if lesson[1]:
            assert lesson[2].startswith(f"{lesson[1]}_")
            headings = "\n".join(c.source for c in NOTEBOOKS[lesson[1]].cells if c.cell_type == "markdown")
            assert not lesson[3] or f"### {lesson[3]} · " in headings, place


def test_each_pitfall_has_a_question_its_code_what_it_does_and_the_right_form():
    for lesson, count in (("17", 11), ("18", 12)):
        cells = {cell.id: cell for cell in NOTEBOOKS[lesson].cells}
        asked = [name.removesuffix("-asked") for name in cells if name.endswith("-asked")]
        assert len(asked) == count
        for number, name in enumerate(asked, 1):
            assert f"### {number} · " in cells[f"{name}-asked"].source
            assert "?" in cells[f"{name}-asked"].source
        parts = [name for name in cells if name.partition("-")[0] in asked]
        there = [f"{name}{part}" for name in asked for part in ("-asked", "", "-told", "-right")]
        assert parts == [part for part in there if part in cells], "a right form of one line is told"
        assert all(f"{name}-told" in cells and name in cells for name in asked)


def test_pytorchs_context_parallel_gathers_by_default_as_lesson_22_says():
    options = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    assert options._cp_options.rotate_method is options._RotateMethod.ALL_GATHER
    text = " ".join(cell.source for cell in NOTEBOOKS["22"].cells)
    assert "*all-gathers* keys and values" in " ".join(text.split())


C10D = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"


@pytest.mark.skipif(not (C10D / "nccl2").is_dir(), reason="PyTorch before 2.15 has one implementation of nccl")
def test_the_variables_for_nccl_are_read_by_the_implementation_that_lesson_12_says():
    lesson = " ".join(c.source for c in NOTEBOOKS["12"].cells if c.cell_type == "markdown")
    names = set(re.findall(r"`(TORCH_(?:NCCL|FR|DIST)_\w+)", lesson))
    headers = "".join((C10D / name).read_text("utf-8") for name in ("ProcessGroupNCCL.hpp", "FlightRecorder.hpp"))
    registers = inspect.getsource(torch.distributed.distributed_c10d)
    assert [name for name in names if name not in headers + registers] == []
    assert 'os.environ.get("TORCH_DIST_USE_NCCL2") == "0"' in registers, "else it is the new one"
    assert "TORCH_DIST_USE_NCCL2" in names
    assert '"TORCH_NCCL_TRACE_BUFFER_SIZE"}, 2000)' in headers, "so many by default"
    new = "".join(header.read_text("utf-8") for header in (C10D / "nccl2").glob("*.hpp"))
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in new
    assert "blocking_wait_" in new
    assert not re.search("desync|heartbeat", new, re.IGNORECASE), "only the old one has these"
