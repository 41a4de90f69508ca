import re
import signal
import sysconfig
from dataclasses import replace

import pytest

from labkit.failures.diagnosis import diagnose_hang
from labkit.failures.exit_codes import in_words
from labkit.failures.facts import RankFacts
from labkit.failures.first_to_fail import diagnose
from labkit.failures.grouping import rank_list
from labkit.failures.missed import Missed
from labkit.failures.stacks import Frame, RankStack, Stacks
from labkit.protocol.events import Failure
from labkit.protocol.job import Cell

CLOSED = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


REFUSED = "<urlopen error [Errno 111] Connection refused>"
STDLIB, SITE = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")

DIFFER = "RuntimeError: Detected mismatch between collectives on ranks. "


def running(size):
    """How PyTorch describes a collective on a tensor of some size."""
    return f"is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=ALLGATHER, TensorShape=[{size}], "


def raised(rank, time_s, summary="ValueError: bad batch", during="running", **facts):
    """A rank that reported an exception and then ended its process."""
    failure = Failure(rank, time_s, during, summary, f"Traceback of rank {rank}\n{summary}\n")
    return RankFacts(rank, failure=failure, **{"exit_code": 1, "exit_s": time_s + 0.1, **facts})


def lost(rank, time_s, summary=CLOSED):
    return raised(rank, time_s, summary)


def died(rank, exit_s, code, **facts):
    """A rank whose process ended without a report."""
    return RankFacts(rank, exit_code=int(code), exit_s=exit_s, **facts)


def failed_in(rank, time_s, summary, *files):
    """A rank whose exception was raised in the first of these files, which the next one called."""
    facts = raised(rank, time_s, summary)
    frames = tuple((file, 1, "called") for file in (*files, "/home/me/train.py"))
    return replace(facts, failure=facts.failure._replace(frames=frames))


def returned(rank, exit_s=1.0):
    return RankFacts(rank, returned=True, exit_code=0, exit_s=exit_s)


def ended(rank, exit_s=2.0):
    return RankFacts(rank, exit_code=-signal.SIGKILL, exit_s=exit_s, ended_by_us=True)


SCENARIOS = {
    "an exception, whose victim reports earlier": ([lost(0, 0.9), raised(1, 1.0)], 1, "failed: ValueError: bad batch"),
    "an exception before the function": (
        [ended(0), raised(1, 0.1, "ImportError: no x", during="receiving the function")],
        1,
        "failed while receiving the function: ImportError: no x",
    ),
    "an exception after some steps": ([ended(0), raised(1, 1.0, last_step=7)], 1, r"\(after logging step 7\)"),
    # Death is seen later than it happens, so the victim may well report first.
    "SIGKILL, whose victim reports earlier": ([lost(0, 0.2), died(1, 1.0, -signal.SIGKILL)], 1, r"\(SIGKILL\)"),
    "SIGKILL, while others may have run out of memory": (
        [lost(0, 1.1), died(1, 1.0, -signal.SIGKILL, out_of_memory="perhaps")],
        1,
        r"was killed \(SIGKILL\), perhaps because the system was out of memory",
    ),
    "SIGSEGV": ([died(0, 1.0, -signal.SIGSEGV), lost(1, 1.0), lost(2, 0.9)], 0, r"\(SIGSEGV\)"),
    "os._exit(3)": ([lost(0, 1.1), died(1, 1.0, 3, last_step=4)], 1, "exit code 3.*, after logging step 4"),
    "two exceptions, after which a third rank lost both": ([lost(0, 0.9), raised(1, 1.1), raised(2, 1.0)], 2, "bad"),
    "two silent deaths": ([died(0, 1.1, -signal.SIGKILL), died(1, 1.0, 3)], 1, "exit code 3"),
    "an exception well before a silent death": ([raised(0, 1.0), died(1, 2.0, -signal.SIGABRT)], 0, "bad batch"),
    "an exception just before a death was seen": ([raised(0, 1.0), died(1, 1.1, -signal.SIGKILL)], 1, "SIGKILL"),
    "a rank that returned early": (
        [returned(0), lost(1, 1.1)],
        0,
        "rank 0 returned while rank 1 was still in a collective with it: every rank must take part",
    ),
    "collectives that PyTorch compared before": (
        [
            raised(rank, 1 + rank, f"{DIFFER}Rank {rank} {running(own)}, but Rank {other} {running(its)}Tensor")
            for rank, own, other, its in [(0, 64, 1, 20), (1, 20, 0, 64), (2, 64, 1, 20)]
        ],
        1,
        re.escape(
            "ranks met in different collectives: rank 1 in ALLGATHER #1 of shape [20]; ranks 0 and 2 in ALLGATHER #1 of"
        ),
    ),
    "a rank that did not come to a monitored barrier": (
        [
            raised(0, 1.0, "RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 1500 ms"),
            raised(1, 0.9, "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while"),
            ended(2),
            ended(3),
        ],
        2,
        "rank 2 did not come to monitored_barrier within 1.5 s",
    ),
    "a network error of the reader's own, beside a rank that returned": (
        [failed_in(0, 1.1, f"urllib.error.URLError: {REFUSED}", f"{STDLIB}/urllib/request.py"), returned(1)],
        0,
        "rank 0 failed: urllib.error.URLError",
    ),
    "another library's error in the same words and of the same type": (
        [failed_in(0, 1.1, f"RuntimeError: {REFUSED}", f"{SITE}/database/client.py"), returned(1)],
        0,
        "rank 0 failed: RuntimeError",
    ),
    "a lost connection in torch": (
        [failed_in(0, 1.1, CLOSED, f"{SITE}/torch/distributed/distributed_c10d.py"), returned(1)],
        1,
        "rank 1 returned while rank 0 was still in a collective",
    ),
    "lost connections and nothing else": ([lost(0, 1.1), lost(1, 1.0)], 1, "rank 1 failed.*Connection closed by peer"),
}


@pytest.mark.parametrize(("ranks", "culprit", "said"), SCENARIOS.values(), ids=SCENARIOS)
def test_the_headline_names_the_rank_that_failed_first_and_how(ranks, culprit, said):
    diagnosis = diagnose(ranks)
    assert diagnosis.rank == culprit
    assert re.search(rf"ranks? {culprit} ", diagnosis.headline)
    assert re.search(said, diagnosis.headline)
    assert "\n" not in diagnosis.headline
    assert len(diagnosis.others) == len(ranks) - 1


LAST = {"output_end": "loading\nheap corrupted\n"}
WITHOUT_A_TRACEBACK = {
    "SIGKILL": (-signal.SIGKILL, LAST, ["ended with SIGKILL; no Python exception"]),
    "SIGKILL, and its peak was seen": (-signal.SIGKILL, {**LAST, "peak_bytes": 2**29}, ["peak at 0.50 GiB"]),
    "SIGKILL, while others may have run out of memory": (
        -signal.SIGKILL,
        {**LAST, "out_of_memory": "perhaps"},
        ["it may have killed another process: dmesg names it"],
    ),
    "os._exit(3), and its peak was seen": (3, {**LAST, "peak_bytes": 2**29}, ["ended with exit code 3"]),
}


@pytest.mark.parametrize(("code", "facts", "said"), WITHOUT_A_TRACEBACK.values(), ids=WITHOUT_A_TRACEBACK)
def test_without_a_traceback_the_cause_says_what_is_known(code, facts, said):
    cause = diagnose([lost(0, 1.1), died(1, 1.0, code, **facts)]).cause
    assert [words for words in said if words not in cause] == []
    assert ("peak" in cause) == ("peak_bytes" in facts and code == -signal.SIGKILL)
    assert cause.endswith("Its last output:\nloading\nheap corrupted")


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (returned(0), "rank 0 had returned; its result is kept"),
        (lost(0, 1.1), "rank 0 lost its connection as a consequence (RuntimeError: Connection closed by peer"),
        (raised(0, 1.234, "KeyError: 'x'"), "rank 0 failed too, 1.23 s after the launch: KeyError: 'x'"),
        (ended(0), "rank 0 was still running and was ended"),
        (died(0, 1.5, -signal.SIGTERM), "rank 0 died too (SIGTERM)"),
        (RankFacts(0), "rank 0 was still running when the run ended"),
    ],
)
def test_the_others_lines_say_what_became_of_them(other, line):
    (said,) = diagnose([other, died(1, 1.0, 3)]).others
    assert said.startswith(line)


@pytest.mark.parametrize(
    "summary",
    [
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:40000",
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:526] Read error [127.0.0.1]:40000: Connection reset by peer",
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:433] writev [127.0.0.1]:40000: Broken pipe",
        "RuntimeError: Gloo connectFullMesh failed with [/x/pair.cc:144] no error, SO_ERROR: Connection refused",
        "RuntimeError: [/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to end",
        "RuntimeError: [/x/gloo/transport/tcp/unbound_buffer.cc:136] Timed out waiting 1000ms for send operation",
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: BrokenPipeError: Broken pipe",  # and not Python's own
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
    ],
)
def test_however_a_library_says_that_a_peer_is_gone_it_is_a_consequence(summary):
    diagnosis = diagnose([lost(0, 0.5, summary), raised(1, 1.0)])
    assert diagnosis.rank == 1
    assert re.match("rank 0 (lost its connection|gave up waiting) as a consequence", diagnosis.others[0])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "SIGKILL"),
        (-200, "signal 200"),
        (128, "exit code 128"),
        (137, "exit code 137: SIGKILL, as a shell says it"),
        (255, "exit code 255"),
    ],
)
def test_exit_codes_are_said_in_words(code, words):
    assert in_words(code) == words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1], "rank 1"),
        ([0, 2], "ranks 0 and 2"),
        (range(16), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 15"),
        (range(20), "20 ranks (0–19)"),
        ([*range(1023), 1025], "1,024 ranks (0–1022, 1025)"),
        (range(0, 40, 2), "20 ranks (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, …)"),
    ],
)
def test_several_ranks_are_said_as_a_list_and_many_in_spans(ranks, words):
    assert rank_list(list(ranks)) == words


# Where ranks stood

CELL, DISTRIBUTED = "/tmp/ipykernel_77/1.py", "/usr/lib/python3/torch/distributed/distributed_c10d.py"
TITLED = {CELL: Cell("Cell In[3]", "dist.all_reduce(a)\ndist.barrier()\ntime.sleep(9)\n")}


def at(rank, line, deeper=()):
    return RankStack(rank, [*(Frame(DISTRIBUTED, 1, name) for name in deeper), Frame(CELL, line, "train")], TITLED)


def reduces(rank):
    return at(rank, 1, ["all_reduce"])


def meets(rank):
    return at(rank, 2, ["barrier"])


GLOO_SIZES = "RuntimeError: [/x/gloo/gloo/allreduce.cc:30] Data size doesn't match expected size. 4 vs 8"
GLOO_ABORT = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n op.preamble.length <= op.nbytes"
MISMATCHES = {
    "one of three is elsewhere": (
        [
            lost(0, 1.0),
            raised(1, 1.1, GLOO_SIZES, stack=meets(1)),
            raised(2, 1.2, CLOSED, stack=reduces(2)),
            raised(3, 1.3, CLOSED, stack=reduces(3)),
        ],
        1,
        "ranks met in different collectives: rank 1 waits in barrier at Cell In[3], line 2; "
        "ranks 2 and 3 wait in all_reduce at Cell In[3], line 1",
    ),
    "the one that is elsewhere is not the one that noticed": (
        [
            raised(0, 1.0, GLOO_SIZES, stack=reduces(0)),
            raised(1, 1.1, CLOSED, stack=meets(1)),
            raised(2, 1.2, CLOSED, stack=reduces(2)),
        ],
        1,
        "ranks met in different collectives: rank 1 waits in barrier at Cell In[3], line 2; "
        "ranks 0 and 2 wait in all_reduce at Cell In[3], line 1",
    ),
    "an abort in native code, which has left where it was": (
        [
            raised(0, 1.0, CLOSED, stack=meets(0)),
            died(1, 1.1, -signal.SIGABRT, output_end=GLOO_ABORT, stack=reduces(1)),
        ],
        1,
        "ranks met in different collectives: rank 0 waits in barrier at Cell In[3], line 2; "
        "rank 1 waits in all_reduce at Cell In[3], line 1",
    ),
    "the same line, other sizes, and one that has not come yet": (
        [
            raised(0, 1.0, CLOSED, stack=reduces(0)),
            died(1, 1.1, -signal.SIGABRT, output_end=GLOO_ABORT, stack=reduces(1)),
            raised(2, 1.2, CLOSED, stack=RankStack(2, [Frame("<library>", 1, "join")], TITLED)),
        ],
        1,
        "ranks met in all_reduce at Cell In[3], line 1 with tensors of different sizes; rank 1 noticed",
    ),
    "no rank's place is known": (
        [lost(0, 1.0), raised(1, 1.1, GLOO_SIZES)],
        1,
        "ranks met in a collective with tensors of different sizes; rank 1 noticed",
    ),
}


@pytest.mark.parametrize(("ranks", "culprit", "headline"), MISMATCHES.values(), ids=MISMATCHES)
def test_ranks_that_met_in_different_collectives_are_told_apart(ranks, culprit, headline):
    diagnosis = diagnose(ranks)
    assert diagnosis.rank == culprit
    assert diagnosis.headline == headline
    assert [line.split()[1] for line in diagnosis.others] == [str(r.rank) for r in ranks if r.rank != culprit]


@pytest.mark.parametrize(
    "summary",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "EOFError: Socket closed",
    ],
)
def test_pythons_own_errors_of_a_connection_concern_another_one_and_are_no_consequence(summary):
    """A DataLoader's, say, whose worker died; the ranks' own connections are not Python's."""
    diagnosis = diagnose([lost(0, 0.9), raised(1, 1.0, summary)])
    assert diagnosis.rank == 1
    assert diagnosis.headline == f"rank 1 failed: {summary}"


# Hangs


def test_a_hang_in_which_no_rank_stands_apart_is_blamed_on_the_first_to_fall_silent():
    diagnosis = diagnose_hang(Stacks([reduces(0), meets(1)]), silent_s=60, first_silent=1)
    assert diagnosis.rank == 1
    assert "60 s (stall_s): rank 0 waits in all_reduce" in diagnosis.headline
    assert diagnosis.cause.startswith("No rank stood apart; rank 1 was the first to fall silent.")
    assert diagnosis.others == ["rank 0 waits in all_reduce at Cell In[3], line 1"]


def test_a_hang_of_some_is_blamed_on_none_of_the_others():
    stacks = Stacks([RankStack(0, [], TITLED, "has returned"), reduces(1), meets(2)])
    missed = Missed([], "ranks differ in call #3 of the group 'mesh_tp': …", concerned=(1, 2))
    diagnosis = diagnose_hang(stacks, silent_s=2, first_silent=0, missed=missed)
    assert diagnosis.rank == 1
    assert diagnosis.cause.startswith("The calls alone do not say which rank is wrong. Give a longer stall_s")


def test_a_hang_in_which_a_rank_did_not_answer_is_blamed_on_it():
    diagnosis = diagnose_hang(
        Stacks([reduces(0), RankStack(1, [], TITLED, "did not answer")]), silent_s=2, first_silent=0
    )
    assert diagnosis.rank == 1
    assert "rank 1 did not answer; rank 0 waits in all_reduce" in diagnosis.headline
