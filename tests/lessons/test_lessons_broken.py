"""A lesson that is broken on purpose is red: its closing assertion says what is wrong."""

from __future__ import annotations

import re
import tempfile

import nbformat
import pytest

from tests.tools.run_notebooks import COLD, FOLDER, declared, execute

BROKEN = {
    "01_collectives": (
        "range(2 * (world_size - 1))",
        "range(2 * (world_size - 1) - 1)",
        "the ring ends with the sum on every rank",
        {"world_size": 2},
    ),
    "02_data_parallel": (
        "sum(used.values()) - W",
        "sum(used.values())",
        "all weights go to every other device",
    ),
    "03_ddp_by_hand": (
        "    flat /= dist.get_world_size()\n",
        "",
        "the three ways end with equal weights",
        {"epochs": 1, "rounds": 5},
    ),
    "04_ddp": (
        "loss.backward()  # averages the gradients, too",
        "loss.backward()\n    optimizer.param_groups[0]['params'][0].grad.mul_(1 + dist.get_rank())",
        "weights are equal on all ranks",
        {"epochs": 1},
    ),
    "05_model_parallel": (
        "t.chunk(pipelines)[part]",
        "t.chunk(pipelines + 1)[part]",
        "cutting the network changes no number",
        {"steps": 12},
    ),
    "06_pipeline": (
        "gpipe, one_f_one_b = pipelining.ScheduleGPipe, pipelining.Schedule1F1B",
        'gpipe = pipelining.ScheduleGPipe\none_f_one_b = type("Schedule1F1B", (gpipe,), {})',
        "and the last stage one at a time",
        {"stage_ms": 20, "repeats": 1},
    ),
    "07_compare": (
        "dist.send(inputs.grad, 0)",
        "dist.send(inputs.grad / 2, 0)",
        "all compute the step of one process",
        {"steps": 14, "batch_size": 256},
    ),
    "08_when_parallel_equals_serial": (
        "AllGather.apply(own)",
        "own[None]",
        "statistics of all ranks do not",
    ),
    "09_scaling": (
        "share = split(batch, n)[worker.rank]",
        "share = batch // n",
        "no sample was lost",
        {"steps": 1, "repeats": 1},
    ),
    "10_who_is_late": (
        "if index % world_size == slow:",
        "if index < 0:",
        "the straggler is found",
    ),
    "11_from_a_cell_to_ranks": (
        "mp.spawn(train, nprocs=world_size)",
        "mp.spawn(print, nprocs=world_size)",
        "plain mp.spawn fails from a cell",
    ),
    "12_when_it_hangs": (
        '"loss": 2.0, "accuracy": 0.5',
        '"loss": 2.0, "accuracy": 2.0',
        "in another order the sums are wrong",
    ),
    "13_when_ranks_differ": (
        "together(train(), 0.9)",
        "together(train(), 0.5)",
        "all stop together",
    ),
    "14_checkpoint": (
        "    optimizer.load_state_dict(state[",
        "    dict(state[",
        "the resumed run ends with the weights of the run never killed",
    ),
    "15_launchers": (
        'start_agent("--standalone", "--nproc-per-node", world_size, out="torchrun")',
        'options[-1] = 1\nstart_agent("--standalone", "--nproc-per-node", world_size, out="torchrun")',
        "one fingerprint from all launchers and ranks, found 2",
        {"steps": 5},
    ),
    "16_resnet_at_scale": (
        "torch.manual_seed((1000 * args.seed + epoch) * world_size + rank)",
        "torch.manual_seed((1000 * args.seed + epoch - first) * world_size + rank)",
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
    "19_sharding": (
        "mine(self.flat, gradient, momentum, lr, *self.ranks)",
        "mine(self.flat, gradient, momentum, lr / 2, *self.ranks)",
        "all end with DDP's weights",
        {"steps": 3},
    ),
    "20_sharding_a_gpt": (
        "(share * loss).backward()",
        "loss.backward()",
        "all that claim so take the same step",
    ),
    "21_tensor_parallel": (
        "whole.qkv.weight.chunk(world_size, dim=0)[part]",
        "whole.qkv.weight.chunk(world_size, dim=0)[0]",
        "heads add up",
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
    "24_experts": (
        "layer.exchange = transformer.expert_parallel.exchange",
        "layer.exchange = lambda slots, apply: slots",
        "tokens come back from their experts",
    ),
    "25_plan_a_run": (
        "ranked = sorted(fitting, key=fitting.get)",
        "ranked = sorted(fitting, key=fitting.get, reverse=True)",
        "the best of all that fit",
    ),
    "26_local_sgd": (
        "if inner and step % inner == 0:",
        "if inner and step % 5 == 0:",
        "bytes within 5 % of the formula",
    ),
}
"""By lesson: what its code says, what it says when broken on purpose, and what its closing assertion then says. And
parameters for a quicker run, where there are any."""

TAKES_A_MINUTE = ("10", "12", "13", "14", "15", "16", "19")


@pytest.mark.notebook
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n,
            marks=[
                pytest.mark.long if n[:2] in TAKES_A_MINUTE else pytest.mark.wide,
                *([pytest.mark.cold] if n in COLD else []),
            ],
        )
        for n in BROKEN
    ],
)
def test_a_broken_lesson_is_red(name, tmp_path, monkeypatch):
    import papermill

    right, wrong, said, *parameters = BROKEN[name]
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    places = [cell for cell in notebook.cells if cell.cell_type == "code" and right in cell.source]
    assert places, f"{name} does not say {right!r}"
    for cell in places:
        cell.source = cell.source.replace(right, wrong)
    file = tmp_path / f"{name}.ipynb"
    nbformat.write(notebook, file)
    unsolved = {"answers": "none"} if "answers" in declared(file) else {}
    # The cells that would have tidied up are not run.
    with tempfile.TemporaryDirectory(prefix="cells-") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        with pytest.raises(papermill.PapermillExecutionError, match=f"AssertionError: {re.escape(said)}"):
            execute(file, tmp_path / "out", dict(*parameters) | unsolved)
