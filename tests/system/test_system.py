"""What the system says: whether a process was killed because memory had run out."""

from __future__ import annotations

import pytest

from labkit.system.out_of_memory import OutOfMemoryKills
from tests.support import fake_system

SYSTEMS = {
    "a service": ("0::/slurm/job_5/step_0\n", "sys/fs/cgroup/slurm/job_5/step_0/memory.events"),
    "a container": ("0::/\n", "sys/fs/cgroup/memory.events"),
}


@pytest.mark.parametrize("kind", SYSTEMS)
def test_what_is_killed_in_ones_own_cgroup_and_not_elsewhere_was_killed_for_want_of_memory(kind, tmp_path):
    root = fake_system.system(tmp_path, *SYSTEMS[kind])
    fake_system.count(root, cgroup=2, host=2)
    kills = OutOfMemoryKills(root)
    assert kills.seen() == "", "that was before"
    fake_system.count(root, cgroup=2, host=7)
    assert kills.seen() == "", "it was elsewhere on the machine"
    fake_system.count(root, cgroup=3, host=8)
    assert kills.seen() == "killed"


WITHOUT = {
    "no cgroups": "",
    "the root, which counts nothing": "0::/\n",
    "version 1": "4:memory:/a/b\n2:cpu,cpuacct:/\n0::/\n",
    "a line that cannot be read": "x\n",
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_where_only_the_machine_counts_a_kill_may_have_been_anybodys(kind, tmp_path):
    root = fake_system.system(tmp_path, WITHOUT[kind], counter="")
    kills = OutOfMemoryKills(root)
    assert kills.seen() == ""
    fake_system.count(root, host=1)
    assert kills.seen() == "perhaps"


def test_where_nothing_counts_nothing_is_said(tmp_path):
    assert OutOfMemoryKills(tmp_path).seen() == ""


def test_a_cgroup_that_is_gone_leaves_the_machines_count(tmp_path):
    root = fake_system.v2(tmp_path)
    kills = OutOfMemoryKills(root)
    (root / (root / "counter").read_text()).unlink()
    (root / "counter").write_text("")
    fake_system.count(root, host=1)
    assert kills.seen() == "perhaps"
