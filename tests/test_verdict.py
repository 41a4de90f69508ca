import re
import signal

import pytest

from labkit.records import Failure
from labkit.verdict import RankFacts, exit_in_words, judge, rank_list

CLOSED = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def raised(rank, time_s, summary="ValueError: bad batch", during="running", **facts):
    """A rank that reported an exception and then ended its process."""
    failure = Failure(rank, time_s, during, summary, f"Traceback of rank {rank}\n{summary}\n")
    return RankFacts(rank, failure=failure, **{"exit_code": 1, "exit_s": time_s + 0.1, **facts})


def lost(rank, time_s, summary=CLOSED):
    return raised(rank, time_s, summary)


def died(rank, exit_s, code, **facts):
    """A rank whose process ended without a report."""
    return RankFacts(rank, exit_code=int(code), exit_s=exit_s, **facts)


def returned(rank, exit_s=1.0):
    return RankFacts(rank, returned=True, exit_code=0, exit_s=exit_s)


def ended(rank, exit_s=2.0):
    return RankFacts(rank, exit_code=-signal.SIGKILL, exit_s=exit_s, ended_by_us=True)


SCENARIOS = {
    "an exception, whose victim reports later": ([lost(0, 1.2), raised(1, 1.0)], 1, "failed: ValueError: bad batch"),
    "an exception, whose victim reports earlier": ([lost(0, 0.9), raised(1, 1.0)], 1, "failed: ValueError: bad batch"),
    "an exception while the other was ended": ([raised(0, 1.0), ended(1, 0.5)], 0, "failed: ValueError: bad batch"),
    "an exception while the other still lives": ([RankFacts(0), raised(1, 1.0)], 1, "failed: ValueError: bad batch"),
    "an exception before the function": (
        [ended(0), raised(1, 0.1, "ImportError: no x", during="receiving the function")],
        1,
        "failed while receiving the function: ImportError: no x",
    ),
    "an exception after some steps": ([ended(0), raised(1, 1.0, last_step=7)], 1, r"\(after logging step 7\)"),
    "SIGKILL, whose victim reports later": ([lost(0, 1.1), died(1, 1.0, -signal.SIGKILL)], 1, r"died \(SIGKILL\)"),
    # Death is seen later than it happens, so the victim may well report first.
    "SIGKILL, whose victim reports earlier": ([lost(0, 0.2), died(1, 1.0, -signal.SIGKILL)], 1, r"died \(SIGKILL\)"),
    "SIGSEGV": ([died(0, 1.0, -signal.SIGSEGV), lost(1, 1.0), lost(2, 0.9)], 0, r"died \(SIGSEGV\)"),
    "SIGABRT": ([lost(0, 1.1), died(1, 1.0, -signal.SIGABRT), ended(2)], 1, r"died \(SIGABRT\)"),
    "os._exit(0)": ([lost(0, 1.1), died(1, 1.0, 0)], 1, r"died \(exit code 0\) and left no traceback"),
    "os._exit(3)": ([lost(0, 1.1), died(1, 1.0, 3, last_step=4)], 1, "exit code 3.*no traceback, after logging step 4"),
    "a silent death of the only rank": ([died(0, 1.0, -signal.SIGKILL)], 0, "left no traceback"),
    "two exceptions": ([raised(0, 1.01), raised(1, 1.0)], 1, "bad batch"),
    "two exceptions, after which a third rank lost both": ([lost(0, 0.9), raised(1, 1.1), raised(2, 1.0)], 2, "bad"),
    "two silent deaths": ([died(0, 1.1, -signal.SIGKILL), died(1, 1.0, 3)], 1, "exit code 3"),
    "an exception well before a silent death": ([raised(0, 1.0), died(1, 2.0, -signal.SIGABRT)], 0, "bad batch"),
    "an exception just before a death was seen": ([raised(0, 1.0), died(1, 1.1, -signal.SIGKILL)], 1, "SIGKILL"),
    "an exception after a silent death": ([raised(0, 3.0), died(1, 1.0, -signal.SIGKILL)], 1, "SIGKILL"),
    "a rank that returned early": (
        [returned(0), lost(1, 1.1)],
        1,
        "rank 0 returned while rank 1 was still in a collective with it: every rank must take part",
    ),
    "two ranks that returned early": (
        [returned(0), lost(1, 1.1), returned(2)],
        1,
        "ranks 0 and 2 returned while rank 1 was still in a collective with them",
    ),
    "an exception after another rank returned": ([returned(0), raised(1, 1.1)], 1, "rank 1 failed: ValueError"),
    "lost connections and nothing else": ([lost(0, 1.1), lost(1, 1.0)], 1, "rank 1 failed.*Connection closed by peer"),
}


@pytest.mark.parametrize(("ranks", "culprit", "said"), SCENARIOS.values(), ids=SCENARIOS)
def test_the_headline_names_the_rank_that_failed_first_and_how(ranks, culprit, said):
    verdict = judge(ranks)
    assert verdict.rank == culprit
    assert f"rank {culprit} " in verdict.headline
    assert re.search(said, verdict.headline)
    assert "\n" not in verdict.headline
    assert len(verdict.others) == len(ranks) - 1


def test_the_cause_is_the_ranks_own_traceback():
    assert judge([lost(0, 1.1), raised(1, 1.0)]).cause == "Traceback of rank 1\nValueError: bad batch"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-signal.SIGKILL, ["ended with SIGKILL", "memory runs out", "smaller batch"]),
        (-signal.SIGSEGV, ["ended with SIGSEGV", "native code"]),
        (-signal.SIGABRT, ["ended with SIGABRT", "abort"]),
        (0, ["ended with exit code 0", "os._exit()"]),
        (3, ["ended with exit code 3", "os._exit()"]),
    ],
)
def test_without_a_traceback_the_cause_says_what_is_known(code, said):
    cause = judge([lost(0, 1.1), died(1, 1.0, code, output_end="loading\nheap corrupted\n")]).cause
    assert [words for words in said if words not in cause] == []
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
    (said,) = judge([other, died(1, 1.0, 3)]).others
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
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
    ],
)
def test_however_a_library_says_that_a_peer_is_gone_it_is_a_consequence(summary):
    verdict = judge([lost(0, 0.5, summary), raised(1, 1.0)])
    assert verdict.rank == 1
    assert "rank 0 lost its connection" in verdict.others[0]


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-11, "SIGSEGV"), (-6, "SIGABRT"), (-200, "signal 200")],
)
def test_exit_codes_are_said_in_words(code, words):
    assert exit_in_words(code) == words


@pytest.mark.parametrize(
    ("ranks", "words"), [([1], "rank 1"), ([0, 2], "ranks 0 and 2"), ([0, 1, 3], "ranks 0, 1 and 3")]
)
def test_several_ranks_are_said_as_a_list(ranks, words):
    assert rank_list(ranks) == words
