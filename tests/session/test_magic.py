"""`%%ranks` as a reader uses it: cells sent to a real Jupyter kernel."""

from __future__ import annotations

import re
import time

import pytest

from tests.conftest import rank_processes
from tests.ui.test_kernel import Notebook, ranks_alive

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind():
    """Here ranks stay from test to test: look when the last has ended."""
    before = {process.pid for process in rank_processes()}
    yield
    assert {process.pid for process in rank_processes()} <= before


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    notebook = Notebook(tmp_path_factory.mktemp("kernel"))
    notebook.run("%load_ext labkit")
    yield notebook
    notebook.close()


def plain(cell):
    """What a failed cell shows, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(cell.error["traceback"]))


def test_cells_run_on_ranks_whose_variables_stay(notebook):
    notebook.run("n, scale = 2, 10")
    cell = notebook.run("%%ranks $n --send scale\nx = scale * torch.arange(2) + rank\nx")
    assert cell.stdout == "[rank 0] tensor([ 0, 10])\n[rank 1] tensor([ 1, 11])\n"
    cell = notebook.run("%%ranks\ndist.all_reduce(x)\nprint('sum', end='')\nx.tolist()")
    *printed, first, second = cell.stdout.splitlines()
    assert sorted(printed) == ["[rank 0] sum", "[rank 1] sum"], "in the order in which the ranks are done"
    assert [first, second] == ["[rank 0] [1, 21]", "[rank 1] [1, 21]"]
    assert notebook.run("%%ranks --only 1\nx[0].item()").stdout == "[rank 1] 1\n"
    notebook.run("values = %ranks {'rank': rank, 'x': x.tolist()}")
    assert notebook.value("values") == [{"rank": 0, "x": [1, 21]}, {"rank": 1, "x": [1, 21]}]
    assert cell.stderr == ""


def test_a_cell_may_choose_the_backend_of_its_ranks(notebook):
    notebook.run("%%ranks 2")
    notebook.run("%%ranks --backend gloo\nbackend = dist.get_backend()")
    notebook.run("values = %ranks backend")
    assert notebook.value("values") == ["gloo", "gloo"]
    cell = notebook.run("%%ranks --backend GLOO\nbackend")
    assert cell.stdout == "[rank 0] 'gloo'\n[rank 1] 'gloo'\n", "the same backend, and the same ranks"
    cell = notebook.run("%%ranks 2 --backend mpi\nrank", fails=True)
    assert "mpi" in plain(cell)


def test_a_syntax_error_shows_the_line_and_sends_nothing(notebook):
    notebook.run("%%ranks 2\nkept = 1")
    cell = notebook.run("%%ranks\nkept = 2\nif rank:\nprint(1)", fails=True)
    assert cell.error["ename"] == "IndentationError"
    assert re.search(rf"Cell In\[{cell.number}\]\D+4", plain(cell))
    notebook.run("values = %ranks kept")
    assert notebook.value("values") == [1, 1]


def test_a_name_that_only_the_notebook_has_is_answered_with_how_it_is_sent(notebook):
    notebook.run("lr = 0.1")
    said = plain(notebook.run("%%ranks 2\nlr", fails=True))
    assert "name 'lr' is not defined. The notebook has it: %%ranks --send lr" in said


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%%ranks two\n1", "invalid int value: 'two'"),
        ("%%ranks --only x\n1", "--only takes ranks, such as 1 or 0,2; got 'x'"),
        ("%%ranks --send nothing\n1", "the notebook has no variable 'nothing'"),
        ("%ranks", "%ranks takes an expression"),
    ],
)
def test_a_wrong_call_says_what_is_right(notebook, cell, said):
    assert said in notebook.run(cell, fails=True).stderr


def test_an_interrupt_frees_the_cell_and_says_what_is_lost(notebook, start_s):
    cell = notebook.start("""
        %%ranks 2
        print("waiting", flush=True)
        if rank == 0:
            dist.barrier()
        while True:
            pass
    """)
    notebook.listen_until(lambda: cell.stdout.count("waiting") == 2)
    asked = time.monotonic()
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.idle_s - asked < start_s, "sooner than ranks start"
    assert cell.error["ename"] == "RunInterrupted"
    assert "was interrupted and stopped\n" in plain(cell)
    assert cell.stdout.endswith("stopped: ranks 0 and 1 are replaced: their variables are gone\n")
    assert cell.stderr == ""
    notebook.run("values = %ranks rank")
    assert notebook.value("values") == [0, 1]


def test_another_number_or_the_end_takes_the_ranks_away(notebook):
    notebook.run("%%ranks 2\n1")
    cell = notebook.run("%%ranks 1 --end\nworld_size")
    assert cell.stdout == "ranks started anew: 1, in the place of 2\n[rank 0] 1\n"
    assert ranks_alive(notebook) == []
    notebook.run("%%ranks 1\n1")
    notebook.run("%unload_ext labkit")
    assert ranks_alive(notebook) == []
    assert "not found" in notebook.run("%%ranks\n1", fails=True).stderr


def test_ranks_end_with_the_kernel(notebook):
    notebook.run("%load_ext labkit")
    notebook.run("%%ranks 2\n1")
    ranks = ranks_alive(notebook)
    assert len(ranks) == 2
    notebook.shut_down()
    notebook.wait_until_gone(ranks)


@pytest.mark.cold  # a forked kernel's children are others
def test_a_kernel_that_shuts_down_leaves_ipykernel_nothing_to_wait_for(tmp_path):
    """It would wait half a minute. Jupyter ends it after seconds: by SIGTERM, without exit handlers."""
    notebook = Notebook(tmp_path)
    notebook.run("%load_ext labkit")
    notebook.run("%%ranks 1\n1")
    cell = notebook.run("""
        import psutil
        before = len(psutil.Process().children())
        get_ipython().exit_now = True
        print(before, psutil.Process().children(recursive=True))
    """)
    assert cell.stdout == "2 []\n", "the rank, and multiprocessing's resource tracker"
    notebook.close()
