"""A step as PyTorch dispatches it, and how long it takes on ideal devices. No process is started, no clock read."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from course.strategies.data_parallel import ThreadedDataParallel
from labkit.comparison.program import Piece, Program, Recorder
from labkit.comparison.replay import LAPTOP, NAMED, Devices, ReplayError, replay

DEVICES = Devices(gflops=1.0, link_gbytes_s=1.0, latency_us=0.0)
"""A billion operations a second, and a billion bytes: so much for a second of either."""

SECOND = 10**9


def computing(seconds, what="forward", device=0):
    return Piece(what, device, flops=seconds * SECOND)


def all_reduce(seconds, ranks=(0, 1), number=0):
    """Between two ranks as many bytes are sent as are put in."""
    return Piece("all_reduce", size=int(seconds * SECOND), ranks=ranks, number=number)


def message(what, seconds, peer, number):
    return Piece(what, size=int(seconds * SECOND), ranks=(0, 1), peer=peer, number=number)


def wait(number):
    return Piece("wait", number=number)


def step_s(*ranks, devices=DEVICES):
    lanes = replay([Program(tuple(pieces)) for pieces in ranks], devices)
    return max(of_rank[0].step_s for of_rank in lanes)


def one_process(seconds=3.0):
    return [computing(seconds / 3), computing(seconds * 2 / 3, "backward")]


def ddp(seconds=3.0, sent_s=(0.5, 0.5)):
    """Half of the batch; the first bucket is sent when half of the backward pass is over."""
    backward = seconds / 3 / 2
    return [
        computing(seconds / 6),
        computing(backward, "backward"),
        all_reduce(sent_s[0], number=0),
        computing(backward, "backward"),
        all_reduce(sent_s[1], number=1),
        wait(0),
        wait(1),
    ]


def stage(rank, seconds=3.0, sent_s=0.1, micro_batches=1):
    """Half of the network, all forward passes first."""
    part = seconds / 2 / micro_batches
    first, pieces, numbers = [], [], iter(range(100))
    sends, gets = ("send", "recv") if rank == 0 else ("recv", "send")
    for _ in range(micro_batches):
        number = next(numbers)
        there = message(sends, sent_s / micro_batches, 1 - rank, number)
        first += [computing(part / 3), there] if rank == 0 else [there, wait(number), computing(part / 3)]
    for _ in range(micro_batches):
        number = next(numbers)
        back = message(gets, sent_s / micro_batches, 1 - rank, number)
        own = computing(part * 2 / 3, "backward")
        pieces += [back, wait(number), own] if rank == 0 else [own, back]
    return first + pieces


def test_what_is_sent_while_gradients_are_computed_takes_no_time():
    assert step_s(one_process()) == pytest.approx(3.0)
    assert step_s(ddp(), ddp()) == pytest.approx(1.5 + 0.5), "the last bucket has nothing to hide behind"
    assert step_s(ddp(sent_s=(0.5, 0.0)), ddp(sent_s=(0.5, 0.0))) == pytest.approx(1.5)
    assert step_s(ddp(sent_s=(2.0, 0.5)), ddp(sent_s=(2.0, 0.5))) == pytest.approx(1.0 + 2.0 + 0.5), "one link"


def test_the_ranking_of_the_lesson_follows_from_what_is_computed_and_sent():
    one = step_s(one_process())
    cut = step_s(stage(0), stage(1))
    assert step_s(ddp(), ddp()) < one <= cut
    assert cut == pytest.approx(one + 0.2), "each stage waits for the other, and both for what is sent"
    assert step_s(stage(0, micro_batches=4), stage(1, micro_batches=4)) < 0.75 * cut


def test_which_way_is_faster_depends_on_the_devices_and_their_links():
    def gain(gflops):
        devices = dataclasses.replace(DEVICES, gflops=gflops)
        return step_s(one_process(), devices=devices) / step_s(ddp(), ddp(), devices=devices)

    assert gain(0.1) > 1.9
    assert gain(100.0) < 1


def test_a_collective_begins_when_the_last_rank_has_called_it():
    late = [computing(2.0), all_reduce(0.5), wait(0)]
    soon = [computing(1.0), all_reduce(0.5), wait(0)]
    (first,), (second,) = replay([Program(tuple(late)), Program(tuple(soon))], DEVICES)
    assert (first.step_s, second.step_s) == (pytest.approx(2.5), pytest.approx(2.5))
    assert sum(m.end_s - m.start_s for m in second.marks if m.what == "waiting") == pytest.approx(4 * 1.0)


def test_latency_is_paid_for_every_round():
    slow = dataclasses.replace(DEVICES, latency_us=100.0)
    assert slow.seconds(all_reduce(0.0, ranks=(0, 1, 2, 3))) == pytest.approx(6 * 1e-4)
    assert slow.seconds(message("send", 0.0, 1, 0)) == pytest.approx(1e-4)


def test_a_rank_that_waits_for_what_nobody_sends_is_no_endless_loop():
    with pytest.raises(ReplayError, match="rank 0 waits for what no other rank sends"):
        step_s([message("recv", 1, 1, 0), wait(0)], one_process())


@pytest.mark.parametrize("bad", [{"gflops": 0}, {"link_gbytes_s": math.nan}, {"latency_us": -1}])
def test_devices_have_a_speed(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        dataclasses.replace(LAPTOP, **bad)


def test_real_devices_say_where_their_figures_come_from():
    assert all(each.name and each.source for each in NAMED)


# Recording


@pytest.fixture
def group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def recorded(step):
    recorder = Recorder()
    with recorder.recording():
        step()
    return recorder.program()


NETWORKS = {
    "linear": (nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)), (16, 30)),
    "convolutions": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)), (2, 3, 9, 9)),
    "attention": (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), (2, 7, 32)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_operations_are_those_that_flop_counter_mode_counts(name):
    network, shape = NETWORKS[name]
    inputs = torch.randn(shape)

    def step():
        network(inputs).square().mean().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    program = recorded(step)
    assert program.flops == counter.get_total_flops() > 0
    assert {piece.what for piece in program.pieces} == {"forward", "backward"}
    assert 0 < program.uncounted["all"] < 1, "what has no formula is said"


def test_what_has_no_formula_is_named():
    program = recorded(lambda: torch.fft.fft(torch.randn(1000)))
    assert program.flops == 0
    assert any("fft" in name for name in program.uncounted)


def test_calls_of_ddp_are_seen_where_they_are_dispatched_and_awaited_where_the_pass_ends(group):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 300)), bucket_cap_mb=0.1)
    inputs = torch.randn(2, 300)
    for _ in range(2):
        model(inputs).sum().backward()  # DDP makes its buckets anew after the first step
    pieces = recorded(lambda: model(inputs).sum().backward()).pieces
    calls = [index for index, piece in enumerate(pieces) if piece.what == "all_reduce"]
    last = max(index for index, piece in enumerate(pieces) if piece.what == "backward")
    waits = [index for index, piece in enumerate(pieces) if piece.what == "wait"]
    assert len(calls) > 1
    assert sum(pieces[index].size for index in calls) == 4 * sum(p.numel() for p in model.parameters())
    assert calls[0] < last < waits[0], "the first while gradients are still computed; all are awaited at the end"
    assert len(waits) == len(calls)


@pytest.mark.parametrize(
    ("call", "kind", "size"),
    [
        (lambda x: dist.all_reduce(x), "all_reduce", 400),
        (lambda x: dist.broadcast(x, 0), "broadcast", 400),
        (lambda x: dist.all_gather([torch.empty(100)], x), "all_gather", 400),
        (lambda x: dist.all_gather_into_tensor(torch.empty(100), x), "all_gather", 400),
        (lambda x: dist.reduce_scatter_tensor(torch.empty(100), x), "reduce_scatter", 400),
        (lambda x: dist.all_to_all_single(torch.empty(100), x), "all_to_all", 400),
        (lambda x: dist.reduce(x, 0), "reduce", 400),
    ],
)
def test_every_call_is_known_by_kind_and_bytes_and_awaited_at_once(call, kind, size, group):
    found, waited = recorded(lambda: call(torch.ones(100))).pieces
    assert (found.what, found.size, found.ranks) == (kind, size, (0,))
    assert waited == Piece("wait", number=found.number)


def test_functional_collectives_are_calls_and_what_wraps_their_results_is_none(group):
    from torch.distributed import _functional_collectives as functional

    program = recorded(lambda: functional.all_reduce(torch.ones(100), "sum", dist.group.WORLD) + 1)
    assert [(piece.what, piece.size) for piece in program.pieces] == [("all_reduce", 400), ("wait", 0)]
    assert program.bytes_sent == 0, "to nobody"


def test_what_runs_beside_is_awaited_where_the_program_says(group):
    def step():
        work = dist.all_reduce(torch.ones(100), async_op=True)
        torch.ones(8, 8) @ torch.ones(8, 8)
        work.wait()

    assert [piece.what for piece in recorded(step).pieces] == ["all_reduce", "forward", "wait"]


def test_devices_of_threads_have_a_lane_each_and_copy_what_data_parallel_copies():
    network = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))
    weights = 4 * sum(p.numel() for p in network.parameters())
    model, inputs = ThreadedDataParallel(network), torch.randn(16, 30)
    program = recorded(lambda: model(inputs).square().mean().backward())
    forward, back = 2 * 8 * (1200 + 200), 2 * 8 * (1200 + 2 * 200)
    for device in (0, 1):
        by = {what: sum(p.flops for p in program.pieces if p[:2] == (what, device)) for what in ("forward", "backward")}
        assert by == {"forward": forward, "backward": back}, "the device that computed it forward computes it backward"
    copied = {(p.device, p.peer): 0 for p in program.pieces if p.what == "copy"}
    for piece in program.pieces:
        if piece.what == "copy":
            copied[piece.device, piece.peer] += piece.size
    outputs = 4 * 8 * 5
    assert copied == {(0, 1): weights + 4 * 8 * 30 + outputs, (1, 0): weights + outputs}
    assert program.bytes_sent == sum(copied.values())
    ((first, second),) = replay([program], DEVICES)
    assert first.busy_s == pytest.approx(second.busy_s)
    assert sum(m.end_s - m.start_s for m in second.marks if m.what == "communication") > 0


def test_the_stand_in_computes_what_one_process_does_and_keeps_statistics_as_data_parallel_does():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))

    alone, model, inputs = network(), ThreadedDataParallel(network()), torch.randn(16, 30)
    half = network()
    half(inputs[:8])
    model(inputs)
    assert torch.equal(model.module[1].running_mean, half[1].running_mean), "those of device 0's part"
    assert model.module[1].num_batches_tracked == 1
    alone.eval()(inputs).square().mean().backward()
    model.eval()
    model.module[1].load_state_dict(alone[1].state_dict())
    model(inputs).square().mean().backward()
    both = zip(alone.parameters(), model.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in both)
