"""Every strategy against one process: the same step, the bytes of its formula, the memory that adds up."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import course
import labkit
from course import benchmark
from course.chain import check_chain, layers, split_stages
from course.strategies import ALL, DDP, FSDP2, GPipe, ModelParallel, OneProcess, ZeRO1
from course.strategies.base import DataParallelStrategy, equal_part
from labkit import profiling
from tests.support.tiers import few
from tests.support.weights import whole_weights

SESSION_RANKS = 4

OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9)
BATCH_SIZE = 24


def network(seed):
    torch.manual_seed(seed)
    return course.models.ConvNet().double()


def batches(device, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        images = torch.randn(BATCH_SIZE, 1, 28, 28, generator=generator, dtype=torch.float64)
        yield images.to(device), torch.randint(10, (BATCH_SIZE,), generator=generator).to(device)


class Summed(DataParallelStrategy):
    """Wrong on purpose: gradients are summed and not divided."""

    title = "summed"

    def communicate(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


class SkipsABucket(DataParallelStrategy):
    """Wrong on purpose: the last parameters' gradients are left as each rank has them."""

    title = "skips a bucket"

    def communicate(self):
        for parameter in list(self.model.parameters())[:-2]:
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.worker.world_size


def measure_all(worker, strategies, seed, steps=8):
    """Run one strategy after the other in the same ranks: what a launch each would give, sooner."""
    found = []
    for strategy in strategies:
        network_, batches_ = functools.partial(network, seed), functools.partial(batches, seed=seed)
        found.append(benchmark.run_strategy(worker, strategy, network_, cross_entropy, OPTIMIZER, batches_, steps))
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def measured(ranks):
    """Returns, by title, what every rank has found out about every strategy that runs on so many ranks."""

    @functools.cache
    def launched(world_size):
        """Launch them all; a failure is kept as well, so that it happens once."""
        strategies = [s for s in (*ALL.values(), Summed, SkipsABucket) if s.ranks(world_size) == world_size]
        run = labkit.launch(measure_all, strategies, 0, on=ranks, world_size=world_size, wait=False, live=False)
        run.over.wait()
        return [s.title for s in strategies], run

    def by_title(world_size):
        titles, run = launched(world_size)
        run.wait()
        return {title: [of_rank[index] for of_rank in run.results] for index, title in enumerate(titles)}

    return by_title


@pytest.fixture(scope="module")
def difference(measured):
    """Returns the greatest difference of any weight from those of one process."""

    def of(found):
        reference = measured(1)["one process"][0].weights
        return benchmark.difference(reference, whole_weights(found))

    return of


CASES = [
    *((title, 1) for title in ALL if ALL[title].ranks(2) == 1),
    *((title, n) for n in (2, 4) for title in ALL if ALL[title].ranks(n) == n),
]


def test_every_strategy_is_tried():
    assert {title for title, _ in CASES} == set(ALL)


def test_no_two_strategies_have_the_same_title():
    for package, first in ((course.strategies, OneProcess), (course.transformer, course.transformer.OneProcess)):
        own = [each for each in vars(package).values() if isinstance(each, type) and issubclass(each, first)]
        assert set(package.ALL.values()) == set(own)
        assert len(package.ALL) == len(set(own))


@pytest.mark.spawns
@pytest.mark.parametrize(("title", "world_size"), few(CASES, lambda case: case[1] < 4))
def test_a_strategy_takes_the_step_of_one_process_if_it_claims_so(title, world_size, measured, difference):
    found = measured(world_size)[title]
    if ALL[title].exact:
        assert difference(found) <= 1e-12
    else:
        assert 0 < difference(found) < 0.1, "not exact, but not far off"


@pytest.mark.spawns
@pytest.mark.parametrize("wrong", [Summed, SkipsABucket])
def test_a_wrong_strategy_is_caught_by_the_same_check(wrong, measured, difference):
    for world_size in (2, 4):
        assert difference(measured(world_size)[wrong.title]) > 1e-5


@pytest.mark.spawns
@pytest.mark.parametrize(("title", "world_size"), CASES)
def test_the_bytes_that_are_dispatched_and_counted_are_those_of_the_formula(title, world_size, measured):
    found = measured(world_size)[title]
    sent, wire, expected = (
        sum(getattr(r, what) for r in found) / world_size for what in ("bytes_sent", "wire_bytes", "bytes_expected")
    )
    if "DataParallel" not in title:  # one process, which copies
        assert sent == pytest.approx(expected, rel=0.01), "dispatched"
    assert wire == pytest.approx(expected, rel=0.1, abs=2000), "counted by the system"


def frozen_network(seed, part):
    """A network of which a part is not trained."""
    made = network(seed)
    made.get_submodule(part).requires_grad_(False)
    return made


def bytes_of_all(worker, strategies, make, batches_):
    """Return what each strategy sends in a step: by the calls that were dispatched, by the system, by its formula."""
    optimizer, found = functools.partial(torch.optim.SGD, lr=0.03), {}
    for strategy in strategies:
        each = benchmark.run_strategy(worker, strategy, make, cross_entropy, optimizer, batches_, 8, 1)
        found[strategy.title] = each.bytes_sent, each.wire_bytes, each.bytes_expected
        dist.barrier()
    return found


def check_bytes(run):
    """The three agree for every strategy, as means over the ranks."""
    for title in run.results[0]:
        of_ranks = zip(*(found[title] for found in run.results), strict=True)
        sent, wire, expected = (sum(each) / len(run.results) for each in of_ranks)
        if "DataParallel" not in title:
            assert sent == pytest.approx(expected, rel=0.01), title
        assert wire == pytest.approx(expected, rel=0.1, abs=2000), title


@pytest.mark.spawns
@pytest.mark.parametrize("part", few(["features", "features.conv1", "classifier.fc1", "classifier"], 2))
def test_what_is_frozen_is_not_counted_as_sent(part, ranks):
    makes = functools.partial(frozen_network, 0, part)
    strategies = [s for s in ALL.values() if s.ranks(2) == 2 and not (issubclass(s, GPipe) and part == "features")]
    call = bytes_of_all, strategies, makes, functools.partial(batches, seed=0)
    run = labkit.launch(*call, on=ranks, world_size=2, live=False)
    check_bytes(run)
    trained = sum(p.numel() * 8 for p in makes().parameters() if p.requires_grad)
    assert run.results[0]["DDP"][2] == trained < 21_840 * 8


@pytest.mark.spawns
@pytest.mark.parametrize(("title", "world_size"), CASES)
def test_every_part_of_the_cost_is_known(title, world_size, measured):
    whole = sum(p.numel() * 8 for p in network(0).parameters())
    for measured_ in measured(world_size)[title]:
        parts_s = measured_.timed.parts_s()
        assert tuple(parts_s) == profiling.PARTS
        assert parts_s["forward"] > 0
        assert parts_s["backward"] > 0
        assert all(
            measured_.most_held[kind] > 0 for kind in ("parameters", "gradients", "optimizer state", "activations")
        )
        # What earlier launches have left in the rank's process counts, too.
        assert measured_.most_held["gradients"] <= measured_.most_held["parameters"] <= 1.25 * whole
        step, *marks = measured_.marks
        assert step.what == "step"
        assert all(step.start_s <= mark.start_s < mark.end_s <= step.end_s for mark in marks)
        assert sum(profiling.split(measured_.marks).values()) == pytest.approx(step.end_s - step.start_s, rel=1e-6)


@pytest.mark.spawns
@pytest.mark.parametrize("world_size", [2, 4])
def test_parameters_on_all_ranks_add_up_to_the_whole(world_size, measured):
    whole = sum(p.numel() * 8 for p in network(0).parameters())
    found = measured(world_size)
    for strategy in (ModelParallel, GPipe, FSDP2):
        padded = 1.05 if strategy is FSDP2 else 1  # rows that ranks do not divide
        assert whole <= sum(r.most_held["parameters"] for r in found[strategy.title]) <= padded * whole
    state = [r.most_held["optimizer state"] for r in found[ZeRO1.title]]
    assert sum(state) == whole
    assert max(state) < whole
    assert [r.most_held["parameters"] for r in found[DDP.title]] == [whole] * world_size


@pytest.mark.spawns
def test_communication_is_seen_where_there_is_some(measured):
    found = measured(2)
    for title in ("manual all-reduce", "one flat buffer", "DDP", "ZeRO-1", "FSDP2", "tensor parallel"):
        assert any(mark.what == "communication" for mark in found[title][0].marks), title
    assert not any(mark.what == "communication" for mark in measured(1)["one process"][0].marks)


@pytest.mark.spawns
def test_a_strategy_of_the_readers_own_joins_the_comparison(ranks):
    class ByTheRoot(DataParallelStrategy):
        """Gradients are added up on rank 0, divided there, and sent to all."""

        title = "by the root"

        def communicate(self):
            with self.clock("communication"):
                for parameter in self.model.parameters():
                    dist.reduce(parameter.grad, 0)
                    parameter.grad /= self.worker.world_size
                    dist.broadcast(parameter.grad, 0)

    runs = {}
    for strategy in (OneProcess, ByTheRoot):
        network_, batches_ = functools.partial(network, 0), functools.partial(batches, seed=0)
        runs[strategy.title] = labkit.launch(
            benchmark.run_strategy,
            strategy,
            network_,
            cross_entropy,
            OPTIMIZER,
            batches_,
            steps=5,  # after the last of which weights are compared; bytes are counted all the same
            on=ranks,
            world_size=strategy.ranks(2),
            live=False,
        )
    compared = labkit.compare(runs)
    table = compared.frame()
    assert list(table.index) == ["one process", "by the root"]
    assert table.loc["by the root", "difference"] <= 1e-12
    assert not table.drop(columns="wire KiB").isna().any(axis=None)
    assert {f"{part} ms" for part in profiling.PARTS} <= set(table)
    assert [trace.name for trace in compared.memory().data][0] == "parameters"


# Without ranks


def test_a_batch_that_cannot_be_cut_equally_is_refused():
    with pytest.raises(ValueError, match="a batch of 10 cannot be cut into 4 equal parts; take a multiple of 4"):
        equal_part(torch.zeros(10, 2), 0, 4)


def test_a_network_is_cut_where_layers_have_parameters():
    whole = course.models.ConvNet()
    assert [name for name, _ in layers(whole)][:2] == ["features.conv1", "features.pool1"]
    for parts in (1, 2, 3, 4):
        stages = split_stages(course.models.ConvNet(), parts)
        assert all(any(True for _ in stage.parameters()) for stage in stages)
        names = [name for stage in stages for name in stage.full_names()]
        assert names == list(whole.state_dict())
    images = torch.randn(3, 1, 28, 28)
    outputs = images
    for stage in split_stages(whole, 3):
        outputs = stage(outputs)
    assert torch.equal(outputs, whole(images))
    with pytest.raises(ValueError, match="4 layers with parameters cannot be cut into 5 stages"):
        split_stages(whole, 5)


class Block(nn.Module):
    """What lies beside the block is added: the block is one layer."""

    def __init__(self, adds_inside=True):
        super().__init__()
        self.first, self.second, self.adds_inside = nn.Linear(8, 8), nn.Linear(8, 8), adds_inside

    def forward(self, x):
        return x + self.second(self.first(x).relu())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.middle(x))


class Listed(nn.Module):
    """A transformer's shape: blocks in a list, which is never called itself."""

    def __init__(self, backwards=False):
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(3))
        self.norm, self.backwards = nn.BatchNorm1d(8), backwards

    def forward(self, x):
        x = self.embed(x)
        for block in reversed(self.blocks) if self.backwards else self.blocks:
            x = block(x)
        return self.norm(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.embed(self.middle(self.embed(x)))


class AddsBetween(nn.Module):
    """What a layer returned is written in place between two layers."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.embed(x).relu_())


class TiedHead(nn.Module):
    """Each layer is called once, and two have the same weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.middle(self.embed(x)))


@pytest.mark.parametrize("made", [Residual, functools.partial(Listed, backwards=True), Tied, AddsBetween])
def test_a_network_that_is_no_chain_of_layers_is_refused_by_name_before_it_is_cut(made):
    for strategy in (ModelParallel, GPipe):
        with pytest.raises(ValueError, match=f"{strategy.title} cannot cut this network: .*residual connection"):
            strategy.check(made(), torch.randn(4, 8))


def test_a_weight_that_two_stages_would_train_is_refused_by_name():
    for strategy in (ModelParallel, GPipe):
        with pytest.raises(ValueError, match=f"{strategy.title} cannot cut this network: head.weight is embed.weight"):
            strategy.check(TiedHead(), torch.randn(4, 8))


def test_a_chain_of_blocks_in_a_list_is_cut_between_them_and_checked_without_a_trace():
    network = Listed()
    network.embed.eval()
    statistics = network.norm.running_mean.clone()
    check_chain(network, torch.randn(4, 8), "model parallel")
    assert torch.equal(network.norm.running_mean, statistics)
    assert (network.training, network.embed.training) == (True, False)
    assert [name for name, _ in layers(network)] == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm"]
    inputs = torch.randn(4, 8)
    outputs = inputs
    for stage in split_stages(Listed().eval(), 2):
        outputs = stage.eval()(outputs)
    assert outputs.shape == (4, 8)
    check_chain(course.models.ConvNet(), torch.randn(2, 1, 28, 28), "model parallel")


def test_an_instant_of_communication_counts_as_communication():
    marks = [
        profiling.Mark("step", 0.0, 10.0),
        profiling.Mark("forward", 1.0, 4.0),
        profiling.Mark("backward", 4.0, 8.0),
        profiling.Mark("communication", 6.0, 9.0),
    ]
    assert profiling.split(marks) == {
        "data": 0.0,
        "forward": 3.0,
        "backward": 2.0,
        "communication": 3.0,
        "optimizer": 0.0,
        "waiting": 2.0,
    }


def test_activations_are_counted_without_weights():
    model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))
    inputs = torch.randn(8, 100)
    with profiling.activations(model) as kept:
        model(inputs).sum().backward()
    assert kept["activations"] == 4 * 8 * (100 + 50), "the input, and what the ReLU has let through"


def test_what_a_graph_has_kept_is_let_go_with_it():
    for keeps_its_output in (torch.exp, functools.partial(torch.softmax, dim=-1)):
        with profiling.activations(nn.Module()):
            outputs = keeps_its_output(torch.randn(8, requires_grad=True))
            assert profiling.kept_now()
            del outputs
            assert profiling.kept_now() == {}, "no backward pass was needed for that"


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="steps must be at least 4 and check_after between 1 and steps, got 3 and 5"):
        benchmark.run_strategy(None, OneProcess, None, None, None, None, steps=3)
