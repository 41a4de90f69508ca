"""What is advised follows from its rows, and every row says what it assumes. No process."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch import nn

import labkit
from labkit.comparison.comparison import Comparison
from labkit.comparison.hardware import DEVICES, LINKS, device_of, link_of
from labkit.comparison.measured import Measured
from labkit.comparison.program import Piece, Program, Work
from labkit.comparison.timed import Timed
from labkit.scaling import CostModel, fit
from labkit.scaling.advice import ROOM, Row, recommend
from labkit.scaling.known import of_model
from tests.scaling.models import SIX, ResidualCNN, loss


def row(way, held_gb=1.0, fits=True, step_s=1.0, efficiency=0.9, equal="yes"):
    return Row(way, held_gb, fits, step_s, step_s / 2, 2 * step_s, efficiency, equal, "")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [row("one process", step_s=8), row("DDP", step_s=1.1)],
            "DDP: 1,100 ms a step, 7.27 times as fast as one device.",
        ),
        (
            [row("one process", fits=False, held_gb=99), row("FSDP2", step_s=1)],
            "FSDP2.*one device would have to hold 99 GB",
        ),
        ([row("one process", step_s=8), row("DDP"), row("ZeRO-1", step_s=0.95)], "DDP: .*ZeRO-1 cannot be told apart"),
        ([row("one process", step_s=8), row("DDP", efficiency=0.4)], "Its efficiency is 40%: a larger batch"),
        ([row("one process", step_s=8), row("DDP", equal="no: BatchNorm")], "not equal to one process: BatchNorm"),
        ([row("one process", step_s=1), row("DDP", step_s=2)], "^one process: "),
        ([row("one process", fits=False, held_gb=9), row("DDP", fits=False, held_gb=5)], "Nothing fits: DDP.*5 GB"),
        ([row("DDP", fits=None, step_s=math.nan)], "Not known"),
        ([row("DDP"), row("GPipe", fits=None, step_s=math.nan)], "Not known: GPipe."),
    ],
)
def test_the_sentence_follows_from_the_rows(rows, said):
    import re

    assert re.search(said, recommend(rows, 8)), recommend(rows, 8)


def large():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(20_000, 20_000), *(nn.Linear(20_000, 20_000) for _ in range(11)))


def of_large(samples):
    return torch.empty(samples, 20_000, device="meta"), torch.empty(samples, 20_000, device="meta")


def test_what_does_not_fit_on_a_device_is_cut_or_sharded():
    said = labkit.advise(large(), of_large(512), gpus=8, device="A100")
    frame = said.frame()
    assert frame.loc["DDP", "fits"] == "no"
    assert frame.loc["FSDP2", "fits"] == "yes"
    assert frame.loc["FSDP2", "held GB"] < ROOM * 80 < frame.loc["DDP", "held GB"]
    assert "DDP, recomputed" in frame.index, "what does not fit is asked again"
    assert (frame["from ms"] <= frame["step ms"]).all()
    assert (frame["step ms"] <= frame["to ms"]).all()
    assert frame["assumes"].str.contains("A100 at 85% of its peaks").all()
    assert "one device would have to hold" in said.recommendation
    html = said._repr_html_()
    assert "NVIDIA A100" in html
    assert "FSDP2" in html
    assert "ms a step" in str(said)


def test_the_reader_changes_an_efficiency():
    slow = dataclasses.replace(DEVICES["A100"], efficiency=0.425)
    step_ms = [
        labkit.advise(large(), of_large(4096), gpus=1, device=each).frame().loc["one process", "step ms"]
        for each in (DEVICES["A100"], slow)
    ]
    assert step_ms[1] == pytest.approx(2 * step_ms[0], rel=0.05)


def test_what_is_not_known_is_said_and_costs_no_row():
    batch = SIX["U-Net"][1](32)
    said = labkit.advise(SIX["U-Net"][0](), batch, gpus=4, device="L4", loss=loss)
    assert "GPipe cannot cut this network" in said.frame().loc["GPipe", "assumes"]
    assert said.frame().loc["GPipe", "fits"] == "not known"
    assert "Not known: model parallel, GPipe, 1F1B, DDP × 1F1B" in said.recommendation


def test_whether_a_step_equals_one_process_goes_by_what_the_model_has():
    network = ResidualCNN(norm=nn.BatchNorm2d)
    equal = labkit.advise(network, SIX["residual CNN"][1](32), gpus=2, device="T4").frame()["equal to one process?"]
    assert equal["DDP"] == "no: BatchNorm takes the statistics of a rank's part"
    assert equal["1F1B"] == "no: BatchNorm takes the statistics of a micro-batch"
    assert equal["model parallel"] == "yes, up to rounding"
    plain = labkit.advise(ResidualCNN(), SIX["residual CNN"][1](32), gpus=2, device="T4").frame()
    assert plain["equal to one process?"]["DDP"] == "yes, up to rounding"


def test_over_two_machines_the_network_decides():
    options = {"gpus": 16, "device": "A100", "precision": "bf16 autocast"}
    slow, fast = (
        labkit.advise(large(), of_large(512), network=network, **options).frame().loc["FSDP2", "step ms"]
        for network in ("25 Gb/s", "8 × 200 Gb/s")
    )
    assert slow > 3 * fast


def test_data_parallel_is_for_one_machine_and_never_quicker_than_ddp():
    options = {"device": "A100", "precision": "bf16 autocast"}
    frame = labkit.advise(large(), of_large(512), gpus=8, **options).frame()
    ddp, one = frame.loc["DDP"], frame.loc["DataParallel"]
    assert one["step ms"] > ddp["step ms"]
    assert one["held GB"] == pytest.approx(ddp["held GB"], rel=0.01), "its replica's gradients, or DDP's buckets"
    assert "one process starts all kernels" in one["assumes"]
    assert "DataParallel" not in labkit.advise(large(), of_large(512), gpus=16, **options).frame().index
    (row,) = labkit.advise(large(), of_large(512), gpus=16, ways=["DataParallel"], **options).rows[1:2]
    assert "nn.DataParallel is one process; a machine has 8 devices" in row.assumes


def test_pipelines_side_by_side_are_as_long_as_they_must_be():
    options = {"device": "A100", "precision": "bf16 autocast"}
    said = labkit.advise(large(), of_large(512), gpus=16, **options)
    frame = said.frame()
    row = frame.loc["DDP × 1F1B"]
    assert row["fits"] == "yes"
    assert "equal stages" in row["assumes"]
    assert "chains of" in row["assumes"]
    assert row["held GB"] < frame.loc["DDP", "held GB"]
    assert row["efficiency"] <= 1
    # Two devices, or a prime number of them, make no chains side by side.
    assert "DDP × 1F1B" not in labkit.advise(large(), of_large(512), gpus=2, **options).frame().index
    (alone,) = labkit.advise(large(), of_large(512), gpus=4, ways=["ddp_x_1f1b"], **options).rows[1:2]
    assert "2 chains of 2 equal stages, 8 micro-batches" in alone.assumes
    (none,) = labkit.advise(large(), of_large(512), gpus=2, ways=["ddp_x_1f1b"], **options).rows[1:2]
    assert none.assumes == "not known: 2 devices and 512 samples make no equal chains"


def test_many_short_kernels_take_data_parallel_as_long_for_each_device():
    """Python's lock lets one thread at a time start kernels."""
    network = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    batch = torch.empty(64, 8), torch.empty(64, 8)
    step_ms = labkit.advise(network, batch, gpus=8, device="H100").frame()["step ms"]
    assert 4 < step_ms["DataParallel"] / step_ms["one process"] < 9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "B900"}, "known for device: H100, A100"),
        ({"link": "string"}, "known for link: PCIe 4.*NVLink; got 'string'"),
        ({"device": "T4", "link": "NVLink"}, "T4 has no NVLink"),
        ({"gpus": 0}, "gpus must be a whole number from 1 on, got 0"),
        ({"batch": None}, "advise.. needs a batch"),
        ({"precision": "int3"}, "known for precision"),
    ],
)
def test_a_question_without_sense_is_refused(options, said):
    with pytest.raises((ValueError, KeyError), match=said):
        labkit.advise(ResidualCNN(), **({"batch": SIX["residual CNN"][1](32)} | options))


def test_devices_and_links_have_sources_and_an_efficiency():
    assert {"H100", "A100", "L4", "T4", "laptop"} <= set(DEVICES)
    assert {"PCIe 4", "100 Gb/s", "25 Gb/s"} <= set(LINKS)
    assert all(each.source for each in (*DEVICES.values(), *LINKS.values()))
    assert link_of("", device_of("H100")).gbytes_s == 450
    assert link_of("", device_of("T4")).name == "PCIe 4"
    with pytest.raises(ValueError, match="efficiency is a part of the peak"):
        dataclasses.replace(DEVICES["H100"], efficiency=2)


# From a comparison


class Run:
    error = None

    def __init__(self, name, ranks, samples):
        self.name, self.results, self.world_size = name, ranks, len(ranks)
        rows = [{"rank": rank, "samples": samples} for rank in range(len(ranks)) for _ in range(3)]
        self.history = pd.DataFrame(rows)


def measured(seconds, *pieces, work=None):
    memory = {"parameters": 4e6, "gradients": 4e6, "optimizer state": 8e6, "activations": 2e6}
    return Measured({}, Timed(), (seconds,) * 3, Program(pieces, work=work or {}), math.nan, memory, (memory,))


def compared():
    work = {Work(6e9, 10**6, "32"): 10, Work(0.0, 28 * 10**6, "32", True): 1}
    all_reduce = Piece("all_reduce", size=4 * 10**6, ranks=(0, 1), number=0)
    return SimpleNamespace(
        runs={
            "one process": Run("one process", [measured(0.8, Piece("forward", flops=6e10), work=work)], 64),
            "DDP": Run("DDP", [measured(0.85, Piece("forward", flops=3e10), all_reduce, work=work)] * 2, 32),
        }
    )


def comparison():
    made = Comparison({})
    made.runs = compared().runs
    made.frame = lambda: pd.DataFrame({"weights": ["equal", "equal to 1e-08"]}, index=list(made.runs))
    return made


def test_a_cost_model_of_a_comparison_has_its_bytes_and_buckets_and_nobody_types_them():
    model = CostModel.of(comparison(), device="A100", link="NVLink")
    assert (model.parameter_bytes, model.buckets, model.node_ranks) == (4e6, 1, 8)
    assert model.byte_s == pytest.approx(1 / (300e9 * 0.75))
    at_85_percent_s = 10 * 6e9 / (19.5e12 * 0.85)
    assert model.sample_s * 64 + model.fixed_s == pytest.approx(at_85_percent_s, rel=0.1)
    assert CostModel.of(comparison(), "A100", overlap=0.5).overlap == 0.5
    with pytest.raises(TypeError, match="CostModel.of.. takes a comparison"):
        CostModel.of("DDP")


def test_a_fit_takes_points_and_start_from_a_comparison():
    found = fit(comparison())
    assert found.predict(1, 64).step_s == pytest.approx(0.8, rel=0.05)
    assert found.predict(2, 64).step_s == pytest.approx(0.85, rel=0.05)
    assert set(found.free) == {"sample_s", "byte_s"}


def test_advice_from_a_comparison_says_what_was_measured_and_what_is_not_known():
    said = labkit.advise(comparison(), gpus=8, device="A100")
    assert said.frame().loc["one process", "held GB"] == pytest.approx(0.018)
    assert said.frame().loc["DDP", "fits"] == "yes"
    assert said.frame().loc["DDP", "equal to one process?"] == "measured, DDP: equal to 1e-08"
    assert "ask with the model itself" in said.frame().loc["GPipe", "assumes"]
    with pytest.raises(ValueError, match="has measured nothing"):
        labkit.advise(Comparison({}), gpus=8)


def test_what_is_known_of_a_model_counts_the_optimizer():
    with torch.device("meta"):
        network = nn.Linear(1000, 1000, bias=False)
    batch = torch.empty(8, 1000, device="meta")
    assert of_model(network, batch).optimizer_bytes == 7 * 4e6
    assert of_model(network, batch, optimizer="SGD").optimizer_bytes == 3 * 4e6
    assert of_model(network, batch, precision="bf16").optimizer_bytes == 28 * 1e6


def test_efficiency_is_the_speed_up_over_one_device_by_devices_as_in_a_comparison():
    found = labkit.advise(large(), of_large(512), gpus=8, device="A100", precision="bf16 autocast").frame()
    one_ms, ddp = found["step ms"]["one process"], found.loc["DDP"]
    assert ddp["efficiency"] == pytest.approx(min(1, one_ms / ddp["step ms"] / 8))
    assert found["efficiency"]["model parallel"] < 1 / 4, "one stage computes at a time"


def test_an_optimizer_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="known for optimizer: AdamW"):
        labkit.advise(large(), of_large(8), optimizer="sgd")
