"""A notebook that is used for a day: what its kernel and its ranks hold does not grow with what has been run before.

In `make test-long`. LABKIT_SOAK_LAUNCHES makes it shorter, or longer.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.ui.test_kernel import Notebook

LAUNCHES = int(os.environ.get("LABKIT_SOAK_LAUNCHES", "1000"))
GROWTH = 1.1
"""What is held in the end may be so many times what was held after a tenth."""

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


def test_what_a_kernel_holds_does_not_grow_with_the_launches(notebook):
    for number in range(1, LAUNCHES + 1):
        cell = notebook.run(
            "run = labkit.launch(train, on=session)", watched=True, metadata={"cellId": f"cell-{number}"}
        )
        if number == 1:
            notebook.listen_until(cell.charts)
        del notebook.ever_shown[:], notebook.told[:]
        notebook.views.clear()
        if number == LAUNCHES // 10:
            early = held(notebook)
    late = held(notebook)
    assert {name: (early[name], late[name]) for name in early if late[name] > GROWTH * early[name]} == {}
    assert late["kernel: comms"] == 0, "every widget is closed"
