"""What the instrument sees of a plain training function on a rank, and that it leaves the function as it is."""

from __future__ import annotations

import contextlib
import importlib
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

import labkit
from labkit.protocol import events
from labkit.protocol.packing import pack_call
from labkit.rank.worker import Worker
from labkit.steps import counting, watch
from labkit.steps.counting import Flops
from labkit.steps.record import StepRecord, times
from labkit.steps.watch import KIND, TIMED, Plan
from tests.conftest import shared_session

SIZES = (30, 40, 5)
WEIGHTS = sum(a * b + b for a, b in zip(SIZES, SIZES[1:], strict=False))


class Told(Worker):
    """A worker that keeps what it sends."""

    def __init__(self):
        self.rank, self.world_size, self.device, self.logged, self.sent = 0, 1, torch.device("cpu"), [], {}
        self._channel = SimpleNamespace(send=self._take)

    def _take(self, event):
        assert isinstance(event, events.Attached)
        self.sent[event.kind] = StepRecord.unpack(event.blob)


def recorded(function, *args, plan=Plan(3, timed=0), **kwargs):  # noqa: B008 - it cannot be changed
    """Call a function in this process, as a rank does; return what it returned or raised, and the record."""
    worker = Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "log", lambda worker, **values: worker.logged.append(values))
        try:
            returned = watch.watch(worker, pack_call(function, args, kwargs), plan)
        except ValueError as error:
            returned = error
    record = worker.sent[KIND]
    if TIMED in worker.sent:
        record = record.followed_by(worker.sent[TIMED])
    assert nothing_stays_on()
    return returned, record, len(worker.logged)


def nothing_stays_on():
    module, optimizer = torch.nn.modules.module, importlib.import_module("torch.optim.optimizer")
    return (
        not module._global_forward_hooks
        and not module._global_forward_pre_hooks
        and not optimizer._global_optimizer_post_hooks
        and torch.autograd.backward.__module__ == "torch.autograd"
        and not torch.autograd._profiler_enabled()
    )


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), float(index))


def steps(worker, count, fail=False):
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _, batch in zip(range(count), DataLoader(Rows(), batch_size=4), strict=False):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        worker.log(steps=1.0)
    if fail:
        raise ValueError("no more")
    return len(torch.nn.modules.module._global_forward_pre_hooks), torch.autograd.backward.__module__


def by_hand(worker, count):
    """No optimizer: steps are what it logs."""
    for _ in range(count):
        torch.ones(8).sum()
        worker.log(steps=1.0)


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5), *more)


def train(worker, steps, wrap=lambda model: model, *more):
    whole = network(*more)
    model = wrap(whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(16, 30, generator=torch.Generator().manual_seed(1)).chunk(worker.world_size)[worker.rank]
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss.item())
    return whole.state_dict()


# Steps


def test_the_steps_are_recorded_and_no_hook_outlives_them():
    (hooks, backward), found, logged = recorded(steps, 12)
    assert (hooks, backward, logged) == (0, "torch.autograd", 12), "gone while the function goes on"
    assert len(found.steps) == 3
    assert {part: len(when) for part, when in found.phases.items()} == dict.fromkeys(
        ("data", "forward", "backward", "optimizer"), 3
    )
    assert found.busy
    assert found.file
    (time,) = times([found])
    assert sum(time.seconds.values()) == pytest.approx(sum(b - a for a, b in found.steps) / 3, rel=1)
    assert found.unknown == ""


def test_what_a_function_does_that_ends_early_or_fails_is_recorded_as_far_as_it_goes():
    _, found, _ = recorded(steps, 6)
    assert len(found.steps) == 2
    error, found, _ = recorded(steps, 6, True)
    assert (str(error), len(found.steps)) == ("no more", 2)
    _, found, _ = recorded(steps, 2)
    assert found.steps == ()
    assert found.unknown.startswith("rank 0 took 2 steps of the 7 that are watched, the first 4 to warm up")
    _, found, _ = recorded(by_hand, 9)
    assert len(found.steps) == 3, "without an optimizer a step ends where the function logs"


def test_watching_changes_no_number_and_times_the_other_steps():
    returned, found, logged = recorded(train, 14, plan=Plan())
    plain = train(SimpleNamespace(rank=0, world_size=1, log=lambda **_: None), 14)
    assert all(torch.equal(plain[name], returned[name]) for name in plain)
    assert (len(found.steps), len(found.timed_s), logged) == (2, 7, 14)
    assert found.sent() == 0
    assert found.computed_s > 0
    assert found.threads == torch.get_num_threads()


@pytest.mark.parametrize("at", range(6))
def test_beside_the_users_own_profiler_nothing_is_recorded_and_theirs_has_everything(at):
    from torch.profiler import ProfilerActivity, profile

    def profiled(worker, count):
        with contextlib.ExitStack() as stack:
            for step in range(count):
                if step == at:
                    own = stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
                torch.ones(8).sum()
                worker.log(steps=1.0)
        return len([event for event in own.events() if event.name == "aten::sum"])

    counted, found, logged = recorded(profiled, 9)
    assert (counted, logged) == (9 - at, 9)
    assert found.steps == ()
    assert "rank 0 recorded nothing: the function has a profiler of its own on (torch.profiler)" in found.unknown


def test_a_fault_of_the_instrument_does_not_end_the_run(monkeypatch):
    monkeypatch.setattr(watch.profiler, "events_of", lambda *_: {}["what PyTorch has changed"])
    (_, _), found, logged = recorded(steps, 12)
    assert logged == 12
    assert "what rank 0 does could not be watched (KeyError" in found.unknown
    error, found, _ = recorded(steps, 6, True)
    assert str(error) == "no more", "nor does it hide why the function failed"
    assert found.steps == ()


def test_what_gloo_records_late_does_not_reach_into_the_next_step(monkeypatch):
    def late(found, *_):
        a = found[0].start_s
        return [watch.Call("all_reduce", None, a, a + 60.0, 8)]

    monkeypatch.setattr(watch.profiler, "calls_of", late)
    _, found, _ = recorded(steps, 12, plan=Plan(1, timed=0))
    assert all(call.end_s <= found.steps[-1][1] for call in found.calls)


# Operations


def flops_of(function):
    with Flops() as counted:
        function()
    return counted.total


def test_operations_are_those_of_products_and_recomputation_counts():
    model, inputs = network(), torch.randn(16, 30)
    # 30 × 40 + 40 × 5 multiplications for each of 16 samples, and twice as many backward, but for the inputs'.
    forward, back = 2 * 16 * (1200 + 200), 2 * 16 * (1200 + 2 * 200)
    assert flops_of(lambda: model(inputs).sum().backward()) == forward + back
    assert recorded(train, 14)[1].flops == forward + back
    again = flops_of(lambda: checkpoint(model[:2], inputs, use_reentrant=False).sum().backward())
    assert again == 2 * 2 * 16 * 1200 + 2 * 16 * 1200, "the forward pass twice"


def test_what_cannot_be_counted_is_no_number():
    lstm = nn.LSTM(8, 8)
    assert math.isnan(flops_of(lambda: lstm(torch.randn(4, 2, 8)))) or not torch.backends.mkldnn.is_available()
    with FlopCounterMode(display=False) as theirs:
        assert math.isnan(flops_of(lambda: torch.ones(2, 2) @ torch.ones(2, 2)))
    assert theirs.get_total_flops() == 16, "a mode of the user's counts on"
    stack = contextlib.ExitStack()

    def begins_and_does_not_end():
        stack.enter_context(FlopCounterMode(display=False))

    assert math.isnan(flops_of(begins_and_does_not_end))
    stack.close()
    assert flops_of(lambda: torch.ones(2, 2) @ torch.ones(2, 2)) == 16, "and none is left on"


# Memory


def test_an_optimizer_within_another_has_one_state():
    model = torch.nn.Linear(30, 40)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 30)).sum().backward()
    inner.step()
    outer = type("Outer", (), {"optim": inner, "param_groups": inner.param_groups})()
    assert counting.held([model], [inner, outer])["optimizer"] == 4 * (30 * 40 + 40)


def held_of(make, **kwargs):
    return recorded(make, plan=Plan(1, timed=0), **kwargs)[1].held


def taking_steps(model, optimizer, size=(16, 30)):
    inputs = torch.randn(*size)
    for _ in range(6):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def adam(worker):
    model = network()
    taking_steps(model, torch.optim.Adam(model.parameters()))


def frozen(worker):
    """A network of which a part is trained, as with LoRA."""
    model = network()
    model[0].requires_grad_(False)
    taking_steps(model, torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9))


def test_memory_by_kind_is_exact():
    held = held_of(adam)
    assert held["parameters"] == held["gradients"] == 4 * WEIGHTS
    assert held["optimizer"] == pytest.approx(8 * WEIGHTS, rel=0.02), "two states a weight, and a count a tensor"
    assert held["buckets"] == 0
    assert held["activations"] == pytest.approx(4 * 16 * (30 + 40 + 5), rel=0.02)
    held = held_of(frozen)
    assert held["parameters"] == 4 * WEIGHTS, "also what is not trained"
    assert held["gradients"] == held["optimizer"] == 4 * (40 * 5 + 5)


@pytest.mark.parametrize("given", [True, False])
def test_weights_that_autograd_keeps_are_no_activations(given):
    weight, inputs = nn.Parameter(torch.randn(8, 8, 3)), torch.randn(2, 8, 10)
    with counting.Activations([weight] if given else []) as kept:
        outputs = nn.functional.conv1d(inputs, weight) if given else inputs.mT @ weight[:, :, 0]  # itself, and a view
    assert outputs.requires_grad
    assert kept.most == inputs.nbytes


def test_buffers_are_known_by_the_last_part_of_their_names():
    def with_buffers(worker):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[0].register_buffer("mask", torch.ones(2))
        model[1].register_buffer("scale", torch.ones(2))
        model.append(nn.ParameterDict({"scale": nn.Parameter(torch.ones(1))}))
        model.forward = lambda inputs: model[1](model[0](inputs))
        taking_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), (4, 2))

    found = recorded(with_buffers)[1].buffers
    assert found == {"mask", "running_mean", "running_var", "num_batches_tracked"}, "a parameter is called scale, too"


def test_data_parallel_without_a_second_gpu_is_said_to_be_one_process():
    assert "nn.DataParallel has no second GPU here" in recorded(train, 12, nn.DataParallel)[1].unknown


class Threaded(nn.Module):
    """Calls its network in a thread, as nn.DataParallel does on GPUs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self.model, inputs).result()


def test_of_what_threads_do_nothing_is_told_and_not_zero():
    found = recorded(train, 14, Threaded, plan=Plan())[1]
    assert found.is_threaded
    assert math.isnan(found.flops)
    assert math.isnan(found.sent())
    assert "activations" not in found.held
    assert found.held["parameters"] == 4 * WEIGHTS
    assert "threads call the network (nn.DataParallel)" in found.unknown


# On ranks


def ddp(worker, count, dtype=torch.float32):
    model = network().to(dtype)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(count):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 30, dtype=dtype)).float().square().mean().backward()
        optimizer.step()


def calls(worker):
    """A call of each kind after a step, so that it is alone in its own."""
    x, n = torch.ones, worker.world_size
    made = [
        lambda: dist.all_reduce(x(100)),
        lambda: dist.broadcast(x(100), 0),
        lambda: dist.reduce(x(100, dtype=torch.float64), 0),
        lambda: dist.scatter(x(100), [x(100) for _ in range(n)] if worker.rank == 0 else None, 0),
        lambda: dist.gather(x(100), [x(100) for _ in range(n)] if worker.rank == 0 else None, 0),
        lambda: dist.all_gather([x(100) for _ in range(n)], x(100)),
        lambda: dist.all_gather_into_tensor(x(100 * n), x(100)),
        lambda: dist.all_to_all_single(x(100 * n), x(100 * n)),
        lambda: dist.all_reduce(x(100, dtype=torch.uint8)),
        dist.barrier,
    ]
    made.append(lambda: dist.send(x(100), 1) if worker.rank == 0 else dist.recv(x(100)))
    for call in [*[lambda: None] * 4, *made]:
        call()
        worker.log(steps=1.0)


SHARES = (800, 400, 800, 400, 400, 800, 800, 800, 200, 0, 400)
"""Bytes that the ranks send for each of these, all together, as a mean over the ranks and times two: of two ranks."""


def on_rank(worker, function, plan, *args):
    return watch.watch(worker, pack_call(function, args, {}), plan)


def records(run):
    return [StepRecord.unpack(attached[KIND]) for attached in run.attached]


@pytest.mark.spawns
def test_bytes_on_ranks_are_those_of_textbooks_by_type_and_kind():
    with shared_session(3) as ranks:
        for n, dtype, size in ((2, torch.float32, 4), (3, torch.bfloat16, 2)):
            run = labkit.launch(on_rank, ddp, Plan(3, timed=0), 8, dtype, on=ranks, world_size=n, live=False)
            for record in records(run):
                assert record.sent() == pytest.approx(2 * (n - 1) / n * size * WEIGHTS, rel=0.01), (n, dtype)
                assert record.held["buckets"] == size * WEIGHTS
        run = labkit.launch(on_rank, calls, Plan(len(SHARES), timed=0), on=ranks, world_size=2, live=False)
        for number, together in enumerate(SHARES):
            sent = []
            for record in records(run):
                (a, b) = record.steps[number]
                inside = tuple(call for call in record.calls if a <= call.start_s < b)
                sent.append(record._replace(steps=((a, b),), calls=inside).sent())
            assert sum(sent) == pytest.approx(together), number


def sharded(worker):
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model[0])
    taking_steps(fully_shard(model), torch.optim.Adam(model.parameters()))
    return model.state_dict()


def returns_some(worker):
    state = sharded(worker)
    return state if worker.rank == 0 else None


@pytest.mark.spawns
def test_of_what_is_sharded_the_shard_counts_and_results_are_put_together():
    with shared_session(2) as ranks:
        plan, options = Plan(1, timed=1, gathers=True), {"on": ranks, "world_size": 2, "live": False}
        run = labkit.launch(on_rank, sharded, plan, **options)
        held = {kind: [r.held[kind] for r in records(run)] for kind in ("parameters", "gradients", "optimizer")}
        assert held["parameters"] == held["gradients"]
        assert sum(held["parameters"]) == 4 * WEIGHTS
        assert sum(held["optimizer"]) == pytest.approx(8 * WEIGHTS, rel=0.02)
        assert [type(t) for t in run.results[1].values()] == [torch.Tensor] * 4
        assert {name: t.shape for name, t in run.results[0].items()} == {
            name: t.shape for name, t in network().state_dict().items()
        }
        run = labkit.launch(on_rank, returns_some, plan, **options)
        assert run.results[1] is None, "and the ranks that have returned their part do not wait for the others"
