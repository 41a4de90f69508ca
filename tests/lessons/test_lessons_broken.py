"""A lesson that is broken on purpose is red: its closing assertion says what is wrong. Only needed cells are run."""

from __future__ import annotations

import re
import tempfile

import nbformat
import pytest

from tests.support.slices import slice_for
from tests.support.tiers import few
from tests.tools.run_notebooks import FOLDER, execute

BROKEN = {
    "11_from_a_cell_to_ranks": (
        "mp.spawn(train, nprocs=world_size)",
        "mp.spawn(print, nprocs=world_size)",
        "plain mp.spawn fails from a cell",
    ),
    "10_who_is_late: no helpers": (
        "DataLoader(Slow(), batch_size=5, num_workers=num_workers, **several)",
        "DataLoader(Slow(), batch_size=5)",
        "loader processes load at the same time",
    ),
    "10_who_is_late: two for one": (
        "num_workers=num_workers, **several",
        "num_workers=2 * num_workers, **several",
        "one worker loads one at a time",
    ),
    "01_collectives": (
        "range(2 * (world_size - 1))",
        "range(2 * (world_size - 1) - 1)",
        "the ring ends with the sum on every rank",
        {"world_size": 2},
    ),
    "01_collectives: fewer bytes": (
        "torch.zeros(size_bytes // 4,",
        "torch.zeros(2**22 // size_bytes,",
        "a byte costs something",
        {"world_size": 2},
    ),
    "01_collectives: another place": (
        "list(x.split(1))",
        "list(x.flip(0).split(1))",
        "scatter: rank r gets piece r",
        {"world_size": 2},
    ),
    "02_data_parallel": (
        "sum(used.values()) - W",
        "sum(used.values())",
        "all weights go to every other device",
    ),
    "02_data_parallel: buffers copied": (
        "mine(norm, flat, device_list)",
        "norm(flat)",
        "BatchNorm saw the first piece",
        {"steps": 8},
    ),
    "02_data_parallel: whole batches": (
        "each.chunk(worker.world_size)[worker.rank]",
        "each.chunk(worker.world_size)[0]",
        "DDP's ranks, taken together, draw it too",
        {"steps": 8},
    ),
    "03_ddp_by_hand": (
        "    flat /= dist.get_world_size()\n",
        "",
        "the three ways end with equal weights",
        {"epochs": 1, "rounds": 5},
    ),
    "03_ddp_by_hand: few calls": (
        "seconds(average_each, plain)",
        "seconds(average_flat, plain)",
        "one by one takes at least three times as long",
        {"epochs": 1, "rounds": 20},
    ),
    "04_ddp": (
        "loss.backward()  # averages the gradients, too",
        "loss.backward()\n    optimizer.param_groups[0]['params'][0].grad.mul_(1 + dist.get_rank())",
        "weights are equal on all ranks",
        {"epochs": 1},
    ),
    "04_ddp: one bucket": (
        "bucket_cap_mb=bucket_cap_mb",
        "bucket_cap_mb=25",
        "twelve layers, 12 buckets of 1 MiB",
    ),
    "04_ddp: dealt out once": (
        "self.epoch, self.seed",
        "0, self.seed",
        "set_epoch deals anew",
    ),
    "26_local_sgd": (
        "if inner and step % inner == 0:",
        "if inner and step % 5 == 0:",
        "bytes within 5 % of the formula",
    ),
    "26_local_sgd: data alike": (
        "order = labels.argsort() if is_sorted else torch",
        "order = torch",
        "with digits of their own further still",
    ),
    "05_model_parallel": (
        "t.chunk(pipelines)[part]",
        "t.chunk(pipelines + 1)[part]",
        "cutting the network changes no number",
        {"steps": 12},
    ),
    "05_model_parallel: waiting counted": (
        'mock.patch("torch.autograd.backward", backward)',
        'mock.patch("torch.distributed.recv", clock.timed("backward", dist.recv))',
        "each stage waits for the other",
        {"steps": 12},
    ),
    "06_pipeline": (
        "gpipe, one_f_one_b = pipelining.ScheduleGPipe, pipelining.Schedule1F1B",
        'gpipe = pipelining.ScheduleGPipe\none_f_one_b = type("Schedule1F1B", (gpipe,), {})',
        "and the last stage one at a time",
        {"stage_ms": 20, "repeats": 1},
    ),
    "06_pipeline: slow stages": (
        "stage_ms / 1000 / 3 * len(values)",
        "stage_ms / 1000 / 2 * len(values)",
        "a piece lasts as long as the formula has it",
        {"stage_ms": 40, "repeats": 1},
    ),
    "06_pipeline: another formula": (
        "on_ideal_devices(step, m) / ((m + p - 1)",
        "on_ideal_devices(step, m) / ((m + p)",
        "the order is worth what the formula says",
        {"stage_ms": 20, "repeats": 1},
    ),
    "19_sharding": (
        "mine(self.flat, gradient, momentum, lr, *self.ranks)",
        "mine(self.flat, gradient, momentum, lr / 2, *self.ranks)",
        "all end with DDP's weights",
        {"steps": 3},
    ),
    "07_compare": (
        "dist.send(inputs.grad, 0)",
        "dist.send(inputs.grad / 2, 0)",
        "all compute the step of one process",
        {"steps": 14, "batch_size": 256},
    ),
    "07_compare: no second copy": (
        "model = DistributedDataParallel(model)",
        "model = DistributedDataParallel(model, gradient_as_bucket_view=True)",
        "and a second copy of the gradients",
        {"steps": 14, "batch_size": 256},
    ),
    "07_compare: whole batches": (
        "t.chunk(worker.world_size)[worker.rank] for t",
        "t for t",
        "each rank of DDP computes its part",
        {"steps": 14, "batch_size": 256},
    ),
    "09_scaling": (
        "share = split(batch, n)[worker.rank]",
        "share = batch // n",
        "no sample was lost",
        {"steps": 1, "repeats": 1},
    ),
    "09_scaling: another batch": (
        "np.dot(counts(*batch_of[key]), found)",
        "np.dot(counts(key[1], batch_size), found)",
        "points held back are within 35 %",
        {"steps": 1, "repeats": 1},
    ),
    "09_scaling: no straggler": (
        "late = 1 + spread * slowest",
        "late = 1",
        "with a link that cannot be",
        {"steps": 1, "repeats": 1},
    ),
    "08_when_parallel_equals_serial": (
        "AllGather.apply(own)",
        "own[None]",
        "statistics of all ranks do not",
    ),
    "08_when_parallel_equals_serial: fewer images": (
        "DataLoader(train_part, batch // worker.world_size, sampler=sampler)",
        "DataLoader(train_part, batch // worker.world_size - 1, sampler=sampler, drop_last=True)",
        "the same images",
    ),
    "14_checkpoint": (
        "    optimizer.load_state_dict(state[",
        "    dict(state[",
        "the resumed run ends with the weights of the run never killed",
    ),
    "14_checkpoint: not copied": (
        "pool.submit(write, step, state)",
        "pool.submit(write, step, copy.deepcopy(state))",
        "staging is the copy",
    ),
    "14_checkpoint: another step": (
        "return first, checkpoint.step, None",
        "return first, checkpoint.step - 1, None",
        "one step for all",
    ),
    "12_when_it_hangs": (
        '"loss": 2.0, "accuracy": 0.5',
        '"loss": 2.0, "accuracy": 2.0',
        "in another order the sums are wrong",
    ),
    "10_who_is_late: not dealt out": (
        "sleep_s[worker.rank :: worker.world_size]",
        "sleep_s[worker.rank * steps :][:steps]",
        "dealt out, the ranks wait less",
    ),
    "13_when_ranks_differ": (
        "together(train(), 0.9)",
        "together(train(), 0.5)",
        "all stop together",
    ),
    "10_who_is_late": (
        "if index % world_size == slow:",
        "if index < 0:",
        "the straggler is found",
    ),
    "10_who_is_late: in turns": (
        "range(worker.rank * share, (worker.rank + 1) * share)",
        "in_turns(worker)",
        "in blocks nobody is late",
    ),
    "10_who_is_late: one bucket": (
        "bucket_cap_mb=2",
        "bucket_cap_mb=100",
        "buckets travel meanwhile",
    ),
    "15_launchers": (
        'start_agent("--standalone", "--nproc-per-node", world_size, out="torchrun")',
        'options[-1] = 1\\nstart_agent("--standalone", "--nproc-per-node", world_size, out="torchrun")',
        "one fingerprint from all launchers and ranks, found 2",
        {"steps": 5},
    ),
    "16_resnet_at_scale": (
        "torch.manual_seed((1000 * args.seed + epoch) * world_size + rank)",
        "torch.manual_seed((1000 * args.seed + len(accuracies) - is_there[0]) * world_size + rank)",
        "a run that was killed ends as one that was not",
    ),
    "17_pitfalls_starting": (
        "sampler.set_epoch(epoch)",
        "pass",
        "set_epoch shuffles",
    ),
    "18_pitfalls_training": (
        "found / worker.world_size if divide",
        "found if divide",
        "the mean is one process's gradient",
    ),
    "20_sharding_a_gpt": (
        "            block.forward = functools.partial(checkpoint, block.forward, **options)",
        "            pass",
        "recomputation keeps little",
    ),
    "20_sharding_a_gpt: another second time": (
        "block.forward = functools.partial(checkpoint, block.forward, **options)",
        "block.forward = functools.partial(checkpoint, block.forward, **options)\n            model.eval()",
        "the same gradients",
    ),
    "20_sharding_a_gpt: nothing kept": (
        "reshard_after_forward=reshard",
        "reshard_after_forward=True",
        "as the text says",
    ),
    "20_sharding_a_gpt: a mean of means": (
        "(share * loss).backward()",
        "loss.backward()",
        "all that claim so take the same step",
    ),
    "21_tensor_parallel": (
        "whole.qkv.weight.chunk(world_size, dim=0)[part]",
        "whole.qkv.weight.chunk(world_size, dim=0)[0]",
        "heads add up",
    ),
    "21_tensor_parallel: the same batch": (
        "times * batch_size, sequence",
        "batch_size, sequence",
        "rows send with the batch, columns do not",
    ),
    "22_cutting_the_sequence": (
        "mean = mean * (total - both).exp() + (scores - both).exp() @ values",
        "mean = mean + (scores - both).exp() @ values",
        "a softmax can be taken in pieces",
    ),
    "23_pipelines_side_by_side": (
        '{"F": 1, "B": 2, "I": 1, "W": 1}',
        '{"F": 1, "B": 3, "I": 1, "W": 1}',
        "as long as the formulas",
        {"unit_ms": 4, "repeats": 1},
    ),
    "23_pipelines_side_by_side: nothing put off": (
        "zb_h1(rank, p, m)",
        "zb_h1(0, p, m)",
        "as long as the formulas",
        {"unit_ms": 4, "repeats": 1},
    ),
    "24_experts": (
        "layer.exchange = transformer.expert_parallel.exchange",
        "layer.exchange = lambda slots, apply: slots",
        "tokens come back from their experts",
    ),
    "24_experts: no balance": ("(loss + extra).backward()", "loss.backward()", "balance drops fewer"),
    "24_experts: as many experts": (
        "functools.partial(double, count)",
        "functools.partial(double, experts)",
        "with more experts DDP sends more",
    ),
    "25_plan_a_run": (
        "ranked = sorted(fitting, key=fitting.get)",
        "ranked = sorted(fitting, key=fitting.get, reverse=True)",
        "the best of all that fit",
    ),
}
"""By lesson, and what is wrong with it where it is broken in several ways: what its code says, what it says when broken
on purpose, and what its closing assertion then says. And parameters for a quicker run, where there are any.
"""
WHOLE = {
    "15_launchers": "the script that one cell writes is run by others",
    "16_resnet_at_scale": "the script that one cell writes is run by others",
}
"""Lessons whose closing assertion needs what cannot be seen from the names that its cells use."""


def as_parameter(broken):
    """`make test-wide` plants one mistake in each lesson, and none where that takes a minute."""
    takes_long = broken[:2] in ("10", "12", "13", "14", "16", "19") or broken == "15_launchers"
    return pytest.param(broken, marks=pytest.mark.long if ":" in broken or takes_long else ())


@pytest.mark.notebook
@pytest.mark.parametrize("broken", few(map(as_parameter, BROKEN), 8))
def test_a_broken_lesson_is_red(broken, tmp_path, monkeypatch):
    """Only the cells that the assertion needs are run; all of them run above, where nothing is broken."""
    import papermill

    right, wrong, said, *parameters = BROKEN[broken]
    name = broken.partition(":")[0]
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    places = [cell for cell in notebook.cells if cell.cell_type == "code" and right in cell.source]
    assert places, f"{name} does not say {right!r}"
    for cell in places:
        cell.source = cell.source.replace(right, wrong)
    file = tmp_path / f"{name}.ipynb"
    nbformat.write(notebook if name in WHOLE else slice_for(notebook, said), file)
    # The cells that would have tidied up may not be among those that are run.
    with tempfile.TemporaryDirectory(prefix="cells-") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        with pytest.raises(papermill.PapermillExecutionError, match=f"AssertionError: {re.escape(said)}"):
            execute(file, tmp_path / "out", *parameters)
