"""How far weights, buffers and curves of two runs are apart, and what is said where there is no number."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from course import benchmark
from course.pitfalls import helpers
from labkit.comparison import comparison as comparison_module
from labkit.comparison.comparison import Comparison
from labkit.comparison.differences import (
    Piece,
    Unknown,
    buffer_names,
    columns,
    greatest,
    largest_difference,
    portable,
    rounding,
    weights_difference,
    whole,
)
from labkit.comparison.measured import Measured
from labkit.comparison.program import Program
from labkit.comparison.reading import curves_apart, mean_curve
from labkit.comparison.timed import Timed
from labkit.monitor.history import History
from labkit.ui.charts import Chart
from tests.comparison.test_comparison import log, run_of
from tests.conftest import shared_session

NAN, INF = math.nan, math.inf


# One tensor


@pytest.mark.parametrize(
    ("one", "other", "off"),
    {
        "equal": ([1.0, 2.0], [1.0, 2.0], 0.0),
        "apart": ([1.0, 2.0], [1.5, 2.0], 0.5),
        "NaN first": ([NAN, 2.0], [1.0, 2.0], NAN),
        "NaN last": ([1.0, NAN], [1.0, 2.0], NAN),
        "NaN in both": ([1.0, NAN], [1.0, NAN], NAN),
        "a causal mask of infinities": ([0.0, -INF], [0.0, -INF], 0.0),
        "one is infinite": ([0.0, INF], [0.0, 1.0], INF),
        "opposite infinities": ([-INF], [INF], INF),
        "booleans": ([True, False], [True, False], 0.0),
        "other booleans": ([True, False], [True, True], 1.0),
        "integers": ([3, 4], [3, 7], 3.0),
        "none at all": ([], [], 0.0),
        "complex": ([1 + 1j], [1 + 4j], 3.0),
    }.values(),
)
def test_the_largest_difference_of_two_tensors(one, other, off):
    found = largest_difference(torch.tensor(one), torch.tensor(other))
    assert found == off or (math.isnan(found) and math.isnan(off))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64])
def test_tensors_of_any_type_are_compared(dtype):
    one, other = torch.tensor([1, 2]).to(dtype), torch.tensor([1, 4]).to(dtype)
    assert largest_difference(one, one) == 0
    assert largest_difference(one, other) == 2
    assert largest_difference(one.double(), other) == 2, "and of two"


def test_a_sparse_tensor_is_compared():
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert largest_difference(dense.to_sparse(), dense) == 0


def test_tensors_of_other_shapes_have_no_difference():
    with pytest.raises(ValueError, match=r"shapes \[3\] and \[3, 1\]"):
        largest_difference(torch.ones(3), torch.ones(3, 1))


@pytest.mark.parametrize("values", [[0.0, NAN], [NAN, 0.0], [0.0, INF, NAN], []])
def test_the_greatest_is_nan_if_there_is_one(values):
    assert math.isnan(greatest(values))
    assert greatest([0.0, 2.0]) == 2.0


def test_what_lessons_compare_with_does_not_lose_nan_either():
    one, other = {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.tensor([0.0, NAN])}
    assert math.isnan(benchmark.difference(one, other))
    assert math.isnan(helpers.spread([one["a"], other["a"], other["b"]]))
    with pytest.raises(ValueError, match="in one network only: b"):
        benchmark.difference(one, {"a": one["a"]})


# All tensors of a run


def rank(**tensors):
    return {name: torch.as_tensor(values) for name, values in tensors.items()}


def test_every_ranks_copy_is_compared_with_the_first_run():
    one = [rank(a=[1.0, 2.0], b=[3.0])]
    assert weights_difference(one, [rank(a=[1.0, 2.0]), rank(b=[3.75])])[:2] == (0.25, "b"), "stages, put together"
    assert weights_difference(one, [rank(a=[1.0, 2.0], b=[3.0]), rank(a=[1.0, 2.25], b=[3.0])])[:2] == (0.125, "a")


def test_a_difference_is_relative_to_the_greatest_number_of_its_tensor():
    small, large = [rank(a=[1e-3, 0.0])], [rank(a=[1e3, 0.0])]
    assert weights_difference(small, [rank(a=[1.1e-3, 0.0])]).off == pytest.approx(0.1)
    assert weights_difference(large, [rank(a=[1.1e3, 0.0])]).off == pytest.approx(0.1)
    assert weights_difference([rank(a=[0.0])], [rank(a=[0.5])]).off == 0.5, "of zeros as it is"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([{}], "not returned"),
        ([rank(a=[1.0, 2.0])], "other names: only in the first run b"),
        ([rank(x=[1.0], b=[3.0])], "other names: only here x; only in the first run a"),
        (
            [rank(**{"module.a": [1.0, 2.0], "module.b": [3.0]})],
            "other names: only here module.a, module.b; only in the first run a, b; return model.module.state_dict()",
        ),
        ([rank(a=[1.0, 2.0], b=[NAN])], "not finite (b)"),
        ([rank(a=[1.0, INF], b=[3.0])], "not finite (a)"),
        ([rank(a=[1.0], b=[3.0])], "not comparable: a: shapes [2] and [1]"),
        ([rank(a=[1.0], b=[NAN])], "not finite (b)"),
        ([rank(a=[1.0, 2.0], b=[3.0]), rank(a=[1.0, NAN], b=[3.0])], "not finite (a)"),
        ([{"a": Unknown("a DTensor of summands"), **rank(b=[3.0])}], "not comparable: a: a DTensor of summands"),
        ([rank(a=[1.0, 2.0], b=[3.0])], "equal"),
        ([rank(a=torch.tensor([1.0, 2.0 + 4e-8], dtype=torch.float64), b=[3.0])], "equal to 2e-08"),
        ([rank(a=[1.0, 2.0], b=[3.06])], "off by 2e-02 (b)"),
    ],
)
def test_equality_in_words(ranks, said):
    found = weights_difference([rank(a=[1.0, 2.0], b=[3.0])], ranks)
    assert found.words(1e-5) == said
    assert math.isnan(found.off) == (said.startswith(("not", "other names")))


def test_how_much_is_rounding_goes_by_the_digits_of_the_weights():
    assert rounding([rank(a=torch.ones(1), n=3)]) == pytest.approx(3.5e-5, rel=0.1)
    assert rounding([rank(a=torch.ones(1).double(), n=3)]) == pytest.approx(1.5e-9, rel=0.1)
    assert rounding([rank(n=3)]) == 0


def bn(mean, weight=1.0, mask=True):
    return rank(**{"0.weight": [weight], "1.running_mean": [mean], "1.num_batches_tracked": 7, "2.mask": [mask]})


def test_buffers_that_differ_by_rank_are_told_from_the_weights():
    ranks = [bn(0.5), bn(0.54)]
    found = columns(ranks, ranks, {"mask"})
    assert found["difference"] == 0
    assert found["buffers off by"] == pytest.approx(0.08)
    assert found["weights"] == "equal; buffers differ by rank, off by 8e-02 (1.running_mean)"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([bn(0.5), bn(0.5)], "equal"),
        ([bn(0.7), bn(0.7)], "equal; buffers off by 4e-01 (1.running_mean)"),
        ([bn(NAN), bn(0.5)], "equal; buffers not finite (1.running_mean)"),
        ([bn(0.5, NAN)], "not finite (0.weight)"),
        ([bn(0.5, 3.0, False)], "off by 2e+00 (0.weight); buffers off in integers (2.mask)"),
        ([bn(0.5) | rank(**{"1.num_batches_tracked": 9})], "equal; buffers off in integers (1.num_batches_tracked)"),
    ],
)
def test_weights_and_buffers_in_words(ranks, said):
    assert columns([bn(0.5)], ranks, {"mask"})["weights"] == said


def test_a_run_without_buffers_has_no_column_for_them():
    assert set(columns([rank(a=[1.0])], [rank(a=[1.0])])) == {"difference", "weights"}


def test_buffers_are_known_by_the_last_part_of_their_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].register_buffer("mask", torch.ones(2))
    model[1].register_buffer("scale", torch.ones(2))
    model.append(nn.ParameterDict({"scale": nn.Parameter(torch.ones(1))}))
    names = buffer_names(model.modules())
    assert names == {"mask", "running_mean", "running_var", "num_batches_tracked"}, "a parameter is called scale, too"


# Sharded tensors


def pieces(full, rows):
    columns_of = torch.arange(full.shape[1])
    return [Piece(full[each], tuple(full.shape), (torch.tensor(each), columns_of)) for each in rows]


def test_pieces_are_put_together_and_compared():
    full = torch.randn(5, 3)
    shards = pieces(full, [[0, 1, 4], [2, 3]])
    assert torch.equal(whole(shards), full.double())
    plain, sharded = [{"w": full}], [{"w": shard} for shard in shards]
    assert (
        weights_difference(plain, sharded).off
        == weights_difference(sharded, plain).off
        == weights_difference(sharded, sharded).off
        == 0
    )
    shards[1].tensor[1, 2] += 0.5 * full.abs().max()
    assert weights_difference(plain, sharded)[:2] == (pytest.approx(0.5), "w")
    assert (
        weights_difference(plain, sharded[:1]).why == "not comparable: w: the ranks have returned 9 of its 15 elements"
    )
    assert weights_difference([{"w": full[:4]}], sharded).why == "not comparable: w: shapes [4, 3] and [5, 3]"


def test_a_plain_tensor_leaves_its_rank_as_a_copy_if_that_is_wanted():
    weight = nn.Parameter(torch.ones(2))
    same, copy = portable(weight), portable(weight, copy=True)
    with torch.no_grad():
        weight.zero_()
    assert (same.tolist(), copy.tolist()) == ([0, 0], [1, 1])
    assert not copy.requires_grad
    assert portable(torch.ones(2, device="meta")).is_meta


class Refuses(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise TypeError("not with me")


def test_a_tensor_that_refuses_everything_is_said_and_ends_nothing():
    found = portable(torch.ones(2).as_subclass(Refuses))
    assert found == Unknown("Refuses: not with me")


def sharded(worker):
    """Two ways to shard a model over four ranks, one in a mesh; the whole is known."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    alone = fully_shard(model())
    states = {"plain": model().state_dict(), "FSDP2": alone.state_dict()}
    states["FSDP2 and TP"] = fully_shard(both, mesh=mesh["dp"]).state_dict()
    return {title: {name: portable(tensor) for name, tensor in state.items()} for title, state in states.items()}


@pytest.mark.spawns
def test_the_parts_of_a_sharded_model_are_compared_by_their_placements():
    with shared_session(4) as ranks:
        results = labkit.launch(sharded, on=ranks, live=False).results
    plain, fsdp, mesh = ([result[title] for result in results] for title in ("plain", "FSDP2", "FSDP2 and TP"))
    assert all(isinstance(part, Piece) for of_rank in (*fsdp, *mesh) for part in of_rank.values())
    for one, other in ((plain, fsdp), (plain, mesh), (mesh, fsdp), (fsdp, plain)):
        assert weights_difference(one, other)[::2] == (0.0, "")
    fsdp[2]["2.weight"].tensor.add_(0.25 * plain[0]["2.weight"].abs().max())
    assert weights_difference(plain, fsdp)[:2] == (pytest.approx(0.25), "2.weight")


# What is launched


def batches(worker, steps):
    generator = torch.Generator().manual_seed(1 + worker.rank)
    return [torch.randn(8, 6, generator=generator) for _ in range(steps)]


def trained(worker, steps, model, wrapped):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs in batches(worker, steps):
        optimizer.zero_grad()
        loss = wrapped(inputs).square().mean()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss.item())
    return model.state_dict()


def network(*more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), *more)
    model.register_buffer("mask", torch.ones(4, 4).tril().bool())
    model.register_buffer("nothing", torch.empty(0))
    return model


def ddp(worker, steps):
    model = network(nn.BatchNorm1d(4))
    return trained(worker, steps, model, DistributedDataParallel(model))


def fsdp(worker, steps):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(network())
    return trained(worker, steps, model, model)


def diverges(worker, steps):
    state = ddp(worker, steps)
    state["0.bias"][-1] = NAN
    worker.log(step=steps, loss=NAN)
    return state


@pytest.mark.spawns
def test_masks_empty_tensors_shards_and_what_diverged_are_compared_and_cost_no_table(capsys):
    with shared_session(2) as ranks:
        compared = labkit.compare(ddp=ddp, again=ddp, nan=diverges, fsdp=fsdp, on=ranks, world_size=2, steps=14)
    frame, said = compared.frame(), compared.table().data["weights, compared with ddp"]
    assert said["ddp"].startswith("equal; buffers differ by rank, off by"), "DDP leaves each rank its statistics"
    assert said["again"] == said["ddp"]
    assert frame.loc["again", "difference"] == 0
    assert frame.loc["again", "loss off by"] == 0
    assert said["nan"].startswith("not finite (0.bias)")
    assert math.isnan(frame.loc["nan", "difference"])
    assert compared.table().data.loc["nan", "final loss"] == "NaN"
    assert said["fsdp"].startswith("other names: only in the first run 1.")
    assert len(compared.pictures()) == 4
    assert "not finite (0.bias)" in capsys.readouterr().out, "where there is no notebook the table is printed"


def halves(worker, steps):
    """DDP that sends its gradients in 16 bits."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.Linear(64, 64, bias=False)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return steps_of(worker, steps, model, wrapped)


def bytes_around(worker, steps):
    """A broadcast of 64 KiB in 8 bits after each step."""
    return steps_of(worker, steps, nn.Linear(64, 64), None, lambda: dist.broadcast(torch.ones(65536).byte(), 0))


def in_pairs(worker, steps):
    """An all-reduce of 64 KiB among two of four ranks after each step."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][worker.rank // 2]
    return steps_of(worker, steps, nn.Linear(64, 64), None, lambda: dist.all_reduce(torch.ones(16384), group=pair))


def steps_of(worker, steps, model, wrapped=None, then=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        (wrapped or model)(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        then()
    worker.log(loss=0.0)


@pytest.mark.spawns
def test_the_formula_goes_by_the_type_and_the_group_of_each_message():
    functions = {"halves": halves, "bytes": bytes_around, "pairs": in_pairs}
    with shared_session(4) as ranks:
        table = labkit.compare(functions, on=ranks, world_size=4, steps=14).frame()
    assert table.loc["halves", "sent KiB"] == 2 * 3 / 4 * 64 * 64 * 2 / 1024
    assert table.loc["bytes", "sent KiB"] == 3 / 4 * 64
    assert table.loc["pairs", "sent KiB"] == 2 * 1 / 2 * 64
    for title, row in table.iterrows():
        assert row["wire KiB"] == pytest.approx(row["sent KiB"], rel=0.25), title


# Curves


def history_of(*ranks, name="loss"):
    """Each rank's (step, value)."""
    history = History(len(ranks))
    for number, calls in enumerate(ranks):
        if calls:
            steps, values = zip(*calls, strict=True)
            record = log(number, [0.1 * at for at in range(len(steps))], **{name: values})
            history.add(record._replace(steps=type(record.steps)("q", steps)))
    return history


def test_the_mean_curve_of_the_whole_history_is_over_the_ranks_that_log():
    history = history_of([(0, 1.0), (1, 2.0), (5, 9.0)], [(0, 3.0), (1, 4.0), (1, 8.0)], [])
    assert mean_curve(history, "loss").to_dict() == {(0, 0): 2.0, (1, 0): 3.0}


def test_one_step_of_a_long_run_that_is_off_is_seen():
    values = np.random.default_rng(0).normal(size=100_000).cumsum()
    other = values.copy()
    other[54_321] += 5.0
    one, two = (history_of(list(enumerate(each))) for each in (values, other))
    thinned = [dict(zip(*each.mean_curve("loss"), strict=True)) for each in (one, two)]
    shared = thinned[0].keys() & thinned[1].keys()
    assert max(abs(thinned[0][step] - thinned[1][step]) for step in shared) < 5.0, "a drawn curve has few of its steps"
    assert curves_apart(one, two, "loss") == (pytest.approx(5.0), "")


@pytest.mark.parametrize(
    ("one", "other", "off", "said"),
    [
        ([(0, 1.0), (1, NAN)], [(0, 1.0), (1, 2.0)], NAN, "not finite (from step 1)"),
        ([(0, 1.0), (7, NAN)], [(0, 1.0), (7, NAN)], NAN, "not finite (from step 7)"),
        ([(0, 1.0), (1, INF)], [(0, 1.0), (1, INF)], 0.0, ""),
        ([(0, INF)], [(0, 1.0)], NAN, "not finite (from step 0)"),
        ([(0, 1.0)], [(1, 1.0)], NAN, "no step in both"),
        ([(2**62, 1.0)], [(2**62, 3.0)], 2.0, ""),
        ([(0, 1.0), (0, 2.0)], [(0, 1.0), (0, 2.5)], 0.5, ""),  # steps counted anew in every epoch
    ],
)
@pytest.mark.filterwarnings("error")
def test_how_far_curves_are_apart(one, other, off, said):
    found = curves_apart(history_of(one), history_of(other), "loss")
    assert found == (pytest.approx(off, nan_ok=True), said)


# The table


def a_run(*losses, **columns_of):
    return run_of(log(0, range(len(losses)), loss=losses, **columns_of), world_size=1)


def test_a_run_that_diverged_says_so_in_the_table_and_not_that_it_is_equal():
    compared = labkit.compare({"good": a_run(2.0, 1.0, 0.5), "bad": a_run(2.0, 1.0, NAN)})
    frame, said = compared.frame(), compared.table().data
    assert math.isnan(frame.loc["bad", "loss off by"])
    assert said.loc["bad", "loss off by"] == "not finite (from step 2)"
    assert said.loc["bad", "final loss"] == "NaN"
    assert said.loc["good", "loss off by"] == 0
    assert "not finite (from step 2)" in compared.table().to_html()


def test_what_was_not_logged_is_left_empty_and_nan_is_not():
    silent = run_of(log(0, [1], other=[1.0]), world_size=1)
    rows = re.findall("<td[^>]*>(.*?)</td>", labkit.compare({"a": a_run(1.0), "silent": silent}).table().to_html())
    assert rows.count("") == 2, "its final loss, and how far that is off"
    assert "samples" not in "".join(rows)
    assert not any("nan" in row.lower() for row in rows)
    assert ">NaN</td>" in labkit.compare({"a": a_run(1.0), "b": a_run(1.0, accuracy=[NAN])}).table().to_html()


class Broken(Measured):
    """A measurement whose columns cannot be had."""

    @property
    def weights(self):
        raise KeyError("<no column>")


def test_a_column_that_cannot_be_computed_costs_neither_table_nor_pictures(monkeypatch, caplog):
    run = a_run(2.0, 1.0)
    run._state.ranks[0].result = Broken(None, Timed(), (), Program(), 0.0, {})
    compared = labkit.compare({"plain": a_run(2.0, 1.0), "broken": run})
    monkeypatch.setattr(comparison_module, "samples_per_s", lambda run: 1 / 0)
    frame = compared.frame()
    assert frame["final loss"].tolist() == [1.0, 1.0]
    table = compared.table()
    assert table.data.loc["broken", "weights, compared with broken"] == "not comparable: KeyError: '<no column>'"
    assert "&lt;no column&gt;" in table.to_html()
    monkeypatch.setattr(Comparison, "figure", lambda *_: 1 / 0)
    (picture,) = compared.pictures()
    assert isinstance(picture, Chart)
    assert picture.layout.annotations[0].text == "not comparable: ZeroDivisionError: division by zero"


def test_titles_and_errors_are_escaped_in_the_table():
    table = labkit.compare({"<b>bold</b>": a_run(1.0)}).table().to_html()
    assert "<b>" not in table
    assert "&lt;b&gt;bold" in table


def test_exercises_do_not_take_nan_for_right():
    from course.exercises.base import find

    exercise = find("waiting_and_transfer")
    trial = SimpleNamespace(
        call=lambda entered, ended: [(0.0, NAN) for _ in entered],
        require=lambda condition, message: condition or pytest.fail(message, pytrace=False),
    )
    with pytest.raises(pytest.fail.Exception, match="rank 0 has"):
        exercise.try_out(trial, entered=(1.0,), ended=(1.5,))
