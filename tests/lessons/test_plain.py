"""The scripts that lessons show or write: whole, tried, and equal to the lesson's own result, or to each other."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import course
import labkit
from tests.conftest import LONG_S
from tests.lessons.test_notebooks import NOTEBOOKS
from tests.support.tiers import few
from tests.tools.run_notebooks import FOLDER, LESSONS

PLAIN = sorted((FOLDER / "plain").glob("*.py"))
KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def of_lesson(name, **names):
    """The names of a lesson's parameters, imports and functions. `names` are what else its functions use."""
    train_set, test_set = course.datasets.load("digits")
    found = {"__name__": "__main__", "train_set": train_set, "test_set": test_set}  # so that they travel by value
    for cell in NOTEBOOKS[name].cells:
        is_plain_python = cell.cell_type == "code" and not re.search(r"^%|= [!%]", cell.source, re.MULTILINE)
        if is_plain_python and "exercise" not in cell.metadata.get("tags", []):
            body = [node for node in ast.parse(cell.source).body if isinstance(node, KEPT) or is_plain(node)]
            exec(compile(ast.Module(body, []), f"lesson {name}", "exec"), found)
    found.update(names)
    return found


def is_plain(statement):
    """Whether it gives a name a literal, as those of a parameters cell do."""
    try:
        return isinstance(statement, ast.Assign) and ast.literal_eval(statement.value) is not ...
    except ValueError:
        return False


@pytest.fixture
def run(tmp_path):
    """Run a script beside digits.pt, its ranks started by itself or, with `by_torchrun`, by torchrun; its output."""
    torch.save(course.datasets.load("digits").train.tensors(), tmp_path / "digits.pt")

    def start(script, *options, by_torchrun=0):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(by_torchrun)]
        launcher += ["--log-dir", str(tmp_path)]  # its own lies in the folder for temporary files, and stays there
        command = [sys.executable, *(launcher if by_torchrun else []), FOLDER / "plain" / script]
        given = ["digits.pt"] if "digits.pt" in (FOLDER / "plain" / script).read_text() else []
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2))}
        environment["PYTHONPATH"] = str(FOLDER)  # scripts of big models import the course's GPT
        return subprocess.Popen(
            [*map(str, command), *given, *map(str, options)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(script, *options, by_torchrun=0, ends_with=0):
        process = start(script, *options, by_torchrun=by_torchrun)
        try:
            said, errors = process.communicate(timeout=LONG_S)
        finally:
            process.kill()
        assert process.returncode == ends_with, errors[-3000:]
        return said

    run.folder, run.start = tmp_path, start
    return run


def losses_of_one_process(model, batches, lr):
    """The losses of a model that this process trains on some batches."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def apart(some, others):
    """The greatest difference of two networks' tensors, taken in order: their names may differ."""
    pairs = zip(some.values(), others.values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_each_script_is_shown_by_a_lesson_and_needs_no_labkit():
    shown = "\n".join(cell.source for lesson in NOTEBOOKS.values() for cell in lesson.cells)
    for script in PLAIN:
        assert len(re.findall(rf'course\.script\(\s*"plain/{script.name}"', shown)) == 1, script
        assert "labkit" not in script.read_text()


def test_a_script_is_shown_from_its_file(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("if 1 < 2:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    shown = course.script("a.py", "one file & no more")
    assert shown.source == (tmp_path / "a.py").read_text()
    assert "<details>" in shown._repr_html_()
    assert "if 1 &lt; 2:" in shown._repr_html_()
    assert "one file &amp; no more" in shown._repr_html_()
    assert repr(shown) == "The same without labkit: one file & no more (a.py)"
    with pytest.raises(FileNotFoundError, match=r"no b\.py in .*: it lies beside the lessons"):
        course.script("b.py", "")


def test_a_diff_has_what_a_script_adds_to_that_of_an_earlier_lesson(tmp_path):
    lesson = FOLDER / "00_start_here.ipynb"
    before = course.written(lesson)
    (tmp_path / "train.py").write_text(before.replace("import os\n", "import os\nimport <b>\n"))
    shown = course.diff(lesson, tmp_path / "train.py")
    assert [line for line in repr(shown).splitlines() if line[0] in "+-"] == ["+import <b>"]
    assert "+import &lt;b&gt;" in shown._repr_html_()


@pytest.mark.spawns
@pytest.mark.parametrize(("script", "by_torchrun"), few([("ddp_torchrun.py", 2), ("ddp_spawn.py", 0)], 2))
def test_ddp_ends_with_the_weights_of_lesson_04(script, by_torchrun, run, ranks):
    options = () if by_torchrun else ("--world-size", 2)
    assert "epoch 0: loss" in run(script, "--epochs", 1, *options, by_torchrun=by_torchrun)
    train = of_lesson("04", over_all=course.exercises.find("mean_accuracy").solution)["train"]
    lesson = labkit.launch(train, 1, on=ranks, seed=0, live=False)
    assert apart(torch.load(run.folder / "weights.pt"), lesson.results[0]["weights"]) <= 1e-5


@pytest.mark.spawns
def test_the_file_of_lesson_00_trains_as_one_process_does(run):
    """Those of 03 to 06 are compared with it, and with each other, by their lessons."""
    train_set = course.datasets.load("digits").train
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=0, drop_last=True)
    torch.manual_seed(0)
    batches = DataLoader(train_set, 48, sampler=sampler, drop_last=True)
    losses = losses_of_one_process(course.models.ConvNet(), batches, 0.02)
    said = run(written_by("00", run.folder), "--data", "digits.pt", "--epochs", 1, by_torchrun=2)
    (loss,) = re.findall(r"^epoch 0: loss ([\d.]+)", said, re.MULTILINE)
    assert float(loss) == pytest.approx(sum(losses) / len(losses), abs=1e-3), "added in another order"


@pytest.mark.parametrize("lesson", ["00", "03", "04", "05", "06"])
def test_the_files_that_lessons_write_bind_nccl_to_a_device_and_do_not_wait_for_it_in_every_step(lesson):
    text = course.written(next(path for path in LESSONS if path.name.startswith(lesson)))
    assert 'device_id=device if backend == "nccl" else None' in text
    assert "if step % 5 == 0:" in text.partition("labkit.log(")[0].splitlines()[-2]
    if "checkpoint" in text:
        assert 'map_location="cpu"' in text
        assert "broadcast_object_list" in text, "rank 0 alone asks whether there is one"
        assert text.index("network.eval()") < text.index("torch.no_grad()") < text.index("network.train()")


@pytest.mark.spawns
def test_averaging_by_hand_ends_with_the_weights_of_lesson_03(run, ranks):
    said = run("average_by_hand.py", "--epochs", 1)
    assert said.count("epoch 0: loss") == 2
    names = of_lesson("03", epochs=1)
    lesson = labkit.launch(names["train"], names["after_backward"](names["average_each"]), on=ranks, live=False)
    assert apart(torch.load(run.folder / "weights.pt"), lesson.results[0]["weights"]) <= 1e-9


@pytest.mark.spawns
def test_a_hang_names_the_rank_that_is_missing_and_leaves_every_ranks_stack(run):
    said = run("find_the_hang.py", "--late", 2, "--silent-s", 1, by_torchrun=3, ends_with=1)
    assert said == "missing: rank 2\n"
    stacks = [(run.folder / f"stacks-{rank}.txt").read_text() for rank in range(3)]
    assert ["in load_batch" in stack for stack in stacks] == [False, False, True]
    assert ["in monitored_barrier" in stack for stack in stacks] == [True, True, False]


@pytest.mark.spawns
def test_profiles_of_two_ranks_name_the_late_one_and_are_traces(run):
    said = run("profile_ranks.py", "--slow", 1, by_torchrun=2)
    assert said.splitlines()[-1] == "late: rank 1"
    (load_0, _, average_0), (load_1, _, average_1) = re.findall(
        r"load ([\d.]+) ms, compute ([\d.]+) ms, average ([\d.]+) ms", said
    )
    assert float(load_1) > float(load_0)
    assert float(average_0) > float(average_1)
    for rank in range(2):
        trace = json.loads((run.folder / f"trace-{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("load") == 3
        assert "gloo:all_reduce" in names


@pytest.mark.spawns
def test_queue_and_pipe_bring_back_what_shared_memory_shows_at_once(run):
    assert run("sharing.py").splitlines() == [
        "shared memory: [1.0, 1.0]",
        "a copy: [0.0, 0.0]",
        "queue: [[1.0, 0.0], [0.0, 1.0]]",
        "pipe: [[1.0, 0.0], [0.0, 1.0]]",
    ]


@pytest.mark.spawns
def test_the_six_steps_are_each_seen_and_train_lesson_05s_network_as_one_process_does(run):
    said = run("six_steps.py", "--steps", 5, by_torchrun=2)
    assert all(said.count(f"step {number}: ") == 2 for number in range(1, 7)), said
    model = of_lesson("05", inputs=28 * 28)["whole_network"]()
    train_set = course.datasets.load("digits").train
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=0, drop_last=True)
    losses = losses_of_one_process(model, itertools.islice(DataLoader(train_set, 64, sampler=sampler), 5), 0.03)
    assert torch.load(run.folder / "losses.pt") == pytest.approx(losses, abs=1e-6)


@pytest.mark.spawns
def test_data_parallel_logs_the_losses_of_one_process(run):
    run("data_parallel.py")
    torch.manual_seed(0)
    model = course.models.ConvNet()
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(course.datasets.load("digits").train, 48, shuffle=True, drop_last=True, generator=order)
    losses = losses_of_one_process(model, itertools.islice(loader, 8), 0.03)
    assert torch.load(run.folder / "losses.pt")[:8] == pytest.approx(losses, abs=1e-4)


def written_by(lesson, folder):
    """Write the script that a lesson writes into a folder; its path."""
    (notebook,) = FOLDER.glob(f"{lesson}_*.ipynb")
    path = folder / f"lesson_{lesson}.py"
    path.write_text(course.written(notebook))
    return path


def losses_in(file):
    return torch.load(file) if file.suffix == ".pt" else json.loads(file.read_text())


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("lesson", "options", "tolerance"),
    few(
        [
            ("20", ["--out", "{n}.json"], 0.02),  # gradients of 16 bits, which are added in another order
            ("21", ["--tp", "{n}", "--out", "{n}.json"], 1e-4),
            ("22", ["{n}.pt"], 1e-4),
            ("23", ["{n}.pt"], 1e-4),
            ("24", ["{n}.pt"], 1e-4),
        ],
        lambda case: case[0] == "21",
    ),
)
def test_the_script_of_a_lesson_has_the_same_losses_on_two_ranks_as_on_one(lesson, options, tolerance, run):
    script, losses = written_by(lesson, run.folder), {}
    for n in (1, 2):
        given = [option.format(n=n) for option in options]
        run(script, *given, by_torchrun=n)
        losses[n] = torch.tensor(losses_in(run.folder / given[-1])).flatten()
    assert (losses[1] - losses[2]).abs().max() <= tolerance * losses[1].abs().max()
    assert losses[2].isfinite().all()


@pytest.mark.spawns
def test_a_resumed_run_ends_with_the_weights_of_lesson_14(run, ranks, tmp_path):
    for options in (("--stop-after", 1), ()):
        said = run("checkpoint_torchrun.py", "--epochs", 2, *options, by_torchrun=2)
    assert said.startswith("1 epochs are done")
    state = course.exercises.find("training_state").solution
    train = of_lesson("14", epochs=2, state_of=state)["train"]
    lesson = labkit.launch(train, tmp_path / "lesson.pt", on=ranks, seed=0, live=False)
    assert apart(torch.load(run.folder / "weights.pt"), lesson.results[0]) <= 1e-5


@pytest.mark.spawns
def test_a_run_that_is_told_to_stop_saves_the_same_step_on_all_ranks_and_loses_none(run):
    process = run.start("stop_and_save.py", "--steps", 10**6, by_torchrun=2)
    try:
        assert "goes on after step 0\n" in iter(process.stdout.readline, "step 40\n")
        process.send_signal(signal.SIGTERM)  # torchrun passes it on
        said, errors = process.communicate(timeout=LONG_S)
    finally:
        process.kill()
    stopped = re.findall(r"rank (\d) was told to stop, and saved step (\d+)", said)
    assert sorted(rank for rank, _ in stopped) == ["0", "1"], errors[-3000:]
    (step,) = {int(step) for _, step in stopped}
    end = ("--steps", step + 5)
    assert run("stop_and_save.py", *end, by_torchrun=2).startswith(f"goes on after step {step}\n")
    resumed = torch.load(run.folder / "weights.pt")
    run("stop_and_save.py", *end, "--folder", "another", by_torchrun=2)
    assert apart(torch.load(run.folder / "weights.pt"), resumed) == 0


@pytest.mark.spawns
def test_shards_are_read_by_another_number_of_ranks(run):
    said = run("checkpoint_sharded.py", "--steps", 3, by_torchrun=2)
    assert said.count("took 96 images") == 2, "each rank takes its own half of three batches of 64"
    by_two = torch.load(run.folder / "weights.pt")
    run("checkpoint_sharded.py", "--steps", 0, by_torchrun=3)
    by_three = torch.load(run.folder / "weights.pt")
    assert apart(by_two, by_three) == 0
    torch.manual_seed(0)
    model = course.models.ConvNet()
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    images, labels = course.datasets.load("digits").train.tensors()
    for step in range(3):
        batch = slice(64 * step, 64 * (step + 1))
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert apart(by_three, start) > 1e-3
    assert apart(by_three, model.state_dict()) <= 1e-4
