"""The cost model against sums worked out by hand, and its fit against points whose truth is known. No process."""

from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np
import pytest

from course import scaling_plots
from course.formulas import split
from course.scaling.cost_model import STRATEGIES, CostModel, Point, fit

NETWORK = CostModel(
    sample_s=1e-3, fixed_s=5e-3, parameter_bytes=100e6, latency_s=1e-5, byte_s=1e-10, buckets=4, activation_bytes=1e6
)


@pytest.mark.parametrize("batch_size", [8, 100, 126, 127, 128, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 7, 8])
def test_a_split_loses_nothing_and_is_as_even_as_can_be(batch_size, ranks):
    shares = split(batch_size, ranks)
    assert sum(shares) == batch_size
    assert len(shares) == ranks
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True), "the remainder goes to the first ranks"


def test_a_split_says_who_would_have_nothing_to_do():
    with pytest.raises(ValueError, match="a batch of 5 leaves nothing to do for 3 of 8 ranks"):
        split(5, 8)
    with pytest.raises(ValueError, match="ranks must be a whole number from 1 on, got 0"):
        split(5, 0)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on, got -1"):
        split(-1, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_communicates_nothing(strategy):
    parts = NETWORK.parts_s(1, 32, strategy)
    assert parts["communication"] == parts["bubble"] == parts["stragglers"] == 0
    assert NETWORK.step_s(1, 32, strategy) == pytest.approx(5e-3 + 32e-3)


def test_ddp_costs_a_ring_all_reduce():
    # Each rank: 8 samples, 13 ms. The ring: 2 × 3 steps, each 4 buckets × 10 µs and a quarter of 10 ms.
    assert NETWORK.step_s(4, 32) == pytest.approx(13e-3 + 6 * (40e-6 + 2.5e-3))
    assert NETWORK.ring_s(2, 4, 100e6) == pytest.approx(6 * (40e-6 + 2.5e-3))
    assert NETWORK.ring_s(1, 1, 100e6) == 0


def test_the_largest_share_decides():
    assert NETWORK.step_s(3, 32) - NETWORK.step_s(3, 30) == pytest.approx(1e-3)
    assert NETWORK.step_s(3, 33) == NETWORK.step_s(3, 31), "11 + 10 + 10 as 11 + 11 + 11"


def test_fsdp_sends_half_as_much_again():
    ddp, fsdp = (NETWORK.parts_s(8, 64, strategy)["communication"] for strategy in ("DDP", "FSDP"))
    assert fsdp == pytest.approx(1.5 * ddp)


@pytest.mark.parametrize("pieces", [1, 2, 8, 32])
def test_a_pipeline_takes_m_plus_p_minus_1_over_m(pieces):
    free = dataclasses.replace(NETWORK, fixed_s=0, latency_s=0, byte_s=0, stages=4, micro_batches=pieces)
    assert free.step_s(4, 32, "pipeline") == pytest.approx((pieces + 3) / pieces * 32e-3 / 4)


def test_a_pipelines_stages_send_activations_and_gradients_on():
    chain = dataclasses.replace(NETWORK, stages=2, micro_batches=4)
    # 5 times a micro-batch of 8 samples goes over, there and back: 8 MB at 10 GB/s.
    assert chain.parts_s(2, 32, "pipeline")["communication"] == pytest.approx(2 * 5 * (1e-5 + 8e-4))


def test_chains_of_a_pipeline_average_their_part_of_the_gradients():
    quiet = dataclasses.replace(NETWORK, stages=2, activation_bytes=0, latency_s=0)
    assert quiet.parts_s(8, 32, "pipeline")["communication"] == pytest.approx(quiet.ring_s(2, 4, 50e6))
    with pytest.raises(ValueError, match="9 ranks do not make whole chains of 2 stages; take a multiple of 2"):
        quiet.step_s(9, 32, "pipeline")


def test_communication_hides_behind_the_backward_pass_but_for_the_last_bucket():
    def sent_s(**given):
        return dataclasses.replace(NETWORK, **given).parts_s(4, 32)["communication"]

    whole_s = NETWORK.ring_s(2, 4, 100e6)
    assert sent_s(overlap=0.5) == pytest.approx(whole_s - 0.5 * 2 / 3 * 13e-3)
    assert sent_s(overlap=1.0, sample_s=1.0) == pytest.approx(whole_s / 4)
    assert sent_s(overlap=1.0, sample_s=1.0, buckets=1, latency_s=0) == pytest.approx(2 * 3 / 4 * 10e-3)


def test_a_ring_over_machines_is_as_fast_as_the_network_between_them():
    two = dataclasses.replace(NETWORK, node_ranks=8, far_byte_s=1e-9, latency_s=0)
    assert two.ring_s(2, 8, 100e6) == pytest.approx(2 * 7 / 8 * 10e-3)
    assert two.ring_s(2, 16, 100e6) == pytest.approx(2 * 15 / 16 * 100e-3)


MACHINES = dataclasses.replace(
    NETWORK, node_ranks=8, far_byte_s=1e-9, latency_s=0, activation_bytes=0, stages=8, micro_batches=32
)


def sent_s(strategy, **given):
    """Return the seconds that 64 ranks on 8 machines send."""
    return dataclasses.replace(MACHINES, **given).parts_s(64, 1024, strategy)["communication"]


def test_pipelines_inside_machines_send_as_much_between_them_as_ddp():
    ddp_s, pipeline_s = sent_s("DDP"), sent_s("pipeline")
    # Eight rings, one for each stage, share each machine's one link: 8 × 2 × 7/8 × 12.5 MB at 1 GB/s.
    assert pipeline_s == pytest.approx(8 * 2 * 7 / 8 * 12.5e-3)
    assert ddp_s == pytest.approx(2 * 63 / 64 * 100e-3)


def test_a_pipeline_over_machines_sends_features_between_them_and_averages_inside():
    pipeline_s = sent_s("pipeline over machines")
    assert pipeline_s == pytest.approx(2 * 7 / 8 * 1.25e-3), "the ring of a stage is inside a machine"
    with_features_s = sent_s("pipeline over machines", activation_bytes=1e5)
    # Each of 8 chains sends 39 times 4 samples there and back, all through the same link.
    assert with_features_s - pipeline_s == pytest.approx(2 * 39 * 4 * 1e5 * 8 * 1e-9)


def test_a_chain_that_needs_several_machines_has_their_links_to_itself():
    # 8 samples a micro-batch, 47 times, there and back; then 8 rings cross each link with a sixteenth of the gradients.
    features_s, gradients_s = 2 * 47 * 8 * 1e5 * 1e-9, 8 * 2 * 3 / 4 * 6.25e-3
    assert sent_s("pipeline", stages=16, activation_bytes=1e5) == pytest.approx(features_s + gradients_s)


def test_stragglers_cost_what_the_slowest_of_n_costs():
    late = dataclasses.replace(NETWORK, spread=0.1)
    greatest = np.random.default_rng(0).standard_normal((20_000, 16)).max(1).mean()
    assert late.parts_s(16, 160)["stragglers"] == pytest.approx(0.1 * 15e-3 * greatest, rel=0.03)
    assert late.parts_s(1024, 10240)["stragglers"] > 1.7 * late.parts_s(16, 160)["stragglers"]


def test_ranks_without_a_device_share_the_cores_for_all_that_they_compute():
    shared = dataclasses.replace(NETWORK, cores=2)
    assert shared.parts_s(8, 64)["compute"] == pytest.approx(4 * NETWORK.parts_s(8, 64)["compute"])
    chain = dataclasses.replace(shared, stages=4, micro_batches=4)
    alone = dataclasses.replace(NETWORK, stages=4, micro_batches=4)
    assert chain.parts_s(4, 64, "pipeline")["bubble"] == 2 * alone.parts_s(4, 64, "pipeline")["bubble"]


def test_every_number_of_a_cost_model_is_in_its_help():
    documented = CostModel.__doc__ or ""
    assert [f.name for f in dataclasses.fields(CostModel) if f"        {f.name}: " not in documented] == []


def test_ranks_with_a_device_share_the_cores_for_what_is_fixed():
    shared = dataclasses.replace(NETWORK, fixed_cores=2)
    assert shared.parts_s(2, 64)["compute"] == NETWORK.parts_s(2, 64)["compute"]
    assert shared.parts_s(8, 64)["compute"] == pytest.approx(4 * 5e-3 + 8e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sample_s": 0}, "sample_s must be greater than 0"),
        ({"sample_s": -1}, "sample_s must be a number from 0 on, got -1"),
        ({"sample_s": 1, "latency_s": math.nan}, "latency_s must be a number from 0 on, got nan"),
        ({"sample_s": 1, "overlap": 1.5}, "overlap is a share, 0 … 1, got 1.5"),
        ({"sample_s": 1, "buckets": 0}, "buckets must be a whole number from 1 on, got 0"),
        ({"sample_s": 1, "micro_batches": 2.5}, "micro_batches must be a whole number from 1 on, got 2.5"),
    ],
)
def test_a_model_that_cannot_be_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        CostModel(**given)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((0, 32), "ranks must be a whole number from 1 on, got 0"),
        ((2, 0), "batch_size must be a whole number from 1 on, got 0"),
        ((64, 32), "a batch of 32 leaves nothing to do for 32 of 64 ranks"),
        ((2, 32, "dp"), r"known are DDP \(ddp\), FSDP \(fsdp\), pipeline, pipeline over machines \(.*\); got 'dp'"),
    ],
)
def test_a_question_without_sense_is_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        NETWORK.step_s(*asked)


def test_a_strategy_may_be_asked_for_by_its_slug():
    assert NETWORK.step_s(2, 32, "fsdp") == NETWORK.step_s(2, 32, "FSDP") != NETWORK.step_s(2, 32)
    assert NETWORK.step_s(2, 32, "pipeline_over_machines") == NETWORK.step_s(2, 32, "pipeline over machines")


FREE = ("sample_s", "fixed_s", "latency_s", "byte_s")
GUESS = dataclasses.replace(NETWORK, sample_s=3e-3, fixed_s=1e-3, latency_s=5e-5, byte_s=4e-11)
PLACES = [(n, b) for n in (1, 2, 4, 8) for b in (64, 64 * n)]


def synthetic(noise, seed=0, places=PLACES):
    random = np.random.default_rng(seed)
    return [Point(n, b, NETWORK.step_s(n, b) * math.exp(noise * random.standard_normal()), noise) for n, b in places]


def test_a_fit_without_noise_finds_the_truth():
    found = fit(synthetic(0.0), GUESS, FREE)
    for name in FREE:
        assert getattr(found.model, name) == pytest.approx(getattr(NETWORK, name), rel=0.1), name
    assert found.model.buckets == NETWORK.buckets, "what is not free stays"
    assert found.predict(64, 4096).step_s == pytest.approx(NETWORK.step_s(64, 4096), rel=0.02)


def test_a_fit_finds_overlap_too_and_keeps_it_a_share():
    truth = dataclasses.replace(NETWORK, overlap=0.7)
    points = [Point(n, b, truth.step_s(n, b)) for n, b in PLACES]
    found = fit(points, dataclasses.replace(truth, overlap=0.3), ["overlap"])
    assert found.model.overlap == pytest.approx(0.7, abs=0.03)
    assert all(0 < model.overlap < 1 for model in found.drawn)


def test_the_ranges_cover_what_they_say_they_cover():
    inside, wide = [], []
    for seed in range(30):
        found = fit(synthetic(0.03, seed, [place for place in PLACES if place[0] <= 4]), GUESS, FREE, draws=40)
        for n, b in ((8, 64), (16, 1024), (64, 64)):
            step_s, low_s, high_s = found.predict(n, b)
            assert 0 < low_s <= step_s <= high_s
            inside.append(low_s <= NETWORK.step_s(n, b) <= high_s)
            wide.append(high_s / low_s)
    assert statistics.mean(inside) > 0.8
    assert statistics.median(wide) < 2, "and they say something"


def test_farther_out_is_less_sure():
    found = fit(synthetic(0.03, places=[(1, 64), (2, 64), (2, 128), (4, 64), (4, 256)]), GUESS, FREE)

    def width(ranks):
        step_s, low_s, high_s = found.predict(ranks, 64 * ranks)
        return (high_s - low_s) / step_s

    assert width(2) < width(1024)
    ranges = found.ranges()
    assert set(ranges) == set(FREE)
    assert all(0 < low <= high for _, low, high in ranges.values())


def test_as_many_numbers_as_points_leave_an_assumed_error():
    points = synthetic(0.0, places=[(1, 64), (2, 64), (2, 128), (4, 64)])
    assert fit(points, GUESS, FREE).noise == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("points", "free", "said"),
    [
        (PLACES[:3], FREE, r"3 points cannot tell 4 numbers apart \(sample_s, fixed_s, latency_s, byte_s\)"),
        (PLACES, (), "8 points cannot tell 0 numbers apart"),
        (PLACES, ("speed",), "'speed' cannot be fitted; these can: sample_s, fixed_s"),
        (PLACES, ("buckets",), "'buckets' cannot be fitted"),
        (PLACES, ("spread",), "the fit needs a guess for spread: give `start` a value greater than 0"),
    ],
)
def test_a_fit_that_cannot_work_says_why(points, free, said):
    with pytest.raises(ValueError, match=said):
        fit(synthetic(0.0, places=points), GUESS, free)


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf])
def test_a_step_time_that_is_none_is_refused(step_s):
    with pytest.raises(ValueError, match=rf"a step takes more than 0 s, got {step_s} for 2 ranks"):
        fit([Point(1, 8, 1.0), Point(2, 8, step_s)], GUESS, ["sample_s"])


def test_a_prediction_wants_a_share():
    with pytest.raises(ValueError, match="within is a share between 0 and 1, got 90"):
        fit(synthetic(0.0), GUESS, ["sample_s"]).predict(2, 8, within=90)


def test_the_lessons_charts_show_the_numbers_and_their_ranges():
    spread = scaling_plots.Spread.of([1.0, 2.0, 4.0])
    assert spread == (2.0, pytest.approx(1.2), pytest.approx(3.6))
    measured, ideal, published = scaling_plots.job({1: spread, 2: spread}, {8: 0.5}, {2: "here"}, "a job").data
    assert list(measured.y) == [2.0, 2.0]
    assert list(measured.error_y.array) == pytest.approx([1.6, 1.6])
    assert list(ideal.y) == [2.0, 1.0]
    assert (list(published.x), published.name) == ([8], "published: 0.5 s")
    seconds = {(kind, n): scaling_plots.Spread(4 / n, 2 / n, 8 / n) for kind in ("strong", "weak") for n in (1, 2)}
    figure = scaling_plots.speed_ups(seconds, "")
    shown = {(line.name, line.xaxis): list(line.y) for line in figure.data}
    assert shown["strong scaling", "x"] == [1, 2]
    assert shown["strong scaling", "x2"] == [1, 1]
    assert (shown["weak scaling", "x"], shown["weak scaling", "x2"]) == ([1, 4], [1, 2])
    assert shown["ideal", "x"] == [1, 2]
    strong = next(line for line in figure.data if line.name == "strong scaling")
    assert list(strong.error_y.array) == [1, 2]
    assert list(strong.error_y.arrayminus) == [0.5, 1]
    panel = scaling_plots.Panel("ranks", {1: 0.1, 2: 0.05}, {1: 0.11}, {2: 0.04})
    predicted, fitted, held_back = scaling_plots.predictions("", panel).data
    assert [list(line.y) for line in (predicted, fitted, held_back)] == [[100, 50], [110], [40]]
    assert (predicted.mode, fitted.mode) == ("lines+markers", "markers")
