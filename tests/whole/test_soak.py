"""A notebook that is used for a day: what its kernel and its ranks hold does not grow with what has been run before.

In `make test-long`. LABKIT_SOAK_LAUNCHES, LABKIT_SOAK_CALLS and LABKIT_SOAK_S make it shorter, or longer.
"""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests.ui.test_kernel import Notebook

LAUNCHES = int(os.environ.get("LABKIT_SOAK_LAUNCHES", "1000"))
CALLS = int(os.environ.get("LABKIT_SOAK_CALLS", "10_000_000"))
CALLS_S = float(os.environ.get("LABKIT_SOAK_S", "3600"))

GROWTH = 1.1
"""What is held in the end may be so many times what was held after a tenth."""

CALL_BYTES = 24 + 8
"""What a log call of one value is kept in."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.spawns,
    pytest.mark.kernel,
    pytest.mark.cold,  # a process that is forked from one with torch shares its memory, and takes copies by and by
    pytest.mark.timeout(10 * 3600),
    pytest.mark.skipif(sys.platform != "linux", reason="counts as Linux shows it"),
]

IN_THE_KERNEL = """
import comm, gc, psutil, time

session = labkit.Session(2)

def held():
    '''The least of what is held in a while: ipykernel lets go of what ended threads had every ten seconds.'''
    until_s, seen = time.monotonic() + 12, []
    while time.monotonic() < until_s:
        gc.collect()
        for name, pids in {"kernel": [os.getpid()], "ranks": session.pids}.items():
            processes = [psutil.Process(pid) for pid in pids]
            seen.append((f"{name}: files", sum(process.num_fds() for process in processes)))
            seen.append((f"{name}: threads", sum(process.num_threads() for process in processes)))
            seen.append((f"{name}: bytes", sum(process.memory_full_info().uss for process in processes)))
        seen.append(("kernel: comms", len(comm.get_comm_manager().comms)))
        time.sleep(1)
    return {name: min(value for of, value in seen if of == name) for name in dict.fromkeys(name for name, _ in seen)}

def train(worker):
    for step in range(30):
        worker.log(loss=1 / (1 + step))
        time.sleep(0.01)
    print("done")
    return step

def log(worker, calls, seconds):
    began_s = time.monotonic()
    for step in range(calls):
        worker.log(loss=1 / (1 + step))
        if step % 100 == 0:
            time.sleep(max(0.0, began_s + seconds * step / calls - time.monotonic()))
    return worker.rank
"""


@pytest.fixture
def notebook(tmp_path):
    notebook = Notebook(tmp_path, watched=True)
    notebook.run(IN_THE_KERNEL)
    notebook.run("run = labkit.launch(train, on=session)", watched=True)  # has Plotly, Matplotlib and pandas imported
    yield notebook
    notebook.close()


def held(notebook):
    found = notebook.value("held()")
    print({name: f"{value / 2**20:.1f} MiB" if "bytes" in name else value for name, value in found.items()})
    return found


def assert_not_grown(early, late, calls=0):
    """Compare what is held; log calls may take what they are kept in."""
    more = {"kernel: bytes": calls * CALL_BYTES}
    grown = {name: (early[name], late[name]) for name in early if late[name] - more.get(name, 0) > GROWTH * early[name]}
    assert not grown, "held early, and late"


def test_what_a_kernel_holds_does_not_grow_with_the_launches(notebook):
    for number in range(1, LAUNCHES + 1):
        cell = notebook.run(
            "run = labkit.launch(train, on=session)", watched=True, metadata={"cellId": f"cell-{number}"}
        )
        assert cell.charts() or number > 1, "drawn"
        del notebook.ever_shown[:], notebook.comm_messages[:]
        if number == LAUNCHES // 10:
            early = held(notebook)
    late = held(notebook)
    assert_not_grown(early, late)
    assert late["kernel: comms"] == 0, "every widget is closed"


def test_a_run_that_logs_for_long_takes_the_memory_of_its_calls_and_no_more(notebook):
    launch = f"run = labkit.launch(log, {CALLS // 2}, {CALLS_S}, on=session, wait=False)"
    notebook.run(launch, watched=True, metadata={"cellId": "cell"})

    def calls():
        return notebook.value("[run.progress(rank)[0].steps for rank in range(2)]")

    while sum(calls()) < CALLS / 10:
        listen(notebook, 1)
    early, calls_early = held(notebook), sum(calls())
    while "running" in notebook.value("run.states"):
        listen(notebook, 10)
    late = held(notebook)
    assert calls() == [CALLS // 2] * 2, "none is lost"
    assert notebook.value("run.results") == [0, 1]
    assert_not_grown(early, late, calls=CALLS - calls_early)


def listen(notebook, seconds):
    """Take what the kernel publishes, as a front end does."""
    until_s = time.monotonic() + seconds
    notebook.listen_until(lambda: time.monotonic() > until_s)
    del notebook.ever_shown[:], notebook.comm_messages[:]
