"""Where ranks stand, from dumps written by hand: no process is started."""

from __future__ import annotations

import site
import sysconfig
import textwrap
from pathlib import Path

import pytest

import labkit
from labkit.failures.stacks import Frame, RankStack, Stacks, is_complete, parse
from labkit.protocol.job import Cell
from labkit.protocol.modules import is_user_file

STDLIB, SITE = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
CELL = "/tmp/ipykernel_77/1234567890.py"
CELLS = {CELL: Cell("Cell In[3]", "")}

OTHER_THREADS = f"""\
Thread 0x00007f9639a3d6c0 (most recent call first):
  File "{STDLIB}/threading.py", line 324 in wait
  File "{SITE}/labkit/protocol/events.py", line 170 in _flush_the_rest
  File "{STDLIB}/threading.py", line 1002 in _bootstrap

Thread 0x00007f9639a3d6c1 (most recent call first):
  File "{STDLIB}/multiprocessing/connection.py", line 378 in _recv
  File "{STDLIB}/threading.py", line 1002 in _bootstrap

"""

MAIN_THREAD = f"""\
Thread 0x00007f963a682b80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3005 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "{CELL}", line 4 in train
  File "{SITE}/torch/multiprocessing/spawn.py", line 90 in _wrap
  File "<string>", line 1 in <module>
"""

ASKED = "Stack" + MAIN_THREAD[MAIN_THREAD.index(" (") :]
"""What a rank writes when it is asked where it stands."""

CRASH = f"""\
Segmentation fault

{OTHER_THREADS}Current thread 0x00007f963a682b80 (most recent call first):
  File "{STDLIB}/ctypes/__init__.py", line 519 in string_at
  File "{CELL}", line 2 in train
  File "<string>", line 1 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
  File "not a frame", line 1 in anything
"""

CRASH_OF_ANOTHER_THREAD = f"""\
Fatal Python error: Segmentation fault

Current thread 0x00007f9639a3d6c0 (most recent call first):
  File "{CELL}", line 7 in in_a_thread

{MAIN_THREAD}"""


# Reading a dump


def test_the_main_thread_is_read_most_recent_call_first():
    frames = parse(OTHER_THREADS + MAIN_THREAD)
    assert [frame.function for frame in frames] == ["all_reduce", "wrapper", "train", "_wrap", "<module>"]
    assert frames[2] == Frame(CELL, 4, "train")


def test_a_dump_of_the_main_thread_alone_is_read_as_one_of_all():
    assert parse(ASKED) == parse(ASKED, "current") == parse(MAIN_THREAD)


def test_of_a_crash_the_thread_that_crashed_is_read():
    assert [frame.function for frame in parse(CRASH, "current")] == ["string_at", "train", "<module>"]
    assert parse(CRASH_OF_ANOTHER_THREAD, "current") == [Frame(CELL, 7, "in_a_thread")]
    assert [frame.function for frame in parse(CRASH_OF_ANOTHER_THREAD)][0] == "all_reduce"


def test_what_another_thread_wrote_is_not_taken_for_the_main_threads():
    """A thread that takes SIGTERM, because the main thread is writing where it is, writes where it is itself."""
    anothers = "Stack" + OTHER_THREADS[OTHER_THREADS.index(" (") :].partition("\n\n")[0] + "\n"
    assert parse(anothers) == []
    assert parse(ASKED + anothers) == parse(anothers + ASKED) == parse(ASKED)
    assert parse(ASKED + ASKED[:-40]) == parse(ASKED), "the process was ended as it wrote this again"


def test_where_no_thread_is_called_current_the_main_one_is_read():
    assert parse(OTHER_THREADS + MAIN_THREAD, "current") == parse(MAIN_THREAD)


@pytest.mark.parametrize("text", ["", "Segmentation fault\n", "no dump at all\n  File \n"])
def test_what_is_no_dump_has_no_frames(text):
    assert parse(text) == []
    assert parse(text, "current") == []


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("", False),
        (OTHER_THREADS, False),
        (OTHER_THREADS + MAIN_THREAD, True),
        (ASKED, True),
        (ASKED[:-20], False),
        (OTHER_THREADS + MAIN_THREAD.rstrip("\n"), False),  # the end of the line may be on its way
        (OTHER_THREADS + MAIN_THREAD[:-20], False),
        (OTHER_THREADS + MAIN_THREAD.replace('  File "<string>", line 1 in <module>', "  ..."), True),  # a deep one
        (OTHER_THREADS.replace("_bootstrap", "<lambda>"), False),
    ],
)
def test_a_dump_is_complete_when_the_main_threads_last_frame_is_there(text, complete):
    assert is_complete(text) == complete


# One rank


LIBRARY, DISTRIBUTED = f"{SITE}/torch/library.py", f"{SITE}/torch/distributed/distributed_c10d.py"
AUTOGRAD = f"{SITE}/torch/autograd/graph.py"


def standing(source, line, deeper=(), rank=0, note="", outer=(), file=LIBRARY, **facts):
    """A rank at a line of a cell; `deeper` are the library functions called from there, most recent first."""
    frames = [Frame(file, 10 + i, function) for i, function in enumerate(deeper)]
    frames += [Frame(CELL, line, "train"), *outer, Frame(f"{SITE}/torch/multiprocessing/spawn.py", 90, "_wrap")]
    return RankStack(rank, frames, {CELL: Cell("Cell In[3]", source + "\n")}, note, **facts)


CALLS = {
    "a collective": ("def train(worker):\n    dist.all_reduce(total)", 2, ["all_reduce", "wrapper"], "dist.all_reduce"),
    "native code that has no frame": ("def train(worker):\n    time.sleep(9)", 2, [], "time.sleep"),
    "a call over several lines": ("dist.all_reduce(\n    total,\n)", 2, ["all_reduce", "wrapper"], "dist.all_reduce"),
    "an inner call": ("print(dist.all_gather(a, b))", 1, ["all_gather"], "dist.all_gather"),
    "a method": ("model(x).sum().backward()", 1, ["_engine_run_backward", "backward"], "model(x).sum().backward"),
    "no call": ("while True:\n    n = n + 1", 2, [], ""),
    "no call, but an operator that the library has": ("a = a + b", 1, ["matmul", "__add__"], "__add__"),
    "a cell with a magic": ("%matplotlib inline\ndist.barrier(group)", 2, ["barrier", "wrapper"], "dist.barrier"),
    "a source that is not known": ("", 9, ["all_reduce", "wrapper"], "all_reduce"),
    "a source shorter than the line": ("%matplotlib inline", 9, [], ""),
}


@pytest.mark.parametrize(("source", "line", "deeper", "call"), CALLS.values(), ids=CALLS)
def test_what_is_being_called_is_said_as_the_reader_wrote_it(source, line, deeper, call):
    assert standing(source, line, deeper).call == call


GPU, IN_CALL = {"device": "cuda:0"}, {"in_call": True}
WHETHER_IT_WAITS = [
    ("dist.all_reduce(a)", "all_reduce", DISTRIBUTED, {}, "waits in all_reduce"),
    ("dist.broadcast_object_list(a)", "broadcast_object_list", DISTRIBUTED, {}, "waits in broadcast_object_list"),
    ("worker.mean(a)", "mean", DISTRIBUTED, {}, "waits in mean"),
    ("work.wait()", "", "", {}, "waits in wait"),
    ("group.allreduce([a]); n += 1", "", "", {}, "waits in allreduce"),
    ("dcp.save(a)", "save", f"{SITE}/torch/distributed/checkpoint/filesystem.py", {}, "is in dcp.save"),
    ("functools.reduce(add, a)", "", "", {}, "is in functools.reduce"),
    ("torch.gather(a, 0, b)", "", "", {}, "is in torch.gather"),
    ("queue.wait()", "wait", f"{STDLIB}/threading.py", {}, "is in queue.wait"),
    ("loss.item()", "", "", {}, "is in loss.item"),
    ("loss.item()", "", "", GPU, "waits in item"),
    ("a.to('cpu')", "", "", {}, "is in a.to"),
    ("model.to(a)", "to", f"{SITE}/torch/nn/modules/module.py", GPU, "is in model.to"),
    ("torch.cuda.synchronize()", "synchronize", f"{SITE}/torch/cuda/__init__.py", GPU, "waits in torch.cuda.sync"),
    ("loss.backward()", "backward", AUTOGRAD, {}, "is in loss.backward"),
    ("loss.backward()", "backward", AUTOGRAD, GPU, "waits in backward"),
    ("loss.backward()", "backward", AUTOGRAD, IN_CALL, "waits in backward"),  # DDP's
    ("time.sleep(9)", "", "", IN_CALL, "is in time.sleep"),
    ("re.match(a, b)", "match", LIBRARY, {}, "is in re.match"),
    ("n += 1", "", "", {}, "is"),
]


@pytest.mark.parametrize(("call", "function", "file", "facts", "words"), WHETHER_IT_WAITS)
def test_a_rank_waits_only_in_torchs_own_collectives_or_for_a_gpu_that_it_has(call, function, file, facts, words):
    where = standing(call, 1, [function] if function else [], file=file, **facts)
    assert where.in_words.replace("in synchronize", "in torch.cuda.synchronize").startswith(words)
    assert where.in_words.endswith("at Cell In[3], line 1")
    assert where.waits_for_ranks == where.is_blocked == words.startswith("waits")


def test_the_cells_line_comes_before_that_of_a_file_called_from_it():
    frames = [
        Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 3005, "all_reduce"),
        Frame("/home/me/project/helpers.py", 12, "average"),
        Frame(CELL, 2, "train"),
    ]
    where = RankStack(1, frames, {CELL: Cell("Cell In[3]", "def train(worker):\n    average(model)\n")})
    assert where.place == "Cell In[3], line 2"
    assert where.call == "average"
    assert str(where).splitlines()[:2] == [
        "rank 1 waits in average at Cell In[3], line 2",
        "  helpers.py, line 12, in average",
    ]


def test_without_a_cell_the_place_is_the_first_file_that_is_not_a_librarys():
    frames = [
        Frame(f"{STDLIB}/threading.py", 320, "wait"),
        Frame("/home/me/project/helpers.py", 12, "average"),
        Frame("/home/me/project/train.py", 30, "train"),
    ]
    assert RankStack(0, frames, {}).place == "helpers.py, line 12"


PACKAGE = Path(labkit.__file__).parent


@pytest.mark.parametrize("folder", [STDLIB, SITE, site.getusersitepackages(), *site.getsitepackages(), PACKAGE])
def test_what_is_installed_for_one_user_or_by_the_system_is_a_library_too(folder):
    assert not is_user_file(f"{folder}/rank/worker.py", {})
    assert is_user_file(f"{Path.home()}/train.py", {})
    assert is_user_file(f"{PACKAGE}_utils.py", {}), "it only begins with labkit's name"


@pytest.mark.parametrize(
    ("frames", "note", "words"),
    [
        ([], "did not answer", "did not answer"),
        (
            [Frame(f"{STDLIB}/threading.py", 320, "wait"), Frame("<string>", 1, "<module>")],
            "",
            "is outside the function",
        ),
        ([Frame(f"{SITE}/torch/__init__.py", 1, "<module>")], "is still starting", "is still starting"),
    ],
)
def test_a_rank_that_is_not_in_the_function_says_so(frames, note, words):
    where = RankStack(2, frames, CELLS, note)
    assert where.in_words == words
    assert str(where).startswith(f"rank 2 {words}")
    assert not where.is_blocked


def test_in_full_the_readers_lines_come_first_and_then_where_in_the_library():
    source = "def reduce_all(a):\n    dist.all_reduce(a)\n\ndef train(worker):\n    reduce_all(total)"
    outer = [Frame(CELL, 5, "train")]
    where = standing(source, 2, ["all_reduce", "wrapper"], rank=1, outer=outer, file=DISTRIBUTED)
    assert str(where) == textwrap.dedent("""\
        rank 1 waits in all_reduce at Cell In[3], line 2
          Cell In[3], line 2, in train
            dist.all_reduce(a)
          Cell In[3], line 5, in train
            reduce_all(total)
          inside that, most recent first:
            distributed_c10d.py, line 10, in all_reduce
            distributed_c10d.py, line 11, in wrapper""")


# Several ranks


def waits(rank, call="all_reduce", line=1):
    return standing("\n" * (line - 1) + f"dist.{call}(a)", line, [call], rank, file=DISTRIBUTED)


def sleeps(rank):
    return standing("\n\ntime.sleep(9)", 3, [], rank)


def silent(rank):
    return RankStack(rank, [], CELLS, "did not answer")


def outside(rank):
    return RankStack(rank, [], CELLS)


AT = "at Cell In[3], line"
SEVERAL = {
    "one of three sleeps": (
        [waits(0), sleeps(1), waits(2)],
        [1],
        f"rank 1 is in time.sleep {AT} 3; ranks 0 and 2 wait in all_reduce {AT} 1",
    ),
    "two wait in different collectives": (
        [waits(0), waits(1, "barrier", 2)],
        [],
        f"rank 0 waits in all_reduce {AT} 1; rank 1 waits in barrier {AT} 2",
    ),
    "all do the same": ([waits(0), waits(1), waits(2)], [], f"ranks 0, 1 and 2 wait in all_reduce {AT} 1"),
    "one sleeps, one computes": (
        [sleeps(0), standing("n += 1", 1, rank=1)],
        [],
        f"rank 0 is in time.sleep {AT} 3; rank 1 is {AT} 1",
    ),
    "one did not answer": ([waits(0), silent(1)], [1], f"rank 1 did not answer; rank 0 waits in all_reduce {AT} 1"),
    "none answered": ([silent(0), silent(1)], [], "ranks 0 and 1 did not answer"),
    "of one nothing is known": (
        [outside(0), waits(1)],
        [],
        f"rank 0 is outside the function; rank 1 waits in all_reduce {AT} 1",
    ),
    "no rank": ([], [], ""),
}


@pytest.mark.parametrize(("ranks", "odd", "words"), SEVERAL.values(), ids=SEVERAL)
def test_the_odd_one_out_is_found_and_said_first(ranks, odd, words):
    stacks = Stacks(ranks)
    assert stacks.outliers == odd
    assert stacks.in_words == words


def test_in_full_the_odd_rank_comes_first():
    stacks = Stacks([waits(0), sleeps(1), waits(2)])
    heads = [line for line in str(stacks).splitlines()[1:] if line.startswith("rank")]
    assert heads == [f"rank 1 is in time.sleep {AT} 3", f"ranks 0 and 2 wait in all_reduce {AT} 1"]
    assert str(stacks).startswith(stacks.in_words + "\n\n")
    assert repr(stacks) == str(stacks)
