"""What a script may do, in the parts that need no ranks; `tests/whole/test_twins.py` does it in them."""

from __future__ import annotations

import functools
import io
import re
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.engines.arguments import LaunchArgs, check
from labkit.protocol.job import RankInfo
from labkit.protocol.packing import pack, pack_call, pack_result, unpack
from labkit.rank import failure, main, process_group
from labkit.rank.script_compat import bars
from labkit.rank.script_compat import reuse_process_group as hooks
from labkit.rank.stop_agreement import Stopped
from labkit.rank.worker import Worker
from labkit.ui import kernel
from tests.tools import make_coming_from

# Exits


def leaves(code):
    sys.exit(code)


@pytest.mark.parametrize("code", [None, 0, False])
def test_an_exit_with_0_is_the_functions_end(code):
    assert main.call(leaves, code) is None


@pytest.mark.parametrize(
    ("code", "of_the_process"), [(3, 3), (True, 1), (256, 1), (-1, 255), ("no data", 1), ("", 1), (0.0, 1)]
)
def test_any_other_exit_fails_with_its_code(code, of_the_process):
    with pytest.raises(SystemExit) as caught:
        main.call(leaves, code)
    assert failure.exit_code(caught.value) == of_the_process


def exits_after(error):
    try:
        raise error
    except BaseException:
        sys.exit(1)


def of(call, *args):
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call(*args)
    return caught.value


def test_an_exit_that_an_error_was_made_into_is_told_as_the_error():
    summary, text, frames = failure.describe(of(exits_after, ValueError("bad batch")), {})
    assert summary == "ValueError: bad batch (then sys.exit(1))"
    assert "raise error" in text
    assert "sys.exit(1)" in text
    assert [name for _, _, name in frames] == ["exits_after"]
    assert frames[0][1] < exits_after.__code__.co_firstlineno + 4, "where it was raised"


def fails_in_a_group(*errors):
    raise ExceptionGroup("unhandled errors in a TaskGroup", list(errors))


def test_of_a_group_the_first_exception_is_the_cause():
    alone, of_two = ([ValueError("bad shard 3")], [ExceptionGroup("inner", [KeyError(1)]), ValueError("late")])
    summary, text, _ = failure.describe(of(fails_in_a_group, *alone), {})
    assert summary == "ValueError: bad shard 3"
    assert "unhandled errors in a TaskGroup (1 sub-exception)" in text
    summary = failure.describe(of(fails_in_a_group, *of_two), {})[0]
    assert summary == "KeyError: 1 (the first of 2 in an ExceptionGroup)"


def test_a_stop_that_was_made_into_an_exit_is_a_stop():
    with pytest.raises(Stopped):
        main.call(exits_after, Stopped("rank 0 stopped"))


# The worker is no rank


WORKER = Worker(RankInfo(1, 1, 4, 4), torch.device("cpu"), None, SimpleNamespace(hooks=()))


@pytest.mark.parametrize(
    "takes_it_for_a_number",
    [
        lambda rank: rank == 0,
        lambda rank: rank in (0, 1),
        lambda rank: rank < 2,
        lambda rank: rank + 1,
        lambda rank: range(8)[rank],
        lambda rank: int(rank),
        lambda rank: torch.utils.data.DistributedSampler(range(8), num_replicas=4, rank=rank),
    ],
)
def test_a_worker_that_is_taken_for_a_number_raises(takes_it_for_a_number):
    with pytest.raises(TypeError, match="rank 1: this is the worker, .* Write worker.rank|'Worker'|not Worker"):
        takes_it_for_a_number(WORKER)


def by_rank(rank, epochs):
    return rank == 0


def by_gpu(gpu):
    return gpu


def by_int(n: int):
    return n


class Trainer:
    def train(self, local_rank):
        return local_rank


def by_options(epochs: int = 2, lr: float = 0.1):
    return epochs, lr


def by_rank_0(rank: int = 0):
    return rank


def asked(function, *args):
    return LaunchArgs(function, args, {}, 2)


@pytest.mark.parametrize(
    ("function", "args"),
    [(by_rank, (3,)), (by_gpu, ()), (by_int, ()), (by_rank_0, ()), (Trainer().train, ()), (lambda i: i, ())],
)
def test_a_function_that_takes_its_rank_is_refused_before_anything_starts(function, args):
    with pytest.raises(TypeError, match=r"first parameter is the worker; write worker\.rank for the rank"):
        check(asked(function, *args), 0)


def typed(rank: labkit.Worker):
    return rank


@pytest.mark.parametrize("function", [typed, by_options, lambda worker: 0, lambda w, rank=0: 0, lambda *args: 0, print])
def test_others_are_not(function):
    check(asked(function), 0)


# The command line


def shell_with(argv):
    application = SimpleNamespace(argv=argv, parent=None)
    return SimpleNamespace(parent=SimpleNamespace(parent=application))


@pytest.mark.parametrize(
    ("kernels", "now", "found"),
    [
        (["-f", "k.json"], ["ipykernel_launcher.py", "-f", "k.json"], ("train",)),
        (["-f", "k.json"], ["train.py", "--lr", "1"], ("train.py", "--lr", "1")),  # a cell, or %run, has set it
        (["-f", "k.json"], [""], ("",)),
        (None, ["train.py", "--lr", "1"], ("train.py", "--lr", "1")),  # a script
    ],
)
def test_a_rank_finds_a_scripts_command_line_and_not_the_kernels(kernels, now, found, monkeypatch):
    monkeypatch.setattr(sys, "argv", now)
    monkeypatch.setattr(kernel, "shell", lambda: None if kernels is None else shell_with(kernels))
    assert kernel.command_line("train") == found


# The group that there is


@pytest.fixture
def within(monkeypatch):
    """As in rank 1 of 4."""
    found = hooks._Within(dist.HashStore(), False, 1, 4, False)
    monkeypatch.setattr(hooks, "_within", found)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    limits = []
    monkeypatch.setattr(process_group, "set_timeout", limits.append)
    found.limits = limits
    return found


@pytest.mark.parametrize(
    "ask",
    [
        {},
        {"backend": "cpu:gloo,cuda:nccl"},
        {"init_method": "env://"},
        {"init_method": "tcp://10.0.0.1:23456", "rank": 1, "world_size": 4},
        {"store": dist.HashStore(), "rank": 1, "world_size": 4},
    ],
)
def test_whatever_address_a_script_joins_at_it_finds_the_group(within, ask):
    hooks._init_as_under_torchrun(**ask, timeout=5)
    assert within.limits == [5], "its time limit is the group's"


@pytest.mark.parametrize(
    ("ask", "has_limit", "limits"),
    [
        ({"backend": "nccl"}, False, [timedelta(minutes=10)]),
        ({"backend": "NCCL", "timeout": timedelta(seconds=5)}, False, [timedelta(seconds=5)]),
        ({}, False, [timedelta(minutes=30)]),
        ({"backend": "nccl"}, True, []),
        ({"backend": "nccl", "timeout": timedelta(seconds=5)}, True, [timedelta(seconds=5)]),
    ],
)
def test_on_gpus_a_script_has_the_limit_that_pytorch_gives_it_unless_the_launch_has_one(
    within, monkeypatch, ask, has_limit, limits
):
    monkeypatch.setattr(dist, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    within.has_limit = has_limit
    hooks._init_as_under_torchrun(**ask)
    assert within.limits == limits


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ({"rank": 0}, "rank 1 asks for a process group in which rank is 0, but it was launched with 1"),
        ({"world_size": 8}, "in which world_size is 8, but it was launched with 4"),
        (
            {"store": dist.HashStore(), "rank": 1, "world_size": 2},
            "in which world_size is 2, but it was launched with 4",
        ),
    ],
)
def test_another_group_than_there_is_is_refused_with_both(within, ask, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        hooks._init_as_under_torchrun(**ask)


# Progress bars


def test_a_bar_for_notebooks_is_text_and_moves(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.delitem(sys.modules, bars.NAME, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    bars.as_text()
    import tqdm.notebook

    module = tqdm.notebook  # as an attribute of its package
    monkeypatch.delitem(sys.modules, bars.NAME)
    shown = io.StringIO()
    for _ in module.tqdm(range(4), file=shown, mininterval=0):
        pass
    assert "0/4" in shown.getvalue()
    assert "4/4" in shown.getvalue()
    assert list(module.trange(2, file=io.StringIO())) == [0, 1]
    assert module.tqdm_notebook is module.tqdm


# What is sent


def test_a_ddp_model_arrives_without_its_wrapper():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 1)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        blob = pack_result({"model": wrapped, "module": model, "optimizer": torch.optim.SGD(wrapped.parameters(), 0.1)})
    finally:
        dist.destroy_process_group()
    found = unpack(blob)
    assert type(found["model"]) is torch.nn.Linear
    assert found["model"] is found["module"]
    assert found["optimizer"].param_groups[0]["params"][0] is found["model"].weight
    assert torch.equal(found["model"].weight, model.weight)


def test_the_notebooks_output_is_the_ranks_own_in_a_rank(monkeypatch):
    class OutStream(io.StringIO):
        def __reduce_ex__(self, protocol):
            raise TypeError("cannot pickle OutStream")

    monkeypatch.setattr(sys, "stdout", OutStream())

    def say(text, to=sys.stdout):
        print(text, file=to)

    packed = pack(say)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    unpack(packed)("hello")
    assert sys.stdout.getvalue() == "hello\n"


LOCK = threading.Lock()


class HasALock:
    def __init__(self):
        self.lock = LOCK

    def train(self, worker):
        return self


def helps():
    return LOCK


def train(worker):
    return helps()


train.__module__ = helps.__module__ = "__main__"  # as in a cell: by value


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ((HasALock().train, (), {}), "self, a HasALock, is a HasALock"),
        ((print, (), {"to": [LOCK]}), "argument to=… is a list"),
        ((train, (), {}), "'LOCK', which helps uses, is a lock"),
        ((functools.partial(train, 1), (), {}), "'LOCK', which helps uses, is a lock"),
    ],
)
def test_what_cannot_be_sent_is_named_by_where_it_is(call, said):
    with pytest.raises(ValueError, match=rf"cannot be sent to the ranks: {re.escape(said)}, which cannot be pickled"):
        pack_call(*call)


# The page


def test_the_page_for_those_who_come_from_scripts_is_current():
    said = "python -m tests.tools.make_coming_from writes it anew"
    assert make_coming_from.PAGE.read_text(encoding="utf-8") == make_coming_from.page(), said
