"""The GPT by every strategy against one process: the same step, the bytes of its formula, the memory it is to save."""

from __future__ import annotations

import contextlib
import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import labkit
from course.transformer import (
    ALL,
    BF16,
    GPT,
    IGNORED,
    OneProcess,
    batches,
    gpt,
    mean_loss,
)
from course.transformer.experts import Experts
from tests.support.gpt_training import network, reference, train_all
from tests.support.tiers import few

SESSION_RANKS = 8

DATA = gpt.text()[:100_000]


ON_TWO = [title for title in ALL if ALL[title].ranks(2) == 2]
ON_FOUR = [
    *("DDP", "FSDP2", "tensor parallel", "sequence parallel", "context parallel", "1F1B", "expert parallel"),
    *(title for title in ALL if ALL[title].ranks(2) == 4),
]
ON_EIGHT = [title for title in ALL if ALL[title].ranks(2) == 8]
STRATEGIES = {2: [*map(ALL.get, ON_TWO)], 4: [*map(ALL.get, ON_FOUR)], 8: [*map(ALL.get, ON_EIGHT)]}
CASES = [(title, n) for n, titles in ((2, ON_TWO), (4, ON_FOUR), (8, ON_EIGHT)) for title in titles]
EXACT = [case for case in CASES if ALL[case[0]].exact]
DEPTH = 4


def difference(one, other):
    """The greatest difference of any weight, NaN if one is NaN. Both must have the same weights."""
    assert one.keys() == other.keys()
    return torch.stack([(one[name].cpu() - other[name].cpu()).abs().max().double() for name in one]).max().item()


@pytest.fixture(scope="module")
def trained(ranks):
    """Returns what every rank has found out about every strategy, by title."""

    @functools.cache
    def launched(world_size):
        strategies = STRATEGIES[world_size]
        options = {"on": ranks, "world_size": world_size, "live": False}
        results = labkit.launch(train_all, strategies, DATA, DEPTH, **options).results
        return {strategy.title: [result[strategy.title] for result in results] for strategy in strategies}

    return launched


@pytest.fixture(scope="module")
def one_process(ranks):
    """Returns what one process has found out."""

    @functools.cache
    def launched(*options):
        run = labkit.launch(reference, DATA, DEPTH, *options, on=ranks, world_size=1, live=False)
        return run.results[0]["one process"]

    return launched


@pytest.fixture(scope="module")
def compared(trained, one_process):
    """Returns one process's findings, a strategy's, and the weights of all its ranks together."""

    def of(title, world_size):
        found = trained(world_size)[title]
        one = one_process(4 if title == "expert parallel" else 0)
        return one, found, {name: tensor for each in found for name, tensor in each.weights.items()}

    return of


def test_every_strategy_is_tried():
    assert {title for title, _ in CASES} == set(ALL) - {OneProcess.title}


@pytest.mark.spawns
@pytest.mark.parametrize(("title", "world_size"), few(EXACT, lambda case: case[1] == 2 and EXACT.index(case) % 2 == 0))
def test_a_strategy_takes_the_step_of_one_process_with_dropout_and_ragged_sequences(title, world_size, compared):
    one, found, weights = compared(title, world_size)
    assert difference(one.weights, weights) <= 1e-9
    losses = [[each.losses[step] for each in found if each.losses[step] is not None] for step in range(5)]
    assert [sum(step) / len(step) for step in losses] == pytest.approx(one.losses, rel=1e-9)


@pytest.mark.spawns
def test_bf16_is_off_by_no_more_than_its_bound(ranks, one_process):
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    options = {"on": ranks, "world_size": 2, "live": False}
    weights = labkit.launch(train_all, [BF16], DATA, DEPTH, 0, sgd, **options).results[0][BF16.title].weights
    way, off = (
        torch.cat([(weights[name] - other[name]).flatten() for name in weights]).norm().item()
        for other in (network(OneProcess, DEPTH).state_dict(), one_process(0, sgd).weights)
    )
    assert 1e-3 < off / way <= BF16.bound(DEPTH) < 0.03
    assert all(weight.dtype == torch.float32 for weight in weights.values())


COLLECTIVES = (
    *("all_gather_single", "reduce_scatter_single", "all_reduce"),
    *("all_gather_into_tensor", "reduce_scatter_tensor"),  # their names before PyTorch 2.15
)


def shard_on_a_mesh(worker):
    """Return what each collective of a step was given, the ranks that took part, and how far gradients are off."""
    calls = set()
    with contextlib.ExitStack() as patches:
        for name in filter(dist.__dict__.get, COLLECTIVES):
            patches.enter_context(mock.patch.object(dist, name, noting(calls, getattr(dist, name))))
        model, whole = seeded(0, 1), seeded(0, 1)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        inputs, targets = next(batches(DATA, 8, 16))
        mine = torch.arange(8).chunk(4)[worker.rank]
        mean_loss(model(inputs[mine]), targets[mine]).backward()
    mean_loss(whole(inputs), targets).backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    off = max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)
    held = sum(p.to_local().numel() for p in model.parameters())
    return calls, held, sum(p.numel() for p in whole.parameters()), off


def noting(calls, collective):
    def call(*args, **options):
        given = args[0] if args else options[next(iter(options))]
        group = tuple(dist.get_process_group_ranks(options["group"]))
        calls.add((" ".join(collective.__name__.split("_")[:2]), group, given.numel()))
        return collective(*args, **options)

    return call


@pytest.mark.spawns
def test_hsdp_gathers_within_a_row_and_all_reduces_a_ranks_part_between_rows_as_lesson_20_says(ranks):
    found = labkit.launch(shard_on_a_mesh, on=ranks, world_size=4, live=False, backend="gloo").results
    for rank, (calls, held, whole, off) in enumerate(found):
        row, column = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        assert {(name, group) for name, group, _ in calls} == {
            ("all gather", row),
            ("reduce scatter", row),
            ("all reduce", column),
        }
        assert held == whole // 2
        assert {size for name, _, size in calls if name == "all reduce"} == {held}
        assert off < 1e-12


def kinds_under_a_policy(worker):
    """Return the types of what norms are given and give, of the logits, of the loss, and of what the rank keeps."""
    mesh = init_device_mesh("cpu", (worker.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, of_norms = GPT(1, 32, 4), set()

    def look(norm, given, output):
        of_norms.update((norm.weight.dtype, given[0].dtype, output.dtype))

    for module in (model.norm, model.blocks["0"].norm1, model.blocks["0"].norm2):
        module.register_forward_hook(look)
    fully_shard(model.blocks["0"], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    inputs, targets = next(batches(DATA, 2, 16))
    logits = model(inputs)
    loss = mean_loss(logits, targets)
    loss.backward()
    kept = {each.dtype for p in model.parameters() for each in (p, p.grad)}
    return of_norms, logits.dtype, loss.dtype, kept


@pytest.mark.spawns
def test_under_a_policy_norms_and_the_loss_are_in_16_bits_as_lesson_20_says(ranks):
    found = labkit.launch(kinds_under_a_policy, on=ranks, world_size=2, live=False, backend="gloo").results
    assert found == [({torch.bfloat16}, torch.bfloat16, torch.bfloat16, {torch.float32})] * 2


def seeded(seed, depth):
    torch.manual_seed(seed)
    return GPT(depth, 32, 4).double()


# Without ranks


def test_it_learns_and_a_sample_can_be_drawn_from_it():
    torch.manual_seed(0)
    model = GPT(2, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in itertools.islice(batches(DATA, 16, 32), 60):
        loss = mean_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.55, abs=0.1), "as much as if all 256 bytes were as likely: ln 256"
    assert losses[-1] < 3.5
    written = gpt.write(model, "The ", 20, 32)
    assert written.startswith("The ")
    assert written == gpt.write(model, "The ", 20, 32) != gpt.write(model, "The ", 20, 32, seed=1)


def test_a_position_sees_no_later_one():
    model = seeded(0, 2)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 10:] = 0
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_dropout_depends_on_the_place_and_nothing_else():
    place = gpt.Place(step=3)
    whole = gpt.Dropout(0.25, 1, place)
    x = torch.ones(8, 32, 64)
    mask = whole(x)
    assert (mask == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    assert mask.mean().item() == pytest.approx(1, abs=0.02)
    place.samples, place.positions = torch.tensor([2, 5]), torch.tensor([30, 1, 2])
    assert torch.equal(whole(x[:2, :3]), mask[[2, 5]][:, [30, 1, 2]])
    place.samples = place.positions = None
    assert not torch.equal(gpt.Dropout(0.25, 2, place)(x), mask)
    place.step = 4
    assert not torch.equal(whole(x), mask)
    assert torch.equal(whole.eval()(x), x)


def test_a_ragged_batch_ends_where_its_targets_stop_counting():
    inputs, targets = next(batches(DATA, 16, 64, ragged=True))
    lengths = (targets != IGNORED).sum(1)
    assert lengths.min() >= 16
    assert lengths.max() <= 64
    assert len(lengths.unique()) > 4
    for row, length in enumerate(lengths):
        assert torch.equal(inputs[row, 1:length], targets[row, : length - 1])
        assert not inputs[row, length:].any()


def test_stages_together_are_the_model():
    whole = seeded(0, 4)
    tokens = torch.randint(256, (2, 16))
    stages = [gpt.stage(seeded(0, 4), index, 3) for index in range(3)]
    assert sorted(name for part in stages for name in part.state_dict()) == sorted(whole.state_dict())
    x = tokens
    for part in stages:
        x = part(x)
    assert torch.equal(x, whole(tokens))
    with pytest.raises(ValueError, match="2 blocks cannot be cut into 3 stages; make the model deeper"):
        gpt.stage(seeded(0, 2), 0, 3)


def test_experts_take_no_more_than_they_have_room_for():
    torch.manual_seed(0)
    layer = Experts(16, 4).double()
    layer.FACTOR = 0.5
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 20, 16, dtype=torch.float64)
    assert layer.capacity(20) == 3
    found = layer(x)
    gates, chosen = layer.router(x).softmax(-1).max(-1)
    dropped = 0
    for sample in range(3):
        taken = [0] * 4
        for position in range(20):
            expert = chosen[sample, position]
            taken[expert] += 1
            expected = torch.zeros(16, dtype=torch.float64)
            if taken[expert] <= 3:
                hidden = torch.nn.functional.gelu(x[sample, position] @ layer.up[expert])
                expected = gates[sample, position] * (hidden @ layer.down[expert])
            else:
                dropped += 1
            assert torch.allclose(found[sample, position], expected)
    assert dropped > 0
    assert layer.dropped == pytest.approx(dropped / 60)
    assert layer.load.tolist() == chosen.flatten().bincount(minlength=4).tolist()


def test_a_bias_decides_which_expert_is_chosen_and_not_how_much_it_counts():
    torch.manual_seed(0)
    layer = Experts(16, 4).double()
    layer.FACTOR = 4
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 20, 16, dtype=torch.float64)
    unbiased = layer(x)
    layer.bias = torch.zeros(4)
    assert torch.equal(layer(x), unbiased)
    layer.bias[2] = 2  # no odds are that high
    found = layer(x)
    assert layer.load.tolist() == [0, 0, 60, 0]
    gate = layer.router(x).softmax(-1)[..., 2:3]
    assert torch.allclose(found, gate * (torch.nn.functional.gelu(x @ layer.up[2]) @ layer.down[2]))
