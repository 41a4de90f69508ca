"""`breakpoint()` in ranks: who is asked, what is held meanwhile, and where it raises instead.

Asked for in pytorch #115517 and torchtitan #652.
"""

from __future__ import annotations

import builtins
import inspect
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.debugger import Debugger
from labkit.ui import kernel
from tests.conftest import LONG_S, shared_session
from tests.ui.test_kernel import Notebook

HERE = os.path.basename(__file__)


def line_of(function, text):
    """The number of the line of a function that has this text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


@pytest.fixture(scope="module")
def reserved():
    with shared_session(2) as session:
        yield session


class Person:
    """Types lines, or does something first; notes each prompt."""

    def __init__(self, *lines):
        self._lines, self.prompts = iter(lines), []

    def __call__(self, prompt=""):
        self.prompts.append(prompt)
        line = next(self._lines, "c")
        if callable(line):
            line = line()
        return line


@pytest.fixture
def person(monkeypatch):
    """Have somebody answer who waits for the run."""
    monkeypatch.setattr(Debugger, "why_nobody_answers", lambda _: "")

    def types(*lines):
        somebody = Person(*lines)
        monkeypatch.setattr(builtins, "input", somebody)
        return somebody

    return types


def train(worker):
    x = torch.ones(1) * worker.rank
    for _ in range(2):
        breakpoint()
        dist.all_reduce(x)
        worker.log(x=x.item())
    return x.item()


# At the prompt


@pytest.mark.spawns
def test_one_rank_after_the_other_is_asked_and_answers_under_the_cell(reserved, person, capsys):
    somebody = person("p x", "x = x + 40", "c", "p x", "next", "c")
    run = labkit.launch(train, on=reserved, live=False)
    assert run.results == [82.0] * 2, "(0 + 40 + 1) * 2"
    first, second = ["(rank 0) "] * 3, ["(rank 1) "] * 3
    assert somebody.prompts[:6] in (first + second, second + first), "whichever got there first"
    printed = capsys.readouterr().out
    assert f"{__file__}({line_of(train, 'dist.all_reduce')})train()" in printed
    assert "-> dist.all_reduce(x)" in printed
    assert "tensor([0.])\n" in printed
    assert "tensor([1.])\n" in printed
    assert "labkit/rank" not in printed, "of labkit's own lines nobody wants to see any"


@pytest.mark.spawns
@pytest.mark.parametrize("how", ["quit", "end of input", "stop"])
def test_quit_and_stop_end_the_run_and_the_ranks_stay(reserved, person, how):
    pids = reserved.pids

    def ends():
        if how == "end of input":
            raise EOFError
        if how == "stop":
            labkit.runs[-1].ask_to_stop()
            return "p x"
        return "quit"

    person(ends)
    run = labkit.launch(train, on=reserved, live=False)
    assert (run.status, run.states) == ("stopped", ["stopped", "stopped"])
    assert reserved.pids == pids


def traced(worker):
    return sys.gettrace() is not None


def one_stops(worker):
    if worker.rank == 1:
        breakpoint()
    dist.barrier()
    return worker.rank


@pytest.mark.spawns
def test_while_somebody_is_at_a_prompt_the_silence_that_ends_a_run_is_not_counted(reserved, person):
    person(lambda: time.sleep(2.0) or "c")
    assert labkit.launch(one_stops, on=reserved, live=False, stall_s=1.0).results == [0, 1]


@pytest.mark.spawns
def test_a_rank_that_dies_while_another_is_at_a_prompt_is_the_one_that_failed(person):
    def kill():
        os.kill(labkit.runs[-1].pids[0], 9)
        assert labkit.runs[-1].over.wait(LONG_S), "also while nobody types"
        return ""

    person(kill)
    with pytest.raises(labkit.WorkerFailed) as failure:
        labkit.launch(one_stops, world_size=2, live=False)
    assert failure.value.rank == 0


# Where nobody can answer


@pytest.mark.parametrize(
    ("front_end", "terminal", "wait", "expected"),
    [
        ("watched", False, True, ""),
        ("watched", False, False, "no cell waits for the run (wait=False"),
        ("headless", True, True, "the notebook runs headless"),
        ("none", True, True, ""),
        ("none", True, False, "no cell waits for the run (wait=False"),
        ("none", False, True, "there is neither a notebook nor a terminal"),
    ],
)
def test_who_answers_or_why_nobody_can(monkeypatch, front_end, terminal, wait, expected):
    monkeypatch.setattr(kernel, "has_kernel", lambda: front_end != "none")
    monkeypatch.setattr(kernel, "is_interactive", lambda: front_end == "watched")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: terminal))
    debugger = Debugger(wait)
    debugger.run = SimpleNamespace(engine=SimpleNamespace(sends_words=True))
    assert debugger.why_nobody_answers().startswith(expected)
    assert bool(debugger.why_nobody_answers()) == bool(expected)


@pytest.mark.spawns
def test_headless_it_raises_at_once_and_names_rank_and_line(reserved):
    with pytest.raises(labkit.WorkerFailed) as failure:
        labkit.launch(one_stops, on=reserved, live=False)
    assert failure.value.rank == 1
    line = line_of(one_stops, "    breakpoint()")
    assert f"rank 1 is at breakpoint() in {HERE}, line {line}, and nobody can answer: " in str(failure.value)
    assert "there is neither a notebook nor a terminal" in str(failure.value)


@pytest.mark.spawns
def test_cells_on_reserved_ranks_say_it_too(reserved):
    with pytest.raises(labkit.WorkerFailed, match=r"rank 1 is at breakpoint\(\) in Cell In\[7\], line 2"):
        reserved.run("if rank == 1:\n    breakpoint()\n", title="Cell In[7]", only=[1])
    run = labkit.launch(traced, on=reserved, live=False)  # ends the cells' group, and so closes its port
    assert run.results == [False, False]


# In a notebook


@pytest.mark.kernel
def test_the_cell_that_waits_asks(tmp_path):
    notebook = Notebook(tmp_path, watched=True)

    def answer(line):
        prompt = notebook.client.get_stdin_msg(timeout=LONG_S)["content"]["prompt"]
        notebook.client.input(line)
        return prompt

    try:
        defined = notebook.run(
            """
            def train(worker):
                x = torch.ones(1) * worker.rank
                breakpoint()
                dist.all_reduce(x)
                return x.item()
            """,
            watched=True,
        )
        cell = notebook.start("run = labkit.launch(train)", watched=True)
        asked = [answer(line) for line in ("p x", "c", "p x", "c")]
        notebook.finish(cell)
        assert cell.error is None, cell.error
        first, second = ["(rank 0) "] * 2, ["(rank 1) "] * 2
        assert asked in (first + second, second + first), "whichever got there first"
        assert f"> Cell In[{defined.number}](4)train()\n-> dist.all_reduce(x)\n" in cell.stdout
        assert "tensor([0.])\n" in cell.stdout
        assert "tensor([1.])\n" in cell.stdout
        assert notebook.value("run.results") == [1.0, 1.0]
        notebook.run("run = labkit.launch(train, wait=False)", watched=True)
        cell = notebook.run("run.wait()", watched=True, fails=True)
        assert "nobody can answer: no cell waits for the run" in cell.error["evalue"]
        cell = notebook.run("labkit.launch(train)", fails=True)
        assert f"is at breakpoint() in Cell In[{defined.number}], line 3" in cell.error["evalue"]
        assert "the notebook runs headless" in cell.error["evalue"]
    finally:
        notebook.close()
