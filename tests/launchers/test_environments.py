"""The variables by which ranks know which rank they are, and what of them other jobs do not get."""

from __future__ import annotations

import os

import pytest

from labkit.launchers import environments
from labkit.launchers.environments import counts_by_node, launcher_here, without_launchers
from labkit.protocol.job import RankInfo

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_RESTART_COUNT": "3",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
LABKIT = {
    "LABKIT_RANK": "1",
    "LABKIT_LOCAL_RANK": "0",
    "LABKIT_WORLD_SIZE": "3",
    "LABKIT_LOCAL_WORLD_SIZE": "1",
    "LABKIT_ATTEMPT": "4",
}


@pytest.mark.parametrize(
    ("variables", "info", "attempt"),
    [
        (SLURM, RankInfo(5, 1, 7, 2), 3),
        (SLURM | TORCHRUN | LABKIT, RankInfo(1, 0, 3, 1), 4),
    ],
    ids=["srun", "Ray on what torchrun or SLURM has started"],
)
def test_a_rank_knows_by_its_launchers_variables_which_it_is(variables, info, attempt, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(variables))
    here = launcher_here()
    assert RankInfo(*(here.number(what) for what in RankInfo._fields)) == info
    assert here.attempt() == attempt


def test_what_no_launcher_has_started_says_so(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "0"})
    with pytest.raises(KeyError, match="no launcher has started this process: none of LABKIT_RANK, SLURM_"):
        launcher_here()


def test_ranks_of_another_job_get_nothing_of_what_launchers_have_set_here():
    ours = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "token", "NCCL_DEBUG": "INFO", "MY_RANK": "1"}
    more = {
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n",
        "SBATCH_MEM_BIND": "local",
        "PMI_RANK": "0",
        "MASTER_ADDR": "a",
    }
    more |= {
        "GROUP_RANK": "0",
        "ROLE_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "LABKIT_RANK_FOLDER": "/tmp/y",
    }
    set_here = {"GLOO_SOCKET_IFNAME": "lo", "LABKIT_INTERFACES": "GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME"}
    assert without_launchers({**ours, **SLURM, **TORCHRUN, **LABKIT, **more, **set_here}) == ours
    given = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert without_launchers({**given, "LABKIT_INTERFACES": ""}) == given, "the reader's own choice"


def test_what_a_user_or_a_site_chooses_for_all_jobs_is_kept():
    names = ("ACCOUNT", "PARTITION", "QOS", "RESERVATION", "WCKEY")
    chosen = {f"{command}_{name}": "mine" for command in ("SBATCH", "SLURM", "SALLOC") for name in names}
    chosen |= {"SBATCH_TIMELIMIT": "10", "SBATCH_CONSTRAINT": "a100", "SBATCH_MEM_PER_CPU": "2G"}
    of_a_job = {"SLURM_JOB_ACCOUNT": "x", "SLURM_JOB_PARTITION": "x", "SLURM_JOB_QOS": "x", "SRUN_CPUS_PER_TASK": "2"}
    assert without_launchers({**chosen, **of_a_job, **SLURM}) == chosen


def test_every_launcher_has_a_table_and_its_mark_belongs_to_it():
    for launcher in environments.LAUNCHERS:
        names = {launcher.mark, launcher.rank, launcher.local_rank, launcher.world_size, launcher.local_world_size}
        assert not without_launchers(dict.fromkeys(names, "1")), launcher


@pytest.mark.parametrize(("text", "counts"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])])
def test_counts_by_node_are_read_as_slurm_writes_them(text, counts):
    assert counts_by_node(text) == counts
