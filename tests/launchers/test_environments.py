"""What launchers have set in this environment, which other jobs do not get."""

from __future__ import annotations

from labkit.launchers.environments import without_launchers

SLURMS = "SLURM_PROCID SLURM_NODEID SLURM_STEP_TASKS_PER_NODE SLURM_RESTART_COUNT SLURM_JOB_ID SLURMD_NODENAME"
OF_A_JOB = "SLURM_JOB_ACCOUNT SLURM_JOB_PARTITION SLURM_JOB_QOS SRUN_CPUS_PER_TASK SBATCH_MEM_BIND PMI_RANK"
TORCHRUNS = "TORCHELASTIC_RUN_ID RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR GROUP_RANK ROLE_WORLD_SIZE"
OURS = "PATH SLURM_CONF SLURM_JWT NCCL_DEBUG MY_RANK SBATCH_TIMELIMIT SBATCH_CONSTRAINT SBATCH_MEM_PER_CPU"
CHOSEN = [
    f"{command}_{name}"
    for command in ("SBATCH", "SLURM", "SALLOC")
    for name in ("ACCOUNT", "PARTITION", "QOS", "RESERVATION", "WCKEY")
]


def test_ranks_of_another_job_get_what_users_and_sites_choose_and_nothing_that_launchers_have_set():
    kept = dict.fromkeys([*OURS.split(), *CHOSEN], "1")
    set_here = dict.fromkeys(f"{SLURMS} {OF_A_JOB} {TORCHRUNS} LABKIT_AGENT".split(), "1")
    assert without_launchers({**kept, **set_here}) == kept


def test_an_interface_that_labkit_has_chosen_goes_and_the_users_own_stays():
    chosen = {"GLOO_SOCKET_IFNAME": "lo"}
    interfaces = "GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME"
    assert without_launchers({**chosen, "LABKIT_INTERFACES": interfaces}) == {}
    assert without_launchers({**chosen, "LABKIT_INTERFACES": ""}) == chosen
