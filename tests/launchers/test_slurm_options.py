"""Which options of sbatch `labkit.Slurm` takes, and how they are written: one table, held against `sbatch --help`."""

from __future__ import annotations

import re
import subprocess

import pytest

import labkit
from labkit.launchers.slurm import options
from tests.tools import make_sbatch_options

TABLE = {**options.OURS, **options.REFUSED, **dict.fromkeys(options.PASSED_ON, "")}


def test_no_option_is_in_the_table_twice():
    assert len(TABLE) == len(options.OURS) + len(options.REFUSED) + len(options.PASSED_ON)
    assert options.LISTS <= options.PASSED_ON
    lines = options.table().splitlines()
    assert len(lines) == len(TABLE)
    assert "--array                refused: a run is one job; launch once for each member, with wait=False" in lines
    assert "--nodelist             passed on, also as a list" in lines


@pytest.mark.cluster
def test_every_option_that_sbatch_has_is_in_the_table_which_is_current():
    said, version = make_sbatch_options.sbatch("--help"), make_sbatch_options.sbatch("--version").strip()
    named = make_sbatch_options.offered(said)
    assert {"array", "extra-node-info", "gpus-per-task", "wrap", "version"} <= set(named)
    assert (named["account"], named["hold"], named["export"]) == ("=name", "", "[=names]")
    assert len(named) > 80
    new = make_sbatch_options.unknown(said)
    assert not new, "pass them on, or refuse them with what to do instead (slurm/options.py)"
    kept = make_sbatch_options.TABLE.read_text(encoding="utf-8")
    if kept.startswith(f"Options of {version}\n"):  # of another version only the names count
        assert kept == make_sbatch_options.table(version, said), "python -m tests.tools.make_sbatch_options"


def test_the_table_has_every_option_once_and_marks_one_that_is_new():
    """Whatever version of SLURM has made it; the tests' machine may have none."""
    kept = make_sbatch_options.TABLE.read_text(encoding="utf-8")
    listed = re.findall(r"^--([a-z-]+)\S*(?: string\])? +(\S.*)$", kept, re.MULTILINE)
    assert dict(listed) == options.classes(), "python -m tests.tools.make_sbatch_options"
    assert len(listed) == len(options.classes())
    said = "Parallel run options:\n  -z, --zeal=hours            work at night\n      --hold                  wait\n"
    assert make_sbatch_options.unknown(said) == {"zeal"}
    assert re.search(r"^--zeal=hours +NEW: give it a class$", make_sbatch_options.table("x", said), re.MULTILINE)


@pytest.mark.parametrize("name", sorted({**options.OURS, **options.REFUSED} - {"nodes": ""}.keys()))
def test_what_would_change_what_a_job_is_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"Slurm\(\) (sets|does not take) {re.escape(name)}\b.*\n.*help\("):
        labkit.Slurm(**{name.replace("-", "_"): "1"})


@pytest.mark.parametrize("short", ["arr", "a", "test_o", "wra", "N", "cl"])
def test_a_beginning_of_a_name_is_not_taken_for_the_whole_as_sbatch_would(short):
    with pytest.raises(ValueError, match=r"(?s)is short for .*; write it out"):
        labkit.Slurm(**{short.lower(): "0-2"})


@pytest.mark.parametrize("value", ["USR2@60", "B:USR2", "R:SIGUSR2@10", "12@30"])
def test_the_signal_by_which_ranks_are_asked_where_they_stand_is_not_for_others(value):
    with pytest.raises(ValueError, match="labkit asks ranks where they stand by SIGUSR2; let SLURM send USR1"):
        labkit.Slurm(signal=value)
    assert labkit.Slurm(signal="USR1@60").options["signal"] == "USR1@60"


@pytest.mark.parametrize("value", ["cyclic", "cyclic:block", "plane=2", "arbitrary"])
def test_ranks_that_follow_each_other_are_not_spread_over_nodes(value):
    """The first two of four, launched on a session of 2 × 2, would each take themselves for alone with the other."""
    with pytest.raises(ValueError, match="distribution=.*ranks follow each other on each node"):
        labkit.Slurm(distribution=value)
    assert labkit.Slurm(distribution="block:cyclic").options["distribution"] == "block:cyclic"


def test_values_are_written_as_sbatch_reads_them(tmp_path):
    on = labkit.Slurm(nodelist=["node1", "node2"], mem=4000, nice=0, exclusive=True, comment=None, hold=False)
    assert on.options == {
        "requeue": True,
        "nodelist": "node1,node2",
        "mem": "4000",
        "nice": "0",
        "exclusive": True,
        "hold": False,
    }
    assert labkit.Slurm(export_file=tmp_path / "x").options["export-file"] == str(tmp_path / "x")


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (
            {"constraint": ["a", "b"]},
            TypeError,
            r"constraint takes one value, got \['a', 'b'\]; write it",
        ),
        (
            {"gres": {"gpu": 2}},
            TypeError,
            "gres is a text or a number, as sbatch takes it, .*; got a dict",
        ),
        ({"nodelist": ["a", True]}, TypeError, "nodelist is a text or a number"),
        ({"comment": "a\x1bb"}, ValueError, "an option of sbatch is one line"),
        ({"setup": "module load x\n#SBATCH --array=0-2"}, ValueError, "give options of sbatch as arguments"),
        ({"folder": "runs\\j"}, ValueError, "SLURM cannot write into a folder with a backslash"),
    ],
)
def test_what_sbatch_could_not_read_is_refused_with_the_reason(given, error, said):
    with pytest.raises(error, match=said):
        labkit.Slurm(**given)


VALUES = [
    "plain",
    "two words",
    "it's",
    'a "quoted" one',
    "back\\slash",
    "trailing\\",
    "#hash",
    "a;b $HOME `x`",
    "%j",
]


@pytest.mark.cluster
def test_what_is_written_arrives(slurm, tmp_path):
    for value in VALUES:
        script = tmp_path / "job.sbatch"
        lines = options.lines({"comment": value, "output": "/dev/null", "hold": True})
        text = "\n".join(["#!/bin/bash", *lines, "true"])
        script.write_text(text)
        plain = tmp_path / "plain.sbatch"
        plain.write_text("#!/bin/bash\ntrue")
        for submitted in ([script], [*options.read_back(text), plain]):
            job = slurm.run("sbatch", "--parsable", *map(str, submitted)).strip()
            said = subprocess.run(
                ["scontrol", "show", "job", job], env=slurm.environment, capture_output=True, text=True, check=True
            ).stdout
            slurm.run("scancel", job)
            assert re.search(r"Comment=(.*?)\s*$", said, re.MULTILINE)[1] == value


def test_a_folder_is_resolved_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    on, torchrun = labkit.Slurm(folder="runs"), labkit.Torchrun(folder="~/runs")
    monkeypatch.chdir("/")
    assert on.job("x", None).directory.path.parent == tmp_path / "runs"
    assert str(torchrun.folder) == "/home/me/runs"


def test_what_torchrun_and_submitit_call_an_argument_is_refused_with_its_name_here():
    for name, now in {
        "nproc_per_node": "ranks_per_node",
        "tasks_per_node": "ranks_per_node",
        "nnodes": "nodes",
    }.items():
        with pytest.raises(TypeError, match=f"Slurm has no {name}: it is called {now} here"):
            labkit.Slurm(**{name: 2})
