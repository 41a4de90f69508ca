"""Ranks that stay: what they keep, what they show, and what ends them."""

from __future__ import annotations

import os
import re
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.session import cell_runs, cells
from tests.conftest import LONG_S
from tests.support.hangs import is_recorded

pytestmark = pytest.mark.spawns

UNTIL = "while not __import__('os').path.exists('{path}'): __import__('time').sleep(0.05)"
"""Code for the ranks: wait until the test has made a file."""


@pytest.fixture(scope="module")
def ranks():
    with labkit.Session(2) as ranks:
        ranks.run("1;")  # the cells' process group has a port of its own, from the first cell on
        yield ranks


LIMIT = "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()"


def _limit_s(worker):
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_the_collectives_of_cells_may_take_as_long_as_the_session_says():
    with labkit.Session(2, pg_timeout_s=70) as ranks:
        assert ranks.values(LIMIT) == [70, 70]
        assert labkit.launch(_limit_s, on=ranks, live=False).results == [1800, 1800], "and not a launch's"
        ranks.run("from datetime import timedelta; dist.init_process_group(timeout=timedelta(seconds=50))")
        assert ranks.values(LIMIT) == [50, 50], "a cell has asked for less"


def failure_of(ranks, code, **options):
    with pytest.raises(labkit.WorkerFailed) as failure:
        ranks.run(code, title="Cell In[7]", **options)
    return failure.value


# The code


@pytest.mark.parametrize(
    ("code", "last"),
    [("x = 1\nx", "x"), ("x = 1", None), ("x;", None), ("", None), ("f(\n1)", "f(\n1)"), ("if x:\n    x", None)],
)
def test_the_last_expression_is_what_is_shown(code, last):
    _, value = cells.compile_cell(code, "Cell In[7]")
    assert (value is None) == (last is None)


# Going on


def test_some_ranks_only(ranks, capsys):
    ranks.run("y = 'all'\ny")
    ranks.run("y = 'one'\ny", only=[1])
    assert capsys.readouterr().out == "[rank 0] 'all'\n[rank 1] 'all'\n[rank 1] 'one'\n"
    assert ranks.values("y") == ["all", "one"]
    with pytest.raises(ValueError, match=r"there are ranks 0 to 1; cannot run on \[2\]"):
        ranks.run("y", only=[2])


def test_what_ranks_print_is_shown_whole_and_in_order_before_the_value(ranks, capsys):
    ranks.run("""
import os, sys
for line in range(3000):
    print(f"line {line} of {rank} " + "x" * 60)
os.write(1, b"below Python\\n")
print("an error", file=sys.stderr)
print("unfinished", end="")
torch.zeros(2, 2)
""")
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert [line for line in mine if line.startswith("line")] == [
            f"line {n} of {rank} " + "x" * 60 for n in range(3000)
        ]
        assert mine[3000:] == ["below Python", "an error", "unfinished", "tensor([[0., 0.],", "        [0., 0.]])"]
    assert len(lines) == 2 * 3005


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """The lines that are shown; each makes a file of its number, for which ranks wait."""
    lines = []

    def show(*words, **_):
        lines.append(" ".join(words))
        (tmp_path / str(len(lines))).touch()

    monkeypatch.setattr("builtins.print", show)
    return lines


def test_output_comes_while_the_code_runs(ranks, shown, tmp_path):
    ranks.run(f"print('early')\n{UNTIL.format(path=tmp_path / '2')}", stall_s=LONG_S)
    assert sorted(shown) == ["[rank 0] early", "[rank 1] early"]


def test_variables_and_functions_are_sent_by_value(ranks):
    factor = 3

    def scaled(value):
        return factor * value

    ranks.run("result = scaled(rank + offset)", send={"scaled": scaled, "offset": 10})
    assert ranks.values("result") == [30, 33]
    with pytest.raises(ValueError, match="'lock', a lock, cannot be sent to the ranks"):
        ranks.run("1", send={"lock": threading.Lock()})


def test_a_class_of_one_cell_can_be_sent_from_rank_to_rank(ranks):
    ranks.run("class Here:\n    pass")
    ranks.run("there = [None, None]\ndist.all_gather_object(there, Here())")
    assert ranks.values("all(type(each) is Here for each in there)") == [True, True]


def test_a_value_that_cannot_be_sent_says_so(ranks):
    with pytest.raises(labkit.WorkerFailed, match="the expression gives a generator that cannot be sent"):
        ranks.values("(n for n in range(3))")


def test_it_is_said_where_the_others_are_when_some_have_ended(ranks, shown, monkeypatch, tmp_path):
    monkeypatch.setattr(cell_runs, "HINT_AFTER_S", 0.3)
    ranks.run(f"if rank == 1:\n    {UNTIL.format(path=tmp_path / '1')}", title="Cell In[7]", stall_s=LONG_S)
    said = r"still at it: rank 0 has run the cell to its end; rank 1 is (in .+ )?at Cell In\[7\], line 2"
    assert len(shown) == 1
    assert re.fullmatch(said, shown[0]), shown[0]


# Failing


def test_a_failure_names_rank_and_line_and_the_variables_live_on(ranks):
    ranks.run("kept = rank")
    failure = failure_of(ranks, "\nif rank == 1:\n    raise ValueError('bad batch')")
    assert failure.rank == 1
    assert str(failure).startswith("rank 1 failed: ValueError: bad batch\n")
    assert "Cell In[7], line 3, in <cell>\n    raise ValueError('bad batch')" in failure.cause
    assert "labkit" not in failure.cause
    assert failure.diagnosis.others == ["rank 0 ran the cell to its end"]
    assert failure.run.status == "failed"
    assert ranks.values("kept") == [0, 1]


def test_a_failure_on_every_rank_is_told_once(ranks):
    failure = failure_of(ranks, "missing")
    assert failure.diagnosis.headline.endswith("failed: NameError: name 'missing' is not defined")
    assert failure.diagnosis.others == [f"rank {1 - failure.rank} failed alike"]
    assert not ranks.over


def test_an_exit_in_the_code_is_a_failure_like_any_other(ranks):
    assert "SystemExit: 3" in str(failure_of(ranks, "raise SystemExit(3)", only=[0]))
    assert not ranks.over


ENDINGS = {
    "stuck with a rank that failed": (
        "if rank == 1:\n    raise ValueError('bad batch')\ndist.barrier()",
        {},
        "rank 1 failed: ValueError: bad batch",
        ["rank 0 waits in barrier at Cell In[7], line 3", "so rank 0 is replaced: its variables are gone"],
        0,
    ),
    "SIGKILL": (
        "import os\nif rank == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()",
        {},
        "(SIGKILL)",
        ["rank 0 failed too: RuntimeError", "so rank 1 is replaced: its variables are gone"],
        1,
    ),
    "a hang": (
        "dist.barrier()",
        {"only": [1], "stall_s": 1},
        "no rank logged, printed or returned anything for 1 s (stall_s): rank 1 is in barrier #1 at "
        "Cell In[7], line 1; rank 0 has no part in the cell",
        ["rank 1 waits in barrier at Cell In[7], line 1", "so rank 1 is replaced: its variables are gone"],
        1,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_is_lost_in_a_cell_is_replaced_and_the_others_keep_their_variables(ending, capsys):
    code, options, headline, others, lost = ENDINGS[ending]
    with labkit.Session(2) as ranks:
        ranks.run("kept = rank")
        pids = ranks.pids
        failure = failure_of(ranks, code, **options)
        if ending == "a hang" and not is_recorded():
            headline = f"{headline.partition(': ')[0]}: rank 0 has no part in the cell; {others[0]}"
        assert headline in failure.diagnosis.headline
        assert len(failure.diagnosis.others) == len(others)
        for line, beginning in zip(failure.diagnosis.others, others, strict=True):
            assert line.startswith(beginning)
        capsys.readouterr()
        ranks.run("dist.all_reduce(torch.ones(1))\nglobals().get('kept')")
        assert [now != before for now, before in zip(ranks.pids, pids, strict=True)] == [lost == 0, lost == 1]
        said = capsys.readouterr().out.splitlines()
        kept = 1 - lost
        assert said[0].startswith(f"rank {lost} is new (its process had ")
        assert said[0].endswith("its variables are gone")
        assert said[1:] == [f"[rank {kept}] {kept}"]


def test_a_rank_that_dies_while_nothing_runs_is_told_at_the_next_use(capsys):
    with labkit.Session(2) as ranks:
        ranks.run("1")
        os.kill(ranks.pids[1], signal.SIGKILL)
        ranks._reserve.processes[1].wait_for_exit()
        capsys.readouterr()
        ranks.run("rank")
        assert capsys.readouterr().out == (
            "rank 1 is new (its process had ended: SIGKILL): its variables are gone\n[rank 0] 0\n[rank 1] 1\n"
        )


def test_a_rank_that_dies_without_a_part_in_the_cell_is_blamed_not_the_one_that_waited_for_it(tmp_path):
    others = tmp_path / "the others are there"
    with labkit.Session(3) as ranks:
        die = f"def die():\n    {UNTIL.format(path=others)}\n    os.kill(os.getpid(), 9)\n"
        ranks.run(f"import os, threading\n{die}if rank == 1:\n    threading.Thread(target=die).start()")
        code = f"open({str(others)!r}, 'w').close()\ndist.all_reduce(torch.ones(1))"
        failure = failure_of(ranks, code, only=[0, 2])
        assert failure.rank == 1, str(failure)
        assert failure.diagnosis.page == "rank_died"
        assert failure.diagnosis.others[-1] == "so rank 1 is replaced: its variables are gone"
