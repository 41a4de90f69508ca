"""What a rank says that its main thread waits for. In one fresh process, which has no threads but its own."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint.filesystem
import torch.distributed.distributed_c10d

from labkit.rank import recorder, waiting
from labkit.rank.recorder import Collectives
from labkit.system.linux import SLEEP

IF_SLEEP_IS_TOLD = pytest.mark.skipif(platform.machine() not in SLEEP, reason="the system does not tell")

SCRIPT = """
import json, os, queue, threading, time
from labkit.rank.waiting import look

found = {}


def case(name, wait, wake, thread="labkit-test"):
    '''Have a thread look twice at the main one while that waits, and wake it.'''
    def looks():
        answers = []
        while len(answers) < 2 or (answers[-2].what, answers[-2].at) != (answers[-1].what, answers[-1].at):
            time.sleep(0.1)  # the main thread may not be there yet
            answers.append(look(3))
        found[name] = answers[-2:]
        wake()
    looking = threading.Thread(target=looks, name=thread)
    looking.start()
    wait()
    looking.join()


event = threading.Event()
case("event", event.wait, event.set)
event = threading.Event()
case("event that a thread may set", event.wait, event.set, thread="mine")
event = threading.Event()
case("event for a time", lambda: event.wait(60), event.set)
words = queue.Queue()
case("queue", words.get, lambda: words.put(1))
read, write = os.pipe()
case("pipe", lambda: os.read(read, 1), lambda: os.write(write, b"x"))
case("sleep", lambda: time.sleep(2), lambda: None)
done = []
case("work", lambda: [sum(range(100)) for _ in iter(lambda: bool(done), True)], lambda: done.append(1))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("event", "nobody"),
        ("event that a thread may set", ""),
        ("event for a time", ""),
        ("queue", "nobody"),
        ("pipe", ""),
        pytest.param(
            "sleep",
            "time",
            marks=pytest.mark.skipif(platform.machine() not in SLEEP, reason="the system does not tell"),
        ),
        ("work", ""),
    ],
)
def test_a_rank_knows_a_wait_without_end_from_others(found, case, what):
    for rank, said, _, left_s, used_s, *_ in found[case]:
        assert (rank, said) == (3, what)
        assert used_s > 0
        assert 0 < left_s <= 2 if what == "time" else left_s == 0
    (_, _, at, *_), (_, _, later, *_) = found[case]
    assert not what or at == later, "the same wait"


@pytest.mark.parametrize(
    ("module", "uses_gpu", "waits"),
    [
        (torch.distributed.distributed_c10d, False, True),
        (torch.nn.parallel.distributed, False, True),
        (torch.autograd.graph, False, True),
        (torch.distributed.distributed_c10d, True, True),
        (torch.autograd.graph, True, False),  # perhaps for its own kernels
        (torch.distributed.checkpoint.filesystem, False, False),
        (torch.nn.functional, False, False),
        (subprocess, False, False),
    ],
)
def test_a_collective_is_known_by_where_the_main_thread_stands(module, uses_gpu, waits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_gpu)
    frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=module.__file__))
    assert waiting._in_a_collective(frame) == waits


WORLD, PAIR = ("0", "default_pg", (0, 1, 2)), ("1", "undefined", (0, 1))


@pytest.mark.parametrize(
    ("said", "pending", "reached"),
    [
        (
            Collectives(0, (("0", 1, "barrier", (), "", True), ("0", 2, "barrier", (), "", False)), (WORLD, PAIR)),
            (("0", 2, (0, 1, 2)),),
            (("0", 2), ("1", 0)),
        ),
        (Collectives(0, (), (WORLD,), unknown="no recorder"), (), ()),
        (Collectives(0, (), (WORLD,), transfer=("recv", 1, (4,), "float32")), (), ()),
    ],
)
def test_a_rank_that_has_used_a_gpu_says_which_collectives_it_is_in(said, pending, reached, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(recorder, "look", lambda rank: said)
    answer = waiting.look(0)
    assert (answer.pending, answer.reached) == (pending, reached)
