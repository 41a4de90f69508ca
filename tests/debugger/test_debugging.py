"""`breakpoint()` and `input()` in ranks: who is asked, who gets a line, what is held meanwhile, and where it raises.

Asked for in pytorch #115517 and torchtitan #652. Most ranks here are threads (`tests.support.debugged`); those of the
last part are processes, driven through the widget.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.debugger import answering
from labkit.debugger import debugger as debugger_module
from labkit.protocol.events import Exit, Started
from labkit.rank.breakpoints.conversation import HOLD, is_move
from labkit.rank.breakpoints.hook import HELD, NobodyAnswers
from labkit.ui import kernel
from tests.conftest import LONG_S, shared_session, wait_until
from tests.support.debugged import Ranks
from tests.support.fake_engine import FakeEngine
from tests.ui.test_kernel import Notebook

HERE = os.path.basename(__file__)


def two_steps(rank, stop, ask):
    y = 10 * rank
    for step in range(2):
        y += step
        stop()
        y = y + 1
        y = y + 1
    return y


def debugger(run):
    return run._debugger


def line_of(function, text):
    """The number of the line of a function that has this text."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


# What is asked, and who gets what is typed


def test_ranks_at_the_same_line_are_asked_once_and_go_on_together():
    ranks = Ranks(two_steps)
    ranks.until_asked(0, 1)
    at = f"{__file__}, line {line_of(two_steps, 'stop()')}"
    assert ranks.debugger.where == [f"ranks 0 and 1 stand at {at}"]
    assert ranks.debugger.prompt == "(rank 0) "
    assert ranks.debugger.said.count("-> stop()") == 1
    assert ranks.type("p y") == "(rank 0) p y\n0\n"
    assert ranks.type("rank 1", "p y").endswith("(rank 1) p y\n10\n")
    assert "-> y = y + 1" in ranks.type("next")
    assert ranks.lines_sent == [(0, "p y"), (1, "p y"), (0, "next"), (1, "next")]
    ranks.type("c")
    ranks.until_asked(0, 1)
    ranks.type("c")
    assert ranks.outcomes() == [5, 15]
    assert not ranks.run.paused_by


def test_an_empty_line_repeats_and_a_breakpoint_of_pdb_is_of_the_rank_that_set_it():
    ranks = Ranks(two_steps)
    ranks.until_asked(0, 1)
    ranks.type("next")
    assert ranks.type("") == "(rank 0) \n" + ranks.debugger.said.rpartition("(rank 0) \n")[2]
    assert ranks.lines_sent[-1][1] == "next"
    ranks.type("c")
    ranks.until_asked(0, 1)
    said = ranks.type(f"b {line_of(two_steps, 'y = y + 1')}", "c")
    assert "Breakpoint 1 at" in said
    assert said.endswith("-> y = y + 1\n")
    assert ranks.debugger.where[0].startswith("rank 0 stands"), "the other had none, and has ended"
    ranks.type("c")
    assert ranks.outcomes() == [5, 15]


def assigns(rank, stop, ask):
    x, kept = 1, [rank]

    def inner():
        return x

    stop()
    return x, inner(), kept


def test_what_is_assigned_at_the_prompt_is_what_the_function_goes_on_with():
    """Before Python 3.13 a frame's `f_locals` are a copy."""
    ranks = Ranks(assigns)
    ranks.until_asked(0, 1)
    assert ranks.type("!x = 100", "p x, inner()").endswith("(100, 100)\n")
    ranks.type("x += 1; kept = None", "up", "down", "p x", "c")
    assert ranks.outcomes() == [(101, 101, None), (1, 1, [1])]


def fails(rank, stop, ask):
    def divide(by):
        return 1 / by

    try:
        divide(0)
    except ZeroDivisionError as error:
        stop.__self__.pdb.post_mortem(error.__traceback__)
    return "gone on"


def test_a_post_mortem_is_asked_and_answered_at_the_prompt():
    ranks = Ranks(fails)
    ranks.until_asked(0, 1)
    at = f"{__file__}, line {line_of(fails, 'return 1 / by')}"
    assert ranks.debugger.where == [f"ranks 0 and 1 stand at {at}"]
    assert ranks.type("p by") == "(rank 0) p by\n0\n"
    assert "divide(0)" in ranks.type("up")
    ranks.type("c")
    assert ranks.outcomes() == ["gone on"] * 2
    assert not ranks.run.paused_by


def at_two_lines(rank, stop, ask):
    mine = f"of rank {rank}"
    if rank == 0:
        stop()
    else:
        stop()
    return mine


def test_ranks_at_different_lines_are_asked_one_after_the_other():
    ranks = Ranks(at_two_lines, 3)
    ranks.until_asked(0, 1, 2)
    assert [line.partition(" stand")[0] for line in ranks.debugger.where] == ["rank 0", "ranks 1 and 2"]
    assert "'of rank 2'" in ranks.type("rank 2", "p mine")
    assert "does not ask" not in ranks.debugger.said
    assert "there are ranks 0 to 2" in ranks.type("rank 3")
    ranks.type("c")
    ranks.until(lambda: ranks.debugger.prompt == "(rank 0) ")
    assert {rank for rank, line in ranks.lines_sent if line == "c"} == {1, 2}
    assert "rank 2 does not ask" in ranks.type("rank 2")
    ranks.type("c")
    assert ranks.outcomes() == ["of rank 0", "of rank 1", "of rank 2"]


@pytest.mark.parametrize(
    ("line", "moves"),
    [("c", True), (" next ", True), ("until 20", True), ("p x;;n", True), ("p c", False), ("", False), ("rank", False)],
)
def test_what_lets_a_rank_go_on(line, moves):
    assert is_move(line) is moves


def asks_for_input(rank, stop, ask):
    return ask("lr? "), rank


def test_an_input_is_asked_once_and_given_to_all_that_ask_it():
    ranks = Ranks(asks_for_input)
    ranks.until_asked(0, 1)
    assert ranks.debugger.prompt == "(rank 0) lr? "
    assert "ranks 0 and 1 ask for input at" in ranks.debugger.where[0]
    ranks.type("rank 1")
    assert ranks.outcomes() == [("rank 1", 0), ("rank 1", 1)], "what looks like a switch is the answer"


def asks_for_a_secret(rank, stop, ask):
    return ask("key: ", "getpass")


def test_a_secret_is_given_to_all_that_ask_it_and_shown_to_nobody(monkeypatch):
    seen = []
    monkeypatch.setattr(debugger_module, "read_line", lambda prompt, over, is_secret: seen.append(is_secret) or "hf_1")
    ranks = Ranks(asks_for_a_secret, way=answering.WAITER)
    ranks.until_asked(0, 1)
    assert ranks.debugger.prompt == "(rank 0) key: "
    ranks.debugger.attend()
    assert ranks.outcomes() == ["hf_1", "hf_1"]
    assert seen == [True]
    assert ranks.debugger.said == "(rank 0) key: ········\n"


def test_quit_stops_the_run_on_every_rank():
    ranks = Ranks(two_steps)
    ranks.until_asked(0, 1)
    ranks.type("quit")
    assert ranks.outcomes() == ["stopped", "stopped"]
    assert ranks.run.stopping
    assert ranks.debugger.said.endswith("(rank 0) quit\nthe run is being stopped\n")


def test_a_stop_ends_the_wait_and_a_rank_that_asks_later_is_stopped_too():
    ranks = Ranks(two_steps)
    ranks.until_asked(0, 1)
    ranks.run.ask_to_stop()
    assert ranks.outcomes() == ["stopped", "stopped"]
    assert ranks.debugger.prompt == ""


def test_a_rank_that_ends_while_another_debugs_is_no_longer_asked():
    ranks = Ranks(two_steps)
    ranks.until_asked(0, 1)
    ranks.run._follower.take(Exit(0, -9))
    assert ranks.debugger.prompt == "(rank 1) "
    assert "rank 0 has ended" in ranks.debugger.said
    ranks.run.ask_to_stop()
    ranks.outcomes()


# What is held


def test_while_somebody_debugs_the_silence_that_ends_a_run_is_not_counted():
    engine = FakeEngine()
    run = labkit.Run(engine, 2, "train", stall_s=1e-9)
    run.paused_by.add(run._observers[0])
    for rank in range(2):
        run._follower.take(Started(rank))
    run._follower.enforce_deadlines()
    assert engine.calls == []
    run.paused_by.clear()
    time.sleep(0.001)
    run._follower.enforce_deadlines()
    assert engine.calls == ["ask_for_stacks"]


def test_all_ranks_are_told_to_hold_their_groups_time_limits_once():
    ranks = Ranks(two_steps)
    ranks.until_asked(0, 1)
    assert [rank for rank, word in ranks.words if word == HOLD] == [0, 1]
    ranks.run.ask_to_stop()
    ranks.outcomes()


# Who answers


@pytest.mark.parametrize(
    ("front_end", "subshells", "terminal", "live", "wait", "expected"),
    [
        ("watched", True, False, None, True, "panel"),
        ("watched", False, False, None, False, "panel"),
        ("watched", False, False, None, True, "waiter"),  # ipykernel 6: no widget answers while its cell runs
        ("watched", True, False, False, True, "waiter"),
        ("watched", True, False, False, False, "no live view"),
        ("headless", True, False, None, True, "runs headless"),
        ("headless", True, False, True, True, "runs headless"),
        ("none", False, True, None, True, "waiter"),
        ("none", False, True, None, False, r"wait=False"),
        ("none", False, False, None, True, "neither a notebook nor a terminal"),
    ],
)
def test_who_answers_or_why_nobody_can(monkeypatch, front_end, subshells, terminal, live, wait, expected):
    monkeypatch.setattr(kernel, "has_kernel", lambda: front_end != "none")
    monkeypatch.setattr(kernel, "is_interactive", lambda: front_end == "watched")
    monkeypatch.setattr(kernel, "has_subshells", lambda: subshells)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: terminal))
    way, why = answering.answerer(SimpleNamespace(sends_words=True), live, wait)
    assert expected in (way or why)
    assert bool(way) != bool(why)


def test_nobody_answers_ranks_on_a_cluster(monkeypatch):
    monkeypatch.setattr(kernel, "is_interactive", lambda: True)
    assert "on a cluster" in answering.answerer(FakeEngine(), None, True)[1]


def test_who_waits_for_the_run_is_asked(monkeypatch, capsys):
    lines = iter(["p y", "c", "c"])
    asked = []

    def read_line(prompt, over, is_secret):
        asked.append(prompt)
        return next(lines)

    monkeypatch.setattr(debugger_module, "read_line", read_line)
    ranks = Ranks(two_steps, way=answering.WAITER)
    ranks.until_asked(0, 1)
    while any(each.thread.is_alive() for each in ranks.ranks):
        ranks.debugger.attend()
        time.sleep(0.01)
    assert ranks.outcomes() == [5, 15]
    assert asked == ["(rank 0) "] * 3
    printed = capsys.readouterr().out
    assert printed.count("-> stop()") == 2
    assert "\n0\n" in printed


@pytest.fixture
def terminal(monkeypatch):
    """The writing end of what this process takes for its terminal."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield writer


def test_a_line_is_read_from_a_terminal_until_the_run_is_over(terminal, capsys):
    over = threading.Event()
    os.write(terminal, b"p loss\n")
    assert answering.read_line("(rank 1) ", over) == "p loss"
    over.set()
    assert answering.read_line("(rank 1) ", over) is None
    over.clear()
    os.close(terminal)
    with pytest.raises(KeyboardInterrupt):
        answering.read_line("(rank 1) ", over)
    assert capsys.readouterr().out.startswith("(rank 1) ")


def test_a_secret_is_read_from_a_terminal_without_being_shown(monkeypatch):
    termios = pytest.importorskip("termios")
    leader, follower = os.openpty()

    def type_it():
        wait_until(lambda: not termios.tcgetattr(leader)[3] & termios.ECHO)
        os.write(leader, b"hf_1\n")

    with os.fdopen(follower) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        typing = threading.Thread(target=type_it)
        typing.start()
        assert answering.read_line("key: ", threading.Event(), is_secret=True) == "hf_1"
        typing.join()
        assert termios.tcgetattr(leader)[3] & termios.ECHO, "what follows is seen"
        os.write(stdin.fileno(), b".")
        assert os.read(leader, 100) == b".", "and that was all"
    os.close(leader)


# In ranks: processes, driven through the widget


@pytest.fixture(scope="module")
def reserved():
    with shared_session(3) as session:
        yield session


@pytest.fixture
def watched(monkeypatch):
    """As if a person watched the live view."""
    monkeypatch.setattr(debugger_module, "answerer", lambda engine, live, wait: (answering.PANEL, ""))


def launch(function, *args, world_size, on, **options):
    return labkit.launch(function, *args, world_size=world_size, on=on, live=False, wait=False, **options)


def until_asked(run, count):
    def asked():
        assert not run.over.is_set(), (run.error, run.output)
        with debugger(run)._changed:
            return len(debugger(run)._asking) == count and run.panel and run.panel.prompt

    wait_until(asked, LONG_S)


def type_(run, *lines):
    """Type lines into the widget, each once there is a prompt; return what has been said since."""
    panel = run.panel
    before = len(panel.said)
    for line in lines:
        wait_until(lambda: panel.prompt or run.over.is_set(), LONG_S)
        panel._received(panel, {"line": line}, [])
    wait_until(lambda: panel.prompt or not run.paused_by, LONG_S)
    return panel.said[before:]


def train(worker):
    x = torch.ones(1) * worker.rank
    for _ in range(2):
        breakpoint()
        dist.all_reduce(x)
        worker.log(x=x.item())
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return x.item(), backend.options._timeout


@pytest.mark.spawns
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_session_of_five_commands(reserved, watched, world_size):
    run = launch(train, world_size=world_size, on=reserved)
    until_asked(run, world_size)
    panel, line = run.panel, line_of(train, "breakpoint()")
    everybody = "ranks 0 and 1" if world_size == 2 else "ranks 0, 1 and 2"
    assert re.search(rf"{everybody} stand at .*{HERE}, line {line}<", panel.where)
    assert f"→ {line:4}          breakpoint()" in panel.where
    assert type_(run, "p x") == "(rank 0) p x\ntensor([0.])\n"
    assert "tensor([1.])" in type_(run, "rank 1", "p x")
    assert "labkit" not in type_(run, "where").replace("labkit/tests", "").replace(__file__, "")
    assert "-> worker.log(x=x.item())" in type_(run, "next", "next"), "through a collective, together"
    type_(run, "continue")
    until_asked(run, world_size)
    type_(run, "continue")
    assert run.over.wait(LONG_S)
    total = sum(range(world_size)) * world_size
    assert run.status == "finished", run.error
    assert run.results == [(total, HELD)] * world_size, "groups wait long in a function that may stop"


@pytest.mark.spawns
def test_quit_and_stop_end_the_run_and_the_ranks_stay(reserved, watched):
    pids = reserved.pids
    for end in (lambda run: type_(run, "quit"), lambda run: run.stop()):
        run = launch(train, world_size=2, on=reserved)
        until_asked(run, 2)
        end(run)
        assert run.over.wait(LONG_S)
        assert (run.status, run.states) == ("stopped", ["stopped", "stopped"])
    assert reserved.pids == pids


def one_stops(worker):
    x = torch.ones(1)
    import pdb

    if worker.rank == 1:
        pdb.set_trace()
    dist.breakpoint(rank=1)
    dist.all_reduce(x)
    return x.item(), input("what? ") if worker.rank == 1 else None


@pytest.mark.spawns
def test_set_trace_and_dist_breakpoint_and_input_are_asked_too(reserved, watched):
    run = launch(one_stops, world_size=2, on=reserved)
    until_asked(run, 1)
    assert debugger(run).prompt == "(rank 1) "
    assert "-> pdb.set_trace()" in debugger(run).said
    wait_until(lambda: f"rank 0 is in dist.breakpoint at {HERE}" in type_(run, "ranks"), LONG_S)
    type_(run, "c")
    until_asked(run, 1)
    assert "-> dist.breakpoint(rank=1)" in debugger(run).said
    assert "-> dist.all_reduce(x)" in type_(run, "next"), "beyond the barrier in which the other waits"
    type_(run, "c")
    wait_until(lambda: debugger(run).prompt == "(rank 1) what? ", LONG_S)
    type_(run, "an answer")
    assert run.over.wait(LONG_S)
    assert run.results == [(2.0, None), (2.0, "an answer")]


def dies(worker):
    if worker.rank == 0:
        breakpoint()
    dist.barrier()


@pytest.mark.spawns
def test_a_rank_that_dies_while_another_is_debugged_ends_the_run(reserved, watched):
    run = launch(dies, world_size=2, on=reserved)
    until_asked(run, 1)
    os.kill(run.pids[1], 9)
    assert run.over.wait(LONG_S)
    assert run.error.rank == 1
    assert debugger(run).prompt == ""
    assert not run.paused_by


def in_a_worker_process(_):
    return torch.ones(int(input("how many? ")))


def calls(worker, what):
    if worker.rank == 1:
        if what == "breakpoint":
            breakpoint()
        elif what == "set_trace":
            import pdb

            pdb.set_trace()
        elif what == "dist":
            dist.breakpoint(1)
        elif what == "input":
            input("lr? ")
        elif what == "getpass":
            getpass.getpass("key: ")
        else:
            options = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": in_a_worker_process}
            list(torch.utils.data.DataLoader(range(1), **options))
    dist.barrier()


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("breakpoint", "breakpoint()"),
        ("set_trace", "pdb.set_trace()"),
        ("dist", "dist.breakpoint()"),
        ("input", "input()"),
        ("getpass", "getpass()"),
    ],
)
def test_headless_it_raises_at_once_and_names_rank_and_line(reserved, what, call):
    run = launch(calls, what, world_size=2, on=reserved)
    assert run.over.wait(LONG_S)
    said = run.error.diagnosis.headline
    text = {"dist": "dist.breakpoint(1)", "input": 'input("lr? ")', "getpass": "getpass.getpass("}.get(what, call)
    assert run.error.rank == 1
    assert f"NobodyAnswers: rank 1 is at {call} in {HERE}, line {line_of(calls, text)}" in said
    assert "there is neither a notebook nor a terminal" in str(run.error)


@pytest.mark.spawns
def test_in_a_process_that_a_rank_has_started_it_raises_too(reserved, watched):
    run = launch(calls, "worker process", world_size=2, on=reserved)
    assert run.over.wait(LONG_S)
    assert "a process that the rank has started" in str(run.error)


def rank_of(worker):
    return worker.rank


@pytest.mark.spawns
def test_cells_on_reserved_ranks_say_it_too(reserved):
    with pytest.raises(labkit.WorkerFailed, match=r"rank 2 is at breakpoint\(\) in Cell In\[7\], line 2"):
        reserved.run("if rank == 2:\n    breakpoint()\n", title="Cell In[7]", only=[2])
    run = labkit.launch(rank_of, on=reserved, live=False)  # ends the cells' group, and so closes its port
    assert run.results == [0, 1, 2]


@pytest.mark.kernel
def test_the_cell_that_waits_asks_and_is_free_when_the_run_has_ended(tmp_path):
    notebook = Notebook(tmp_path, watched=True)

    def answer(line):
        prompt = notebook.client.get_stdin_msg(timeout=LONG_S)["content"]["prompt"]
        if line is not None:
            notebook.client.input(line)
        return prompt

    try:
        notebook.run(
            """
            def train(worker, lives_s=None):
                x = torch.ones(1) * worker.rank
                if worker.rank == 1 and lives_s is not None:
                    time.sleep(lives_s)
                    os._exit(3)
                breakpoint()
                dist.all_reduce(x)
                return x.item(), input("what? ")
            """,
            watched=True,
        )
        cell = notebook.start("run = labkit.launch(train, live=False)", watched=True)
        asked = [answer(line) for line in ("p x", "rank 1", "p x", "next", "c", "an answer")]
        notebook.finish(cell)
        assert cell.error is None, cell.error
        assert asked == [*["(rank 0) "] * 2, *["(rank 1) "] * 3, "(rank 0) what? "]
        assert "> Cell In[3](6)train()\n-> breakpoint()\n" in cell.stdout
        assert "tensor([0.])\n" in cell.stdout
        assert "tensor([1.])\n" in cell.stdout
        notebook.run(
            """
            def post_mortem(worker):
                import pdb
                x = worker.rank
                try:
                    1 / 0
                except ZeroDivisionError:
                    pdb.post_mortem()
                return x
            """,
            watched=True,
        )
        cell = notebook.start("labkit.launch(post_mortem, live=False)", watched=True)
        assert [answer(line) for line in ("p x + 41", "c")] == ["(rank 0) "] * 2
        notebook.finish(cell)
        assert "\n41\n" in cell.stdout, "the answer is at the prompt"
        cell = notebook.start("labkit.launch(train, 1.0, live=False)", watched=True)
        assert answer(None) == "(rank 0) "
        notebook.finish(cell)
        assert "(exit code 3)" in cell.error["evalue"]
        assert notebook.value("run.results") == [(1.0, "an answer")] * 2
        cell = notebook.run("labkit.launch(train)", fails=True)
        assert "is at breakpoint() in Cell In[3], line 6" in cell.error["evalue"]
        assert "the notebook runs headless" in cell.error["evalue"]
    finally:
        notebook.close()


@pytest.mark.kernel
@pytest.mark.parametrize("launches", ["run = labkit.launch(train)", "run.wait()"])
def test_where_the_front_end_opens_no_subshell_the_cell_that_waits_asks(tmp_path, launches):
    """As in VS Code, whose own panel would be heard after the cell only."""
    notebook = Notebook(tmp_path, watched=True)
    try:
        notebook.run("labkit.ui.live.SUBSHELL_S = 0.5\ndef train(worker):\n    breakpoint()\n    return worker.rank")
        if launches == "run.wait()":
            notebook.run("run = labkit.launch(train, wait=False)", watched=True)
        cell = notebook.start(launches, watched=True)
        for line in ("p worker.world_size", "c"):
            assert notebook.client.get_stdin_msg(timeout=LONG_S)["content"]["prompt"] == "(rank 0) "
            notebook.client.input(line)
        notebook.finish(cell)
        assert cell.error is None, cell.error
        assert "-> breakpoint()\n2\n" in cell.stdout
        assert notebook.value("(run.results, run.panel is not None)") == ([0, 1], False)
    finally:
        notebook.close()


def test_what_is_raised_where_nobody_answers_is_what_input_raises_at_its_end():
    assert issubclass(NobodyAnswers, EOFError)
