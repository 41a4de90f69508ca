"""What launchers have set in this environment, which other jobs do not get."""

from __future__ import annotations

from labkit.launchers.environments import without_launchers

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_RESTART_COUNT": "3",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
LABKIT = {"LABKIT_AGENT": "1"}


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
