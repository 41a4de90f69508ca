"""Lesson 15's batch scripts and environments: what is said of them holds, on a real SLURM too."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
import torch

import course
from course import batch_scripts, exercises
from course.batch_scripts import SCRIPTS, symptom
from course.launch_environments import ENVIRONMENTS, PLACES, first_host
from tests.conftest import LONG_S
from tests.lessons.test_notebooks import NOTEBOOKS

MEND = exercises.find("mended_line").solution
PLACE = exercises.find("place_in_job").solution


def with_line(letter, number, line):
    """A script with another line in the place of one of its own."""
    lines = SCRIPTS[letter].splitlines()
    return "\n".join([*lines[: number - 1], line, *lines[number:], ""])


SYMPTOMS = {
    "A": "2 ranks would train (1 on gpu07, 1 on gpu08), and 8 GPUs are to be used",
    "B": "all agents have --node-rank=0",
    "C": "rank 4, on gpu08, looks for rank 0 at localhost, which is gpu08; rank 0 is on gpu07",
    "D": "1 agent of torchrun runs, on gpu07, and waits for 1 more",
    "E": "rank 1 looks for port",
    "F": "SLURM signals the tasks, which end at once",
}


@pytest.mark.spawns
@pytest.mark.parametrize("letter", SCRIPTS)
def test_each_script_has_its_own_fault_and_is_mended_in_one_line(letter):
    assert SYMPTOMS[letter] in symptom(SCRIPTS[letter])
    assert symptom(with_line(letter, *MEND(letter))) == ""


AGENTS = "--nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR"
RENDEZVOUS = "--nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT"


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("letter", "number", "line"),
    [
        ("A", 7, f"srun torchrun {RENDEZVOUS} train.py"),
        ("A", 3, "#SBATCH --ntasks-per-node=4 --cpus-per-task=8"),
        ("B", 7, f"srun bash -c 'torchrun {AGENTS} --master-port=29500 train.py'"),
        ("C", 5, "export MASTER_ADDR=$(hostname)"),
        ("D", 7, f"srun torchrun {RENDEZVOUS} train.py"),
        ("E", 6, "export MASTER_PORT=$((20000 + RANDOM % 10000))\nsrun python train.py"),
        ("F", 6, "#SBATCH --signal=B:SIGUSR1@300   # five minutes"),
    ],
)
def test_other_right_lines_are_right_too(letter, number, line):
    assert symptom(with_line(letter, number, line)) == ""


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("letter", "number", "line", "said"),
    [
        ("A", 3, "# SBATCH --ntasks-per-node=4", "2 ranks would train"),
        ("A", 7, "python train.py", "1 rank would train (1 on gpu07)"),
        ("A", 7, "exec srun -n 8 env NCCL_DEBUG=INFO python3 train.py", "srun: error: Unable to create step"),
        ("A", 7, "echo nothing", "nothing starts train.py"),
        ("A", 7, "srun python train.py '", "bash says: "),
        ("A", 5, "export MASTER_ADDR=gpu07\n#SBATCH --ntasks-per-node=4", "2 ranks would train"),
        ("B", 7, f"srun torchrun {AGENTS.replace('$SLURM_NODEID', '1')} train.py", "all agents have --node-rank=1"),
        ("B", 7, "srun torchrun --nproc-per-node=4 train.py", "2 agents of torchrun run, on gpu07 gpu08"),
        ("C", 5, "MASTER_ADDR=gpu07", "rank 0 has no MASTER_ADDR"),
        ("C", 5, "export MASTER_ADDR=login1", "rank 0, on gpu07, looks for rank 0 at login1"),
        ("D", 7, f"srun torchrun {RENDEZVOUS.replace('$MASTER_ADDR', 'localhost')} train.py", "localhost, which is"),
        ("E", 6, "srun python train.py", "rank 0 has no MASTER_PORT"),
        ("F", 6, "#SBATCH --open-mode=append", "has a trap for USR1, and SLURM is not asked"),
    ],
)
def test_wrong_lines_are_told_by_what_would_come_of_them(letter, number, line, said):
    assert said in symptom(with_line(letter, number, line))


@pytest.mark.spawns
def test_a_job_without_gpus_and_a_signal_that_nobody_waits_for_are_told():
    mended = {letter: with_line(letter, *MEND(letter)) for letter in SCRIPTS}
    without = mended["A"].replace("#SBATCH --gpus-per-node=4\n", "")
    assert symptom(without) == "the job has 0 GPUs on each node, and 4 ranks there"
    for option in ("--gres=gpu:4", "--gpus-per-node=a100:4", "--gpus=8", "--gpus-per-task=1"):
        assert symptom(mended["A"].replace("--gpus-per-node=4", option)) == ""
    in_front = mended["F"].replace(" &\n", "\n")
    assert "bash runs a trap only when the command in front has ended" in symptom(in_front)
    once = mended["F"].replace("wait  # until train.py has saved\n", "")
    assert "is waited for once, and `wait` returns at the signal" in symptom(once)
    without_trap = re.sub("trap .*\n", "", mended["F"])
    assert "the batch script gets a signal for which it has no trap" in symptom(without_trap)


def test_scripts_are_shown_with_numbered_lines():
    shown = batch_scripts.show()
    assert " 3  #SBATCH --ntasks-per-node=1" in repr(shown)
    assert shown._repr_html_().count("<pre") == len(SCRIPTS) == 6


def test_a_list_of_hosts_begins_with_its_first():
    lists = {"gpu07": "gpu07", "gpu[07-08]": "gpu07", "n[3,5-9]-ib,m1": "n3-ib", "a1,b[1-2]": "a1"}
    assert {text: first_host(text) for text in lists} == lists
    with pytest.raises(ValueError, match="a list of hosts begins with a name, got ''"):
        first_host("")


def test_each_of_the_eight_environments_has_its_place():
    assert len(ENVIRONMENTS) == len(PLACES) == 8
    for launcher, environment in ENVIRONMENTS.items():
        assert PLACE(dict(environment))[:3] == PLACES[launcher][:3], launcher
        assert all(isinstance(text, str) for text in environment.values())


# On a real SLURM


def submit(slurm, folder, text, *options):
    """Give a script to sbatch, wait until its job is over, and return what it has printed and its state."""
    script = folder / "job.sbatch"
    script.write_text(text)
    job = slurm.run("sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/out", *options, str(script))
    job, deadline = job.strip(), time.monotonic() + LONG_S
    while (state := slurm.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()) in (
        "PENDING",
        "RUNNING",
        "COMPLETING",
    ):
        assert time.monotonic() < deadline, f"job {job} is still {state}"
        time.sleep(0.1)
    return (folder / "out").read_text(), state


def on_this_cluster(text):
    """A script without what this machine's SLURM has not got: GPUs."""
    return re.sub("#SBATCH --gpus-per-node.*\n", "", text)


def source_of(cell):
    (source,) = (c.source for c in NOTEBOOKS["15"].cells if c.id == cell)
    return source


def script_of(cell):
    """The batch script that a cell of lesson 15 shows."""
    (script,) = re.findall(r"```bash\n(.*?)```", source_of(cell), re.DOTALL)
    return script


@pytest.mark.spawns
@pytest.mark.parametrize("cell", ["srun-per-rank", "torchrun-per-node"])
def test_the_scripts_of_the_lesson_have_no_fault(cell):
    assert symptom(script_of(cell).replace("cp images.pt", "true")) == ""


@pytest.mark.cluster
@pytest.mark.wide
def test_both_scripts_of_the_lesson_train_to_the_same_weights(slurm, tmp_path):
    weights = {}
    for cell in ("srun-per-rank", "torchrun-per-node"):
        folder = tmp_path / cell
        folder.mkdir()
        images, labels = course.datasets.load("digits").train.tensors()
        torch.save({"images": images, "labels": labels}, folder / "images.pt")
        (folder / "train.py").write_text(source_of("script").partition("\n")[2])
        (folder / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")  # these nodes' names lead nowhere
        (folder / "scontrol").chmod(0o755)
        text = on_this_cluster(script_of(cell))
        for many, few in (("per-node=4", "per-node=1"), ("per-task=8", "per-task=2"), ("per-task=32", "per-task=4")):
            text = text.replace(many, few)
        path = f"set -e\nexport PATH={folder}:{Path(sys.executable).parent}:$PATH"
        text = text.replace("train.py ", "train.py --steps 5 ").replace("set -e", path)
        text = text.replace("--rdzv-id", f"--log-dir={folder}/log --rdzv-id")  # or it leaves a folder in /tmp
        text = text.replace("/tmp/images", f"{folder}/copied").replace("CPUS_PER_TASK / 4", "CPUS_PER_TASK / 2")
        said, state = submit(slurm, folder, text)
        assert state == "COMPLETED", said
        weights[cell] = {torch.load(file)["sha256"] for file in (folder / "results").glob("rank-*.pt")}
    one, other = weights.values()
    assert one == other
    assert len(one) == 1


@pytest.mark.cluster
def test_a_process_finds_its_place_under_srun_and_in_an_salloc(slurm, tmp_path):
    write = f'env -0 >{tmp_path}/"$1".${{SLURM_PROCID:-none}}'
    slurm.run("srun", "-N2", "--ntasks-per-node=2", "sh", "-c", write, "sh", "srun")
    slurm.run("salloc", "-Q", "-N2", "--ntasks-per-node=2", "sh", "-c", write, "sh", "salloc")
    (tmp_path / "job.sbatch").write_text(f"#!/bin/bash\nset -- batch\n{write}\n")
    submit(slurm, tmp_path, (tmp_path / "job.sbatch").read_text(), "-N2", "--ntasks-per-node=2")
    places = {}
    for file in sorted(tmp_path.glob("*.*")):
        if file.name != "job.sbatch":
            pairs = (pair.split("=", 1) for pair in file.read_text().split("\0") if "=" in pair)
            places[file.name] = tuple(PLACE(dict(pairs)))
    assert places == {
        **{f"srun.{rank}": (rank, rank % 2, 4, "node1") for rank in range(4)},
        "salloc.none": (0, 0, 1, "localhost"),
        "batch.0": (0, 0, 1, "localhost"),
    }
