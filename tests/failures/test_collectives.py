"""Which collective ranks missed each other in, from calls written by hand; the last part has real ranks."""

from __future__ import annotations

import ctypes
import errno
import time

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.failures.missed import SILENT, Call, Comparison, RankCalls, content, find
from labkit.rank import recorder
from labkit.rank.recorder import Collectives
from labkit.system import host
from tests.conftest import wait_for_step
from tests.support import hangs, transports, workloads
from tests.support.tiers import few

SESSION_RANKS = 3

WORLD = ("0", "default_pg", (0, 1, 2))
HALF = ("1", "undefined", (1, 2))
OTHER = ("2", "metrics", (0, 1, 2))


def call(number, kind="all_reduce", shape=(1,), dtype="float32", done=True, group="0"):
    return (group, number, kind, () if kind == "barrier" else (shape,), dtype, done)


def pending(number, kind="all_reduce", **rest):
    return call(number, kind, done=False, **rest)


def rank(number, *calls, doing="is in f at Cell In[3], line 9", place="Cell In[3], line 14", **said):
    return RankCalls(number, Collectives(number, calls, (WORLD, HALF, OTHER), **said), place, doing)


def silent(number, doing="did not answer"):
    return RankCalls(number, Collectives(number, unknown=SILENT), "", doing)


def waits(number, *calls, **rest):
    return rank(number, *calls, doing="waits in all_reduce at Cell In[3], line 14", **rest)


BIG = pending(412, shape=(1024, 1024))
CASES = {
    "one has not come": (
        [waits(0, BIG), rank(1, call(411, "broadcast")), waits(2, BIG)],
        [1],
        "rank 1 has not entered all_reduce #412 (float32 [1024, 1024]); ranks 0 and 2 wait in it at "
        "Cell In[3], line 14; rank 1 is in f at Cell In[3], line 9 (last entered: broadcast #411)",
    ),
    "two have not come": (
        [waits(0, pending(5)), rank(1, call(4)), rank(2, call(3, "barrier"))],
        [1, 2],
        "ranks 1 and 2 have not entered all_reduce #5 (float32 [1]); rank 0 waits in it at Cell In[3], line 14; "
        "rank 1 is in f at Cell In[3], line 9 (last entered: all_reduce #4); "
        "rank 2 is in f at Cell In[3], line 9 (last entered: barrier #3)",
    ),
    "an asynchronous one is missed": (
        [waits(0, call(2), pending(3), pending(4)), rank(1, call(2)), waits(2, call(2), pending(3), pending(4))],
        [1],
        "rank 1 has not entered all_reduce #3 (float32 [1]); ranks 0 and 2 wait in it at Cell In[3], line 14; "
        "rank 1 is in f at Cell In[3], line 9 (last entered: all_reduce #2)",
    ),
    "kind against kind": (
        [waits(0, call(1), pending(2)), waits(1, call(1), pending(2, "barrier")), waits(2, call(1), pending(2))],
        [1],
        "ranks met in different collectives, call #2 of the default group: "
        "rank 1 is in barrier #2 at Cell In[3], line 14; "
        "ranks 0 and 2 are in all_reduce #2 (float32 [1]) at Cell In[3], line 14",
    ),
    "shape against shape": (
        [waits(0, pending(7)), waits(1, pending(7, shape=(20,))), waits(2, pending(7))],
        [1],
        "ranks met in all_reduce with tensors of different sizes or types, call #7 of the default group: "
        "rank 1 is in all_reduce #7 (float32 [20]) at Cell In[3], line 14; "
        "ranks 0 and 2 are in all_reduce #7 (float32 [1]) at Cell In[3], line 14",
    ),
    "type against type": (
        [waits(0, pending(7)), waits(1, pending(7, dtype="float64")), waits(2, pending(7))],
        [1],
        "ranks met in all_reduce with tensors of different sizes or types, call #7 of the default group: "
        "rank 1 is in all_reduce #7 (float64 [1]) at Cell In[3], line 14; "
        "ranks 0 and 2 are in all_reduce #7 (float32 [1]) at Cell In[3], line 14",
    ),
    "order against order": (
        [waits(0, pending(1), pending(2, "broadcast")), waits(1, pending(1, "broadcast"), pending(2))],
        [],
        "ranks met in different collectives, call #1 of the default group: rank 0 is in all_reduce #1 "
        "(float32 [1]) at Cell In[3], line 14; rank 1 is in broadcast #1 (float32 [1]) at Cell In[3], line 14",
    ),
    "two groups in different orders": (
        [waits(0, call(8), pending(9)), waits(1, call(8), pending(1, group="2")), waits(2, call(8), pending(9))],
        [1],
        "rank 1 has not entered all_reduce #9 (float32 [1]); ranks 0 and 2 wait in it at Cell In[3], line 14; "
        "rank 1 waits in all_reduce at Cell In[3], line 14 (last entered: all_reduce #8); "
        "and ranks 0 and 2 have not entered all_reduce #1 (float32 [1], group 'metrics'); rank 1 waits in it at "
        "Cell In[3], line 14; rank 0 waits in all_reduce at Cell In[3], line 14 (last entered: none); "
        "rank 2 waits in all_reduce at Cell In[3], line 14 (last entered: none); "
        "use groups in the same order on every rank",
    ),
    "two groups, and the rank that keeps both waiting is in no call": (
        [
            waits(0, pending(4)),
            waits(1, call(3), pending(1, group="1")),
            rank(2, call(3)),
        ],
        [2],
        "ranks 1 and 2 have not entered all_reduce #4 (float32 [1]); rank 0 waits in it at Cell In[3], line 14; "
        "rank 1 waits in all_reduce at Cell In[3], line 14 (last entered: all_reduce #3); "
        "rank 2 is in f at Cell In[3], line 9 (last entered: all_reduce #3); "
        "and rank 2 has not entered all_reduce #1 (float32 [1], group of ranks 1 and 2); rank 1 waits in it at "
        "Cell In[3], line 14; rank 2 is in f at Cell In[3], line 9 (last entered: none)",
    ),
    "a ring of receivers": (
        [rank(r, transfer=("recv", (r + 1) % 3, (4,), "float32")) for r in range(3)],
        [],
        "ranks 0, 1 and 2 wait for each other: rank 0 waits in recv (float32 [4], from rank 1) at Cell In[3], line 14; "
        "rank 1 waits in recv (float32 [4], from rank 2) at Cell In[3], line 14; "
        "rank 2 waits in recv (float32 [4], from rank 0) at Cell In[3], line 14",
    ),
    "one sends to who does not receive": (
        [rank(0, transfer=("send", 2, (4,), "int64")), rank(1), rank(2)],
        [2],
        "rank 0 waits in send (int64 [4], to rank 2) at Cell In[3], line 14; rank 2 is in f at Cell In[3], line 9",
    ),
    "one receives while the other is in a collective": (
        [rank(0, call(1), transfer=("recv", 1, (4,), "int64")), waits(1, pending(2)), waits(2, pending(2))],
        [0],
        "rank 0 has not entered all_reduce #2 (float32 [1]); ranks 1 and 2 wait in it at Cell In[3], line 14; "
        "rank 0 waits in recv (int64 [4], from rank 1) at Cell In[3], line 14 (last entered: all_reduce #1)",
    ),
    "one does not answer": (
        [waits(0, pending(2)), silent(1), waits(2, pending(2))],
        [1],
        "ranks 0 and 2 are in all_reduce #2 (float32 [1]) at Cell In[3], line 14; rank 1 did not answer",
    ),
    "all have come": (
        [waits(0, pending(2)), waits(1, pending(2)), waits(2, pending(2))],
        [],
        "ranks 0, 1 and 2 are in all_reduce #2 (float32 [1]) at Cell In[3], line 14; every rank of the "
        "group has entered it: the communication itself does not finish",
    ),
    "nobody waits": ([rank(0, call(3)), rank(1, call(2)), rank(2, call(2))], [], ""),
}


@pytest.mark.parametrize(("ranks", "blamed", "text"), CASES.values(), ids=CASES)
def test_it_says_which_call_ranks_missed_each_other_in_and_who_stands_apart(ranks, blamed, text):
    found = find(ranks)
    assert found.text == text
    assert found.blamed == blamed


def test_only_ranks_that_wait_or_are_waited_for_may_be_to_blame():
    returned = silent(0, "has returned")
    in_a_group = [waits(r, pending(2, group="1")) for r in (1, 2)]
    receiving = [rank(r, transfer=("recv", 3 - r, (1,), "float32")) for r in (1, 2)]
    for others in (in_a_group, receiving):
        assert sorted(find([returned, *others]).concerned) == [1, 2]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([rank(0), silent(1)], "rank 1 called is not known: it did not answer (its process is stopped, or native code"),
        ([rank(0), silent(1, "has returned")], ""),
        ([rank(0), rank(1, doing="has returned", unknown=recorder.RETURNED)], ""),  # and said its groups
        ([rank(0), silent(1, "is still starting")], ""),
        (
            [rank(number, unknown="PyTorch 2.11 records no calls of gloo") for number in (0, 1)],
            "Which collectives ranks 0 and 1 called is not known: PyTorch 2.11 records no calls of gloo.",
        ),
    ],
)
def test_it_says_what_could_not_be_known(ranks, said):
    unknown = find(ranks).unknown
    assert said in unknown
    assert bool(said) == bool(unknown)


def test_where_a_rank_brings_nothing_by_right_sizes_are_not_compared():
    ranks = [rank(0, pending(1, "scatter", shape=(6,))), rank(1, pending(1, "scatter", shape=(0,)))]
    assert Comparison(ranks).difference() is None


@pytest.mark.parametrize(
    ("shapes", "dtype", "words"),
    [
        (((2**20,), (2**20,)), "float32", "2 tensors, float32 [1048576] the first"),
        ((), "", ""),
    ],
)
def test_tensors_are_said_in_words(shapes, dtype, words):
    assert content(shapes, dtype) == words


# Reading the recorder


ENTRY = {
    "process_group": ["0", "default_pg"],
    "collective_seq_id": 3,
    "profiling_name": "gloo:all_reduce",
    "input_sizes": [[3, 5]],
    "input_dtypes": ["Float"],
    "state": "scheduled",
    "retired": False,
}


@pytest.mark.parametrize(
    ("changed", "read"),
    [
        ({}, Call("0", 3, "all_reduce", ((3, 5),), "float32", False)),
        ({"retired": True}, Call("0", 3, "all_reduce", ((3, 5),), "float32", True)),
        (
            {"profiling_name": "nccl:_all_gather_base", "state": "completed", "input_dtypes": ["BFloat16"]},
            Call("0", 3, "all_gather_base", ((3, 5),), "bfloat16", True),
        ),
        (
            {"profiling_name": "gloo:barrier", "input_sizes": [], "input_dtypes": []},
            Call("0", 3, "barrier", (), "", False),
        ),
    ],
)
def test_an_entry_of_the_recorder_is_read_whichever_backend_made_it(changed, read):
    assert recorder._call(ENTRY | changed) == read


def test_without_a_process_group_nothing_is_known():
    assert recorder.look(1) == Collectives(1, unknown="it is in no process group")


def alone(body):
    """Call `body` as the one rank of a group in this process."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return body()
    finally:
        dist.destroy_process_group()


needs_recorder = pytest.mark.skipif(not hangs.is_recorded(), reason="only PyTorch 2.15 or newer records calls of gloo")


@needs_recorder
def test_the_recorder_tells_kind_number_shape_type_and_group():
    def calls():
        recorder.forget()
        dist.all_reduce(torch.ones(3, 5))
        dist.barrier()
        dist.broadcast(torch.ones(2, dtype=torch.long), 0, group=dist.new_group([0], group_desc="mine"))
        return recorder.look(0)

    said = alone(calls)
    assert said.unknown == ""
    assert [Call(*each)[:5] for each in said.calls] == [
        ("0", 1, "all_reduce", ((3, 5),), "float32"),
        ("0", 2, "barrier", (), ""),
        ("1", 1, "broadcast", ((2,),), "int64"),
    ]
    assert said.groups == (("0", "default_pg", (0,)), ("1", "mine", (0,)))
    assert alone(lambda: recorder.forget() or recorder.look(0)).calls == (), "what was forgotten is gone"


def test_where_this_pytorch_has_no_recorder_the_reason_is_said(monkeypatch):
    def older(**_):
        raise TypeError("unexpected keyword argument 'backend'")

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", older, raising=False)
    assert alone(lambda: recorder.look(0)).unknown == f"PyTorch {torch.__version__} records no calls of gloo"


# With real ranks


@needs_recorder
@pytest.mark.spawns
@pytest.mark.parametrize(
    "row",
    few(hangs.ROWS, lambda row: row not in ("another size, compared in detail", "a monitored barrier")),
)
def test_a_planted_hang_is_told_with_its_rank_its_collective_and_its_number(row, ranks):
    error = hangs.report(row, 3, odd=2, before=7, on=ranks)
    assert hangs.is_right(row, 2, 7, error), str(error)


@needs_recorder
@pytest.mark.spawns
@pytest.mark.parametrize("row", hangs.UNNOTICED)
def test_where_the_transport_tells_nobody_that_a_rank_has_gone_labkit_does(row, ranks):
    with transports.holding() as path:
        error = hangs.report(row, 3, odd=2, before=7, on=ranks, path=path)
    assert hangs.is_right(row, 2, 7, error), str(error)


def asked_when_a_call_has_failed(worker):
    """Be asked for stacks between a system call that fails and the look why it did."""
    system = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(errno.ENOENT)
    getattr(system, "raise")(host.stacks_signal)
    return ctypes.get_errno()


@pytest.mark.spawns
def test_a_question_for_stacks_leaves_the_reason_alone_why_a_call_has_failed(ranks):
    """Else what looks for a file that is not there gets "OSError: [Errno 0] Error" now and then, and fails."""
    assert labkit.launch(asked_when_a_call_has_failed, on=ranks, live=False).results == [errno.ENOENT] * 3


@pytest.mark.wide
@pytest.mark.spawns
def test_ranks_that_are_asked_again_and_again_live(ranks):
    """While a thread reads the recorder a signal has the main thread's stack written: only that one's."""
    run = labkit.launch(workloads.go_astray, "sleeps", world_size=3, on=ranks, wait=False, live=False, backend="gloo")
    wait_for_step(run, 0)
    for _ in range(1000):  # of all threads' stacks, one in some hundreds crashed a rank
        run.engine.ask_for_stacks()
        time.sleep(0.002)
    assert not run.over.is_set(), str(run.error)
    run.stop(0)
