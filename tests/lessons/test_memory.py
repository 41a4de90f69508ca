"""What is predicted of a rank's memory, against sums by hand, a real forward pass, real ranks, published figures."""

from __future__ import annotations

import pytest
import torch

import labkit
from course.scaling import fewest_ranks, fits, largest_batch, predict_memory, published, schedules
from course.scaling.published_figures import gpt
from course.transformer import ALL, GPT, mean_loss
from labkit import profiling
from tests.conftest import shared_session
from tests.support.gpt_memory import PARTS, held, predicted

TITLES = (
    "FSDP2",
    "tensor parallel",
    "sequence parallel",
    "context parallel",
    "1F1B",
    "interleaved 1F1B",
    "zero bubble",
)
DEPTH = 4


def of_gpt(title="one process", ranks=1, model=None, **options):
    model = gpt(4, 64, 4, 256) if model is None else model
    return predict_memory(model, title, ranks, 8, 32, **options)


def numbers(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("precision", "each"), [("float64", (8, 8, 16)), ("float32", (4, 4, 8)), ("bf16", (2, 2, 12))])
def test_parameters_gradients_and_state_are_so_many_bytes_a_number(precision, each):
    model = GPT(4, 64, 4)
    (found,) = of_gpt(model=model, precision=precision)
    steps = 4 * len(list(model.parameters()))
    assert (found.parameters, found.gradients) == (each[0] * numbers(model), each[1] * numbers(model))
    assert found.optimizer_state == each[2] * numbers(model) + steps
    assert found.communication == 0
    assert of_gpt(model=model, precision="float32", optimizer="SGD")[0].optimizer_state == 0


@pytest.mark.parametrize(
    ("precision", "dropout", "experts"), [("float64", 0.0, 4), ("float64", 0.1, 0), ("bf16 autocast", 0.1, 0)]
)
def test_what_is_counted_without_computing_is_what_a_real_forward_pass_keeps(precision, dropout, experts):
    torch.manual_seed(0)
    model = GPT(3, 32, 4, dropout, experts)
    model = model.double() if precision == "float64" else model
    tokens = torch.randint(256, (8, 32))
    with profiling.Activations(model.parameters()) as kept:
        with torch.autocast("cpu", torch.bfloat16, precision != "float64"):
            logits = model(tokens)
        loss = mean_loss(logits.float() if precision != "float64" else logits, tokens)
    loss.backward()
    assert of_gpt(model=model, precision=precision)[0].activations == pytest.approx(kept.most, rel=0.002)


@pytest.mark.parametrize(("precision", "logits"), [("bf16", 4), ("float32", 4)])
def test_the_loss_keeps_32_bits_of_every_logit(precision, logits):
    """Korthikanti et al. 2022, section 4.3: 4 s b V."""
    small, large = (of_gpt(model=gpt(2, 64, 4, size), precision=precision)[0].activations for size in (1000, 3000))
    assert large - small == pytest.approx(logits * 8 * 32 * 2000, rel=0.001)


def test_nothing_is_allocated_and_nothing_of_the_caller_is_changed():
    before = torch.get_default_dtype()
    found = predict_memory(gpt(96, 12288, 96, 50257), "FSDP2", 1024, 1024, 2048, "bf16")
    assert len(found) == 1024
    assert found[0].parameters * 1024 == pytest.approx(2 * 175e9, rel=0.01)
    assert torch.get_default_dtype() == before
    assert type(torch.zeros(1)) is torch.Tensor


def test_what_is_shared_out_adds_up_to_the_whole():
    (whole,) = of_gpt()
    for title in ("FSDP2", "GPipe", "1F1B"):
        assert sum(rank.parameters for rank in of_gpt(title, 4)) == whole.parameters
    for ranks in (2, 3, 4):
        states = [rank.optimizer_state for rank in predict_memory(gpt(4, 64, 4, 256), "ZeRO-1", ranks, 12, 32)]
        assert sum(states) == whole.optimizer_state
        assert len(states) == ranks


def test_recomputing_keeps_the_inputs_and_one_block():
    one, two = (of_gpt(model=gpt(depth, 64, 4, 256), recompute=True)[0].activations for depth in (40, 41))
    assert two - one == 8 * 32 * 64 * 4, "a block more is one more input"
    kept = [of_gpt(model=gpt(depth, 64, 4, 256))[0].activations for depth in (40, 41)]
    assert one == 40 * (two - one) + (kept[1] - kept[0]) - (two - one)


@pytest.mark.parametrize("pieces", [4, 8, 13])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_as_many_micro_batches_are_held_as_the_schedules_say(ranks, pieces):
    def most(schedule, rank, stages=1):
        order = schedules.orders(schedule, ranks, pieces, stages)[rank]
        assert [action.what for action in order].count("F") == [action.what for action in order].count("B")
        return schedules.most_kept(order, {action.stage: schedules.Kept(1) for action in order})

    for rank in range(ranks):
        assert most("ScheduleGPipe", rank) == pieces
        assert most("Schedule1F1B", rank) == min(pieces, ranks - rank)
    if pieces % ranks == 0:
        for rank in range(ranks):  # Narayanan et al. 2021, section 2.2
            ahead = min(2 * pieces, 2 * (ranks - rank - 1) + ranks)
            assert most("ScheduleInterleaved1F1B", rank, 2) == min(2 * pieces, ahead + 1)


@pytest.mark.parametrize(
    ("order", "most"),
    [
        ("F0 B0 F1 B1", 100),
        ("F0 I0 W0 F1 I1 W1", 130),
        ("F0 F1 I0 I1 W0 W1", 120 + 130),  # one is between its halves, the other at the end of the first
        ("F0 I0 F1 I1 F2 W0 I2 W1 W2", 120 + 120 + 100),
    ],
)
def test_between_two_backward_passes_is_kept_what_the_second_needs(order, most):
    kept = schedules.Kept(100, most_between=130, between=120)
    assert schedules.most_kept([schedules.Action(one[0], 0, int(one[1])) for one in order.split()], {0: kept}) == most


@pytest.mark.parametrize(
    ("title", "counted"),
    [
        ("interleaved 1F1B", [[9, 15], [10, 10, 10, 17]]),
        ("zero bubble", [[9, 13], [11, 13, 15, 17]]),
    ],
)
def test_as_many_messages_are_there_as_were_counted_on_two_and_on_four_real_ranks(title, counted):
    kind = ALL[title]
    for ranks, messages in zip((2, 4), counted, strict=True):
        orders = schedules.orders(kind.schedule, ranks, kind.micro_batches, kind.stages_per_rank)
        assert [schedules.most_messages(kind.schedule, order, 2 * ranks, 4) for order in orders] == messages


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: of_gpt(model=torch.nn.Linear(2, 2)), "known is the memory of a whole .*GPT, got a Linear"),
        (lambda: of_gpt("DualPipe"), r"known are one process \(one_process\), DDP \(ddp\), .*; got 'DualPipe'"),
        (lambda: of_gpt(precision="fp8"), "known for precision: float64, .*; got 'fp8'"),
        (lambda: of_gpt(optimizer="Muon"), "known for optimizer: AdamW, .*; got 'Muon'"),
        (lambda: of_gpt("DDP", 0), "world_size must be a whole number from 1 on, got 0"),
        (lambda: of_gpt("DDP", 3), "a batch of 8 cannot be cut into 3 equal parts; take a multiple of 3"),
        (lambda: of_gpt("context parallel", 3), "a sequence of 32 cannot be cut into 6 equal parts"),
        (lambda: of_gpt("tensor parallel", 3), "4 heads cannot be cut over 3 ranks; take a multiple of 3 heads"),
        (lambda: of_gpt("one process", 2), "one process does not run on 2 ranks, but on 1"),
        (lambda: of_gpt("1F1B", 8), "4 are too few for 8 ranks"),
        (lambda: of_gpt("zero bubble", 2, recompute=True), "zero bubble is not known with recomputed blocks"),
        (lambda: of_gpt("interleaved 1F1B", 4), "4 blocks cannot be cut into 8 stages; make the model deeper"),
        (
            lambda: of_gpt("data parallel × 1F1B × tensor parallel", 8, gpt(4, 66, 3, 256)),
            "3 heads cannot be cut over 2",
        ),
        (lambda: of_gpt("expert parallel", 2), "0 experts cannot be shared by 2 ranks"),
        (lambda: of_gpt("tensor parallel", 2, GPT(1, 32, 4, experts=2)), "not known for a mixture of experts"),
    ],
)
def test_what_is_not_known_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_published_figures_are_met_though_nothing_was_fitted_to_them():
    points = published()
    assert len(points) >= 10
    assert {point.what: point.error for point in points if abs(point.error) > 0.03} == {}
    assert all("https://" in point.source for point in points)


def test_the_largest_batch_fits_and_the_next_does_not():
    model = gpt(4, 64, 4, 256)
    limit = 40e6
    for title, each in (("DDP", 2), ("GPipe", 4)):
        batch = largest_batch(limit, model, title, 2, 32)
        assert batch > 0
        assert batch % each == 0
        assert fits(limit, model, title, 2, batch, 32)
        assert not fits(limit, model, title, 2, batch + each, 32)
    assert largest_batch(1e6, model, "DDP", 2, 32) == 0, "not even its parameters"
    assert largest_batch(1e12, model, "DDP", 2, 32, most=64) == 64


def test_the_fewest_ranks_are_enough_and_half_of_them_are_not():
    model = gpt(24, 512, 8, 256)
    limit = 400e6
    ranks = fewest_ranks(limit, model, "FSDP2", 64, 32)
    assert ranks > 1
    assert fits(limit, model, "FSDP2", ranks, 64, 32)
    assert not fits(limit, model, "FSDP2", ranks // 2, 64, 32)
    assert fewest_ranks(limit, model, "DDP", 64, 32) is None, "more ranks do not help where each has it all"
    with pytest.raises(ValueError, match="DDP runs on no number of ranks up to 0"):
        fewest_ranks(limit, model, "DDP", 64, 32, most=0)


@pytest.mark.spawns
@pytest.mark.wide
def test_real_ranks_hold_what_was_predicted_part_by_part():
    with shared_session(2) as ranks:
        run = labkit.launch(held, [ALL[title] for title in TITLES], DEPTH, on=ranks, world_size=2, live=False)
    off = {}
    for title in TITLES:
        for rank, expected in enumerate(predicted(ALL[title], 2, DEPTH)):
            for part, size in zip(PARTS, expected, strict=True):
                off[title, rank, part] = size / run.results[rank][title][part] - 1
    assert len(off) == len(TITLES) * 2 * 5
    assert {key: value for key, value in off.items() if abs(value) > 0.05} == {}
